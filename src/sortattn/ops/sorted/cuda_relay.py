"""Sums along whole tracks by blocks of warps, see relay.cu, which read every row of a source once."""

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...cuda import launch
from ...cuda.compile import Defines
from . import room
from .lines import narrow
from .quotient import look_at
from .tracks import Tracks

if TYPE_CHECKING:
    from .cuda_walk import Walk

SOURCE, HALVES = (Path(__file__).with_name(name) for name in ("relay.cu", "halves.cu"))
# warps of a multiprocessor, and with rows of 64 numbers of 16 bits
WARPS, _NARROW_WARPS = 24, 32
# of the sources, those that are summed by themselves for the halves of a folded line
_CHUNKS = 16
# rows of a block that fills them
_FILLED = 256
# dimensions and channels of a block that sums them, and its threads; as in halves.cu
_DIMS, _COLUMNS, _THREADS = 64, 64, 256


def serves(walk: "Walk") -> bool:
    """Whether sums for this walk can go this way, and should: with tracks for all warps, or rows of 16 bits."""
    tracks, size, device = walk.tracks, walk.rows.element_size(), room.device(walk.rows.device)
    enough = size == 2 or walk.problems * tracks.number * walk.dims * walk.parts >= 2 * device.processors
    return enough and takes(tracks, walk.width, size, device.shared)


def takes(tracks: Tracks, width: int, size: int, shared: int) -> bool:
    """Whether they have one node without ties and sources below; with rows that fit into shared memory."""
    several = tracks.both or tracks.compact or tracks.nodes > 1
    if several or tracks.rate or tracks.halves or tracks.folded < 0 or size > 4:
        return False
    return warps_of(width, size) * _station(tracks, width, size) <= shared


@functools.lru_cache(maxsize=256)
def defines_of(walking: Defines, warps: int, teams: int, dtype: torch.dtype = torch.float32) -> Defines:
    """From the macros of a walk, with so many warps and blocks of a multiprocessor, for rows of that type."""
    kept = (pair for pair in walking if pair[0] != "RESIDENT")
    return *kept, ("CREW", warps // teams), ("TEAMS", teams), *narrow(dtype)


def warps_of(width: int, size: int) -> int:
    """Warps of a multiprocessor, with numbers of that size: as many as have room in shared memory, and registers."""
    return _NARROW_WARPS if width * size <= 128 else WARPS


def teams_of(walk: "Walk", head: int, warps: int, most: int = 6, tracks: int = 0, share: float = 0.5) -> int:
    """Blocks of a multiprocessor: several, if the heads that are then walked at a time take no more of the cache.

    Smaller ones wait less: at 2,048 points a forward pass takes 0.96 ms with six of 4 warps and 1.13 with two of 12.
    """
    processors, cache, *_ = room.device(walk.rows.device)
    heads = processors / ((tracks or walk.tracks.number) * walk.dims)
    fitting = (teams for teams in range(most, 1, -1) if warps % teams == 0 and teams * heads * head <= share * cache)
    return next(fitting, 1)


def rounds_of(walk: "Walk", head: int, tracks: int = 0) -> list[tuple[int, int]]:
    """The first head of every launch, and how many: as few as fill the GPU, if the cache has no room for one more.

    Else blocks of two heads would be there at a time, which take 61 instead of 51 ms of 131,072 points.
    """
    processors, cache, *_ = room.device(walk.rows.device)
    tracks = (tracks or walk.tracks.number) * walk.dims * walk.parts
    together = max(1, processors // tracks)
    waves = together * tracks / processors
    # such that no multiprocessor waits long for the last ones of a launch
    if (together + 1) * head <= cache or waves < 0.9 * math.ceil(waves):
        return [(0, walk.problems)]
    return [(p, min(together, walk.problems - p)) for p in range(0, walk.problems, together)]


def halves_of(
    walk: "Walk", defines: Defines, alls: Tensor | None = None, unfit: Tensor | None = None
) -> tuple[Tensor, int]:
    """The sums of all rows on either side of zero, in so many chunks; and of all, into `alls`.

    Heads whose rows are not all finite are marked in `unfit (P, group)`.
    """
    chunks = chunks_of(walk)
    totals = walk.empty(totals_of(walk.count, walk.dims, walk.width, walk.stride))
    parts = walk.parts * max(1, walk.width // _COLUMNS)
    launch.Kernel(HALVES, "sum_halves", defines)(
        (walk.problems * chunks * math.ceil(walk.dims / _DIMS), parts), _THREADS, walk.sources.points, walk.rows,
        walk.extra, totals, alls, unfit, walk.problems, 0 if unfit is None else unfit.shape[1], walk.count, walk.dims,
        chunks,
    )  # fmt: skip
    return totals, chunks


def totals_of(count: int, dims: int, width: int, stride: int) -> int:
    """Numbers that these take for a head."""
    return stride // width * min(count, _CHUNKS) * 2 * dims * (width + 1)


def chunks_of(walk: "Walk") -> int:
    return min(walk.count, _CHUNKS)


def run(
    walk: "Walk", walking: Defines, constant: float, out: Tensor, out_extra: Tensor, unfit: Tensor | None = None
) -> None:
    """The sums for all targets, and the constant for every source: `out` and `out_extra` are filled.

    Heads whose rows are not all finite are marked in `unfit (P, group)`.
    """
    tracks, size = walk.tracks, walk.rows.element_size()
    warps = warps_of(walk.width, size)
    teams = teams_of(walk, walk.head(), warps)
    defines = defines_of(walking, warps, teams, walk.rows.dtype)
    alls = walk.empty(walk.parts * chunks_of(walk) * (walk.width + 1)) if constant and tracks.folded else None
    halves = halves_of(walk, defines, alls, unfit) if tracks.folded else (None, 0)
    if not tracks.folded and unfit is not None:
        look_at(walk.rows, unfit)
    if alls is None:
        walk.begin(constant, out, out_extra)
    else:
        slices = max(1, walk.number // _FILLED)
        launch.Kernel(HALVES, "fill", defines)(
            (walk.problems * slices, walk.parts), 256, alls, out, out_extra, walk.problems, walk.number, halves[1],
            slices, float(constant * walk.dims),
        )  # fmt: skip
    rounds, shared = rounds_of(walk, walk.head()), _station(tracks, walk.width, size)
    early = len(rounds) > 1 and room.device(walk.rows.device).early
    relay = launch.Kernel(SOURCE, "relay", (*defines, ("EARLY", int(early))))
    for first, heads in rounds:
        relay(
            (heads * tracks.number * walk.dims, walk.parts), 32 * (warps // teams), *walk.sources[:2],
            *walk.targets[:2], walk.rows, walk.extra, walk.table(tracks), walk.bandwidth, walk.tau, *halves, out,
            out_extra, walk.problems, tracks.number, walk.count, walk.number, walk.dims, tracks.mirrored, tracks.closed,
            first, shared=warps // teams * shared, early=early and first > 0,
        )  # fmt: skip


def _station(tracks: Tracks, width: int, size: int) -> int:
    """The shared memory of a warp: thirty-two rows, of numbers of that size, targets and weights."""
    own = max(size, 4)
    target = 16 * math.ceil((own * tracks.sums + 8) / 16)
    return 32 * (width * size + target + own * tracks.sums)
