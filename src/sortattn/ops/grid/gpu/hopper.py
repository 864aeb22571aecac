"""Keys to nodes on Hopper, without places in memory: launches of collect.cu."""

import functools
from pathlib import Path

import torch
from torch import Tensor

from ....cuda.boxes import Boxes
from ....cuda.launch import Kernel
from .grid import Grid
from .language import STATS
from .launch import direct
from .layout import count_blocks
from .march import CHANNELS, here, processors
from .record import empty
from .tables import Tables

# dimensions of a block
_DIMS = 8
_STAGES = 4
_SOURCE = Path(__file__).with_name("collect.cu")


def collects(grid: Grid, key: Tensor, rows: Tensor, weight: Tensor | None) -> bool:
    """Whether keys, their rows and weights are of the kind that collect.cu is written for, and enough of them."""
    return (
        grid.changes
        and not grid.chunked
        and grid.layout.narrow
        and grid.layout.padded in (32, 64)
        and grid.dims % _DIMS == 0
        and key.shape[1] > 0
        and key.dtype == rows.dtype == grid.layout.dtype
        and rows.shape[2] == CHANNELS
        and weight is None
        # they are read where they are, sixteen bytes at a time
        and key.data_ptr() % 16 == 0
        and rows.data_ptr() % 16 == 0
        and here(key.device)
        and _fills(grid.problems * grid.dims // _DIMS, processors(key.get_device()))
    )


def _fills(blocks: int, processors: int) -> bool:
    """Whether waves of blocks, each of which has all keys of a head, are three quarters full.

    >>> _fills(96, 132), _fills(132, 132), _fills(140, 132), _fills(384, 132)
    (False, True, False, True)
    """
    return 4 * blocks >= 3 * processors * count_blocks(blocks, processors)


def collect(grid: Grid, key: Tensor, rows: Tensor, largest: Tensor) -> Tables:
    """The tables of `rows (P, N, 64)` and of the weights of keys, as `forward.collect` makes them."""
    problems, length, dims = key.shape
    padded = grid.layout.padded
    table = empty(problems, dims, padded, CHANNELS, device=key.device)
    counts = empty(problems, dims, padded, device=key.device)
    direct(kernel_of(padded, grid.factored, key.dtype == torch.bfloat16), grid.launches)(
        (dims // _DIMS, problems),
        512,
        key,
        rows,
        grid.nodes,
        grid.stats,
        grid.bandwidth,
        table,
        counts,
        largest,
        length,
        dims,
        grid.layout.count,
        shared=shared_of(padded, grid.factored),
        boxes=Boxes(problems, length, _keys(padded)),
    )
    return Tables(table, counts, counts, largest, length, None, weighted=grid.factored)


@functools.cache
def kernel_of(padded: int, factored: bool, short: bool) -> Kernel:
    """For so many nodes, with `factored` weights or not; `short` for bfloat16."""
    numbers = {"GP": padded, "FACTORED": int(factored), "SHORT": int(short), "STATS": STATS.value}
    defines = (*numbers.items(), ("SHARED", shared_of(padded, factored)))
    return Kernel(_SOURCE, "collect", defines, exactly=True)


def shared_of(padded: int, factored: bool) -> int:
    """Bytes of shared memory: stages of keys, ones, what is looked up, barriers."""
    keys, looked_up = _keys(padded), (5 if factored else 4) * padded * 8 + 8
    stage = keys * CHANNELS * 2 + (2 if factored else 1) * _DIMS * 2 * keys
    return _STAGES * (stage + 16) + 2048 + _DIMS * looked_up


def _keys(padded: int) -> int:
    """Keys of a stage."""
    return 8192 // padded
