"""All gradients of a folded kernel along whole tracks by blocks of warps, see chain.cu, which read every row once."""

from pathlib import Path

from torch import Tensor

from ...cuda import launch
from ...cuda.compile import Defines
from . import room
from .cuda_relay import WARPS, defines_of, halves_of, rounds_of, teams_of
from .cuda_walk import Walk

SOURCE = Path(__file__).with_name("chain.cu")


def serves(keys: Walk) -> bool:
    """Whether gradients can go this way: a folded kernel, and tracks for all warps."""
    tracks, device = keys.tracks, room.device(keys.rows.device)
    return (
        tracks.folded > 0
        and keys.problems * tracks.number * keys.dims * keys.parts >= 2 * device.processors
        and WARPS * _station(keys) <= device.shared
    )


def run(keys: Walk, queries: Walk, walking: Defines, head: int, tied: Tensor, *gradients: Tensor) -> None:
    """Add all gradients, given the walks of either for the other; see `cuda_mutual.run`."""
    tracks, teams = keys.tracks, teams_of(keys, head, WARPS, most=2)
    defines = defines_of(walking, WARPS, teams)
    # as for a forward pass, which has compiled them
    forward = tuple((name, 0 if name in ("HALVES", "SLOPES") else value) for name, value in defines)
    (key_sums, key_chunks), (query_sums, query_chunks) = (halves_of(walk, forward) for walk in (keys, queries))
    chain = launch.Kernel(SOURCE, "chain", defines)
    for first, heads in rounds_of(keys, head):
        chain(
            (heads * tracks.number * keys.dims, keys.parts), 32 * (WARPS // teams), *keys.sources[:2],
            *queries.sources[:2], keys.rows, keys.extra, queries.rows, queries.extra, keys.table(tracks),
            keys.bandwidth, keys.tau, key_sums, query_sums, key_chunks, query_chunks, *gradients, tied, keys.problems,
            tracks.number, keys.count, keys.number, keys.dims, tracks.mirrored, tracks.negated, first,
            shared=WARPS // teams * _station(keys),
        )  # fmt: skip


def _station(keys: Walk) -> int:
    """The shared memory of a warp: rows, weights, outputs and places of thirty-two points, and a barrier."""
    return 32 * (keys.width * keys.rows.element_size() + 16 + 8 + 8) + 16
