"""All gradients of a compact, continuous spline in one walk, see trade.cu, and what that leaves, see bridge.cu."""

import math
from pathlib import Path

import torch
from torch import Tensor

from ...cuda import launch
from ...cuda.compile import Defines
from . import cuda_reel
from .cuda_walk import Walk, defines_of
from .tracks import Tracks

SOURCE, BRIDGE = (Path(__file__).with_name(name) for name in ("trade.cu", "bridge.cu"))
# warps of a multiprocessor
RESIDENT = 16
# rows that a warp has on their way at a time
CHUNK = 8
# keys whose rows are summed in the working precision
LEG = 256
# of the second-level cache, what the rows may take that are read and written at random
_SHARE = 0.2
# queries of a warp that looks at what is between their nodes
_PIECE = 1024


def serves(tracks: Tracks, dtype: torch.dtype) -> bool:
    """Whether sums and slopes of these tracks can go this way: several nodes with steps of the slope alone."""
    if not tracks.compact or tracks.nodes == 1 or tracks.powers != 2 or tracks.rate or dtype != torch.float32:
        return False
    jumps = tracks.tables[0][tracks.nodes : -1 : 2]
    return not any(jumps)


def totals_of(keys: int, dims: int, width: int, stride: int) -> int:
    """Numbers that the sums of all legs of a head take, and a bit for every key."""
    return (math.ceil(keys / LEG) * (width + 1) + math.ceil(keys / 32)) * dims * (stride // width)


def macros(tracks: Tracks, width: int, parts: int, along: bool = False) -> Defines:
    """Those of a walk, but for its warps."""
    walking = defines_of(
        tracks, torch.float32, width, parts=parts, added=True, multiplied=True, ordered=False, along=along
    )
    own = {"RESIDENT": RESIDENT, "CHUNK": CHUNK}
    return tuple((name, own.get(name, value)) for name, value in walking)


def run(walk: Walk, values: Tensor, weight: Tensor | None, along: bool, *gradients: Tensor) -> None:
    """Add all gradients, of values, weights, keys and queries, given the walk of queries for the keys.

    Those of keys and queries stand where these are, or `along` their lines.
    """
    if not (walk.problems and walk.number and walk.count and walk.dims and walk.stride):
        return
    by_value, by_weight, by_key, by_query = gradients
    tracks, parts = walk.tracks, walk.parts
    defines = macros(tracks, walk.width, parts, along)
    # rows of keys are read and written
    head = walk.head() + walk.number * walk.width * walk.rows.element_size()
    length = walk.length(walk.number, head, 1, walk.dims, RESIDENT, _SHARE)
    length = math.ceil(length / LEG) * LEG
    runs, lines = math.ceil(walk.number / length), walk.problems * walk.dims
    table, sizes = walk.table(tracks), (walk.number, walk.count, walk.dims)
    points = (*walk.targets[:2], *walk.sources[:2])
    rows = (values, weight, walk.rows, walk.extra, table, walk.bandwidth, walk.tau)
    with launch.on(walk.rows.device):
        if walk.sources.windings is not None:
            cuda_reel.run(walk, defines, values, weight, *gradients)
        # not before, as those lines need memory of their own
        totals = walk.rows.new_empty(parts * lines * math.ceil(walk.number / LEG) * (walk.width + 1))
        words = math.ceil(walk.number / 32)
        tied = torch.zeros(parts * lines * words, dtype=torch.int32, device=walk.rows.device)
        moments = walk.moments(tracks, defines) if runs > 1 else None
        launch.Kernel(SOURCE, "trade", defines)(
            (lines * runs, parts), 32, *points, *rows, moments, by_value, by_weight, by_key, by_query, totals, tied,
            walk.problems, *sizes, length, LEG, walk.sources.windings,
        )  # fmt: skip
        launch.Kernel(BRIDGE, "settle", defines)(
            (lines * math.ceil(words / 32), parts), 32, *points, *rows, tied, by_key, by_query, walk.problems, *sizes
        )
        launch.Kernel(BRIDGE, "bridge", defines)(
            (lines * math.ceil(walk.count / _PIECE), parts), 32, *points, *rows, totals, by_query, walk.problems,
            *sizes, LEG, _PIECE, walk.sources.windings,
        )  # fmt: skip
