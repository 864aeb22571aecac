"""All gradients around wound lines, see reel.cu: rows of queries and of keys are read once."""

import math
from pathlib import Path

import torch
from torch import Tensor

from ...cuda import launch
from ...cuda.compile import Defines
from . import cuda_coil, room
from .cuda_coil import CELLS, pitch
from .cuda_relay import defines_of, rounds_of
from .cuda_walk import Walk
from .tracks import Tracks

SOURCE, TALLY, TIES = (Path(__file__).with_name(name) for name in ("reel.cu", "tally.cu", "ties.cu"))
# warps of a multiprocessor, of one block: with two, rows of twice as many heads take the cache from each other
WARPS = 16
# points from which on it is known to be faster
_LEAST = 16384
# points whose rows are summed by themselves; of a block that does, rows at a time and warps, a line each
_CHUNK, _TILE, _LINES = 4096, 128, 16
# rows of a line that walks begin with, as in wheel.cu
_STARTS = 3 * CELLS + 2
# channels of a warp, at most, and bytes of shared memory that a block has beside those of warps, at most
_WIDEST, _BATON = 64, 22528


def serves(tracks: Tracks, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether lines are wound: where those of a forward pass are, and longer, with more room in shared memory."""
    enough = query.shape[1] + key.shape[1] >= 2 * _LEAST
    fits = WARPS * station(_WIDEST) + _BATON <= room.device(query.device).shared
    return enough and fits and cuda_coil.serves(plain(tracks), query, key, value)


def room_of(rows: int, columns: int, dims: int, width: int) -> int:
    """Numbers that a head takes: what walks begin with, in float64, the sums that is made of, and a bit for a key."""
    each = (CELLS + 2) * (width + 1)
    chunks = math.ceil(columns / _CHUNK) + 2 * math.ceil(rows / _CHUNK)
    return dims * (2 * _STARTS * (width + 1) + each * chunks + math.ceil(columns / 32) + 4)


def macros(walking: Defines) -> Defines:
    """From the macros of a walk with slopes."""
    return *defines_of(walking, WARPS, 1), ("CELLS", CELLS)


def run(walk: Walk, walking: Defines, values: Tensor, weight: Tensor | None, *gradients: Tensor) -> None:
    """Add the gradients of lines that are wound, given the walk of queries for the keys; see `cuda_trade.run`."""
    by_value, by_weight, by_key, by_query = gradients
    windings, each, lines = walk.sources.windings, pitch(plain(walk.tracks)), walk.problems * walk.dims
    # rows of keys are read and written
    head = walk.head() + walk.number * walk.width * walk.rows.element_size()
    defines = macros(walking)
    starts = torch.empty(lines * _STARTS * (walk.width + 1), dtype=torch.float64, device=walk.rows.device)
    tied = torch.zeros(lines * math.ceil(walk.number / 32), dtype=torch.int32, device=walk.rows.device)
    reel = launch.Kernel(SOURCE, "reel", defines)
    points = (*walk.targets[:2], *walk.sources[:2])
    rows = (values, weight, walk.rows, walk.extra)
    sizes = (walk.number, walk.count, walk.dims)
    with launch.on(walk.rows.device):
        _tally(walk, defines, walk.targets.points, values, weight, starts, False)
        _tally(walk, defines, walk.sources.points, walk.rows, walk.extra, starts, True)
        for first, heads in rounds_of(walk, head, 1):
            reel(
                (heads * walk.dims,), 32 * WARPS, *points, *rows, windings, starts, walk.table(walk.tracks),
                walk.bandwidth, walk.tau, each, by_value, by_weight, by_key, by_query, tied, *sizes, first,
                shared=WARPS * station(walk.width),
            )  # fmt: skip
        launch.Kernel(TIES, "untie", defines)(
            (lines * math.ceil(walk.number / 1024),), 32, *points, walk.targets.points.contiguous(),
            walk.sources.points.contiguous(), *rows, windings, walk.table(walk.tracks), walk.bandwidth, walk.tau, tied,
            by_key, by_query, *sizes,
        )  # fmt: skip


def _tally(
    walk: Walk, defines: Defines, points: Tensor, rows: Tensor, weight: Tensor | None, starts: Tensor, weighted: bool
) -> None:
    """What walks begin with, of keys, or of queries."""
    points, (problems, count, dims) = points.contiguous(), points.shape
    chunks, windings = math.ceil(count / _CHUNK), walk.sources.windings
    totals = rows.new_empty(problems * dims * chunks * (CELLS + 2) * (1 + weighted) * (walk.width + 1))
    defines = *defines, ("WEIGHTED", int(weighted))
    # two tiles, lists of their rows, and extra scalars by lanes
    shared = 2 * _TILE * 4 * walk.width + _LINES * (8 * _TILE + (1 + weighted) * (CELLS + 2) * 128)
    launch.Kernel(TALLY, "tally", defines)(
        (problems * chunks * math.ceil(dims / _LINES),), 32 * _LINES, points, windings, rows, weight, totals, count,
        dims, chunks, _CHUNK, shared=shared,
    )  # fmt: skip
    launch.Kernel(TALLY, "begin_reel", defines)((problems * dims,), walk.width + 32, windings, totals, starts, chunks)


def plain(tracks: Tracks) -> Tracks:
    """The tracks of the sums alone."""
    return tracks._replace(halves=False)


def station(width: int) -> int:
    """The shared memory of a warp: rows and items of a stretch, and its classes."""
    return 32 * (width * 4 + 16 + 8 + 4)
