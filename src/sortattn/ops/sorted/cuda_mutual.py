"""All gradients in one walk, see mutual.cu, for kernels that are their own transpose."""

import math
from pathlib import Path

import torch
from torch import Tensor

from ...cuda import launch
from . import cuda_chain, room
from .cuda_walk import Walk, defines_of, resident
from .tracks import Tracks

SOURCE = Path(__file__).with_name("mutual.cu")


def serves(tracks: Tracks, dtype: torch.dtype) -> bool:
    """Whether sums and slopes of these tracks can go this way: one node at zero, and few numbers a channel."""
    if tracks.nodes > 1 or tracks.compact or tracks.sums > 2 or dtype != torch.float32:
        return False
    # an even kernel, by its coefficients below and above, or a folded one
    node, *coefficients, _ = tracks.tables[0]
    even = tracks.both and coefficients[: tracks.powers] == coefficients[tracks.powers :]
    return node == 0.0 and (even or tracks.folded > 0)


def run(
    keys: Walk, queries: Walk, along: bool, by_value: Tensor, by_weight: Tensor, by_key: Tensor, by_query: Tensor
) -> None:
    """Add all gradients, given the walks of either for the other; those of keys and queries `along` their lines."""
    if not (keys.problems and keys.number and keys.count and keys.dims and keys.stride):
        return
    tracks = keys.tracks
    # rows of keys are read and written
    head = keys.head() + queries.number * keys.width * keys.rows.element_size()
    defines = defines_of(
        tracks, keys.rows.dtype, keys.width, parts=keys.parts, added=True, multiplied=True, ordered=False,
        passing=head > room.device(keys.rows.device).cache, along=along,
    )  # fmt: skip
    everything, whole = keys.count + keys.number, cuda_chain.serves(keys)
    length = keys.length(everything, head, tracks.number, keys.dims, resident(tracks, True, True))
    table, flags = keys.table(tracks), (tracks.mirrored, tracks.negated)
    points = (*keys.sources[:2], *queries.sources[:2])
    rows = (keys.rows, keys.extra, queries.rows, queries.extra, table, keys.bandwidth, keys.tau)
    lines, sizes = keys.problems * tracks.number * keys.dims, (keys.count, keys.number, keys.dims)
    words = math.ceil(keys.number / 32)
    tied = torch.zeros(keys.parts * lines * words, dtype=torch.int32, device=keys.rows.device)
    with launch.on(keys.rows.device):
        if whole:
            cuda_chain.run(keys, queries, defines, head, tied, by_value, by_weight, by_key, by_query)
        else:
            launch.Kernel(SOURCE, "mutual", defines)(
                (lines * math.ceil(everything / length), keys.parts), 32, *points, *rows,
                keys.moments(tracks, defines), queries.moments(tracks, defines), by_value, by_weight, by_key, by_query,
                tied, keys.problems, tracks.number, *sizes, *flags, length,
            )  # fmt: skip
        launch.Kernel(SOURCE, "settle", defines)(
            (lines * math.ceil(words / 32), keys.parts), 32, *points, *rows, tied, by_key, by_query, keys.problems,
            tracks.number, *sizes, *flags,
        )  # fmt: skip
