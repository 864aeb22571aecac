"""Sums along whole tracks by blocks of warps, see relay.cu, which read every row of a source once."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ...cuda import launch
from ...cuda.compile import Defines
from . import room

if TYPE_CHECKING:
    from .cuda_walk import Walk

SOURCE = Path(__file__).with_name("relay.cu")
# warps of a multiprocessor
WARPS = 24
# of the sources, those that are summed by themselves for the halves of a folded line
_CHUNKS = 16
# dimensions of a block that sums them, and of one of its threads, and channels of a thread; as in relay.cu
_DIMS, _EIGHT, _FOUR = 64, 8, 4


def serves(walk: "Walk") -> bool:
    """Whether sums for this walk can go this way: one node without ties, sources below, and tracks for all warps."""
    tracks, device = walk.tracks, room.device(walk.rows.device)
    several = tracks.both or tracks.compact or tracks.nodes > 1
    return (
        not (several or tracks.rate or tracks.halves or tracks.folded < 0)
        and walk.problems * tracks.number * walk.dims * walk.parts >= 2 * device.processors
        and WARPS * _station(walk) <= device.shared
    )


def defines_of(walking: Defines, teams: int) -> Defines:
    """From the macros of a walk, with so many blocks of a multiprocessor."""
    return (*(pair for pair in walking if pair[0] != "RESIDENT"), ("CREW", WARPS // teams), ("TEAMS", teams))


def teams_of(walk: "Walk", head: int) -> int:
    """Blocks of a multiprocessor: two, if the rows of the heads that are then walked at a time take half the cache."""
    processors, cache, _ = room.device(walk.rows.device)
    heads = 2 * processors / (walk.tracks.number * walk.dims)
    return 2 if heads * head <= cache / 2 else 1


def halves_of(walk: "Walk", defines: Defines) -> tuple[Tensor, int]:
    """The sums of all rows on either side of zero, in so many chunks."""
    chunks = min(walk.count, _CHUNKS)
    totals = walk.empty(walk.parts * chunks * 2 * walk.dims * (walk.width + 1))
    threads = (walk.width // _FOUR + 1) * _DIMS // _EIGHT
    launch.Kernel(SOURCE, "sum_halves", defines)(
        (walk.problems * chunks * math.ceil(walk.dims / _DIMS), walk.parts), threads, walk.sources.points, walk.rows,
        walk.extra, totals, walk.problems, walk.count, walk.dims, chunks,
    )  # fmt: skip
    return totals, chunks


def run(walk: "Walk", walking: Defines, out: Tensor, out_extra: Tensor) -> None:
    """Add the sums for all targets to `out` and `out_extra`."""
    tracks, teams = walk.tracks, teams_of(walk, walk.head())
    defines = defines_of(walking, teams)
    halves = halves_of(walk, defines) if tracks.folded else (None, 0)
    launch.Kernel(SOURCE, "relay", defines)(
        (walk.problems * tracks.number * walk.dims, walk.parts), 32 * (WARPS // teams), *walk.sources[:2],
        *walk.targets[:2], walk.rows, walk.extra, walk.table(tracks), walk.bandwidth, walk.tau, *halves, out, out_extra,
        walk.problems, tracks.number, walk.count, walk.number, walk.dims, tracks.mirrored, tracks.closed,
        shared=WARPS // teams * _station(walk),
    )  # fmt: skip


def _station(walk: "Walk") -> int:
    """The shared memory of a warp: thirty-two rows, targets and weights."""
    size = walk.rows.element_size()
    target = 16 * math.ceil((size * walk.tracks.sums + 8) / 16)
    return 32 * (walk.width * size + target + size * walk.tracks.sums)
