"""Causal calls on Hopper, where tables never go to memory: launches of march.cu."""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ....cuda.launch import Kernel
from ....kernels import RIESZ_EPSILON
from .grid import Grid
from .language import STATS
from .launch import compiles, direct
from .record import empty
from .starts import WIDE, find_starts
from .tables import Places

_SOURCE = Path(__file__).with_name("march.cu")
# points of a chunk, as measured on one H200: with 64 a call has 0.06 ms less for pairs, but 0.06 more for tables, which
# are left in shared memory twice as often, and 0.03 more for first nodes
CHUNK = 128
CHANNELS = 64
# rows of tables that four warps have in registers; bytes of eight rows in shared memory
_ROWS, _EIGHT = 256, WIDE // 8 * 128
_STAGES = 3


@dataclass(frozen=True)
class Units:
    """What the keys of earlier chunks give queries, in parts by blocks of dimensions.

    `sums (units, N, C)` in float16, times `unscale (units)`; of every half of the channels those that are 8 apart stand
    together. `totals (units, N)` are the sums of the weights. The first heads have `each` units, those from `first` on
    twice as many. `rows` and `power` are those of `Starts`.
    """

    rows: Tensor
    power: Tensor | None
    sums: Tensor
    totals: Tensor
    unscale: Tensor
    first: int
    each: int


def serves(grid: Grid, query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, group: int) -> bool:
    """Whether a call is of the kind that march.cu is written for, on a GPU that has its instructions."""
    return (
        grid.halves
        and grid.formula.riesz
        and grid.changes
        and value.dtype == query.dtype
        and weight is None
        and group == 1
        and query.shape[1] == value.shape[1]
        and value.shape[1] > 0
        and value.shape[1] % 8 == 0
        # they are read where they are, sixteen bytes at a time
        and all(part.data_ptr() % 16 == 0 for part in (query, key, value))
        and value.shape[2] == CHANNELS
        and grid.layout.padded in (32, 64)
        and grid.dims * grid.layout.padded % (2 * _ROWS) == 0
        and here(query.device)
    )


def march(grid: Grid, queries: Places, keys: Places, key: Tensor, rows: Tensor) -> Units:
    """What the `rows (P, N, 64)` of the keys before its own chunk give every query."""
    problems, length, _ = rows.shape
    starts = find_starts(grid, key, rows, CHUNK)
    lines = grid.dims * grid.layout.padded
    each = lines // (2 * _ROWS)
    first = divided(problems, each, processors(rows.get_device()))
    number = (2 * problems - first) * each
    sums = empty(number, length, CHANNELS, dtype=torch.float16, device=rows.device)
    totals, unscale = (empty(number, *shape, device=rows.device) for shape in ((length,), ()))
    for tables, start, heads in ((2, 0, first), (1, first, problems - first)):
        if not heads:
            continue
        direct(kernel_of(grid.layout.padded, tables, CHUNK), grid.launches)(
            (lines // (tables * _ROWS), heads),
            128 * (tables + 2),
            queries.first,
            keys.first,
            starts.rows,
            grid.nodes,
            grid.stats,
            grid.bandwidth,
            starts.first,
            starts.largest,
            starts.power,
            sums,
            totals,
            unscale,
            start,
            start * each,
            length,
            grid.dims,
            grid.layout.count,
            RIESZ_EPSILON,
            shared=shared_of(grid.layout.padded, tables, CHUNK),
        )
    return Units(starts.rows, starts.power, sums, totals, unscale, first, each)


def workspace(grid: Grid, length: int) -> int:
    """Bytes of the units of one head, of its places, and of its rows if they are not float16."""
    units = grid.dims * grid.layout.padded // _ROWS
    rows = 0 if grid.layout.dtype == torch.float16 else 2 * CHANNELS
    return length * (units * (2 * CHANNELS + 4) + 4 * grid.dims + rows)


def divided(problems: int, each: int, processors: int) -> int:
    """How many heads take `each` blocks, if the others, which take twice as many of half the size, are then one wave.

    All blocks take as long as the sequence is: a last wave of few blocks would take as long as a full one.

    >>> divided(48, 4, 132)
    33
    """
    first = problems * each // processors * processors // each
    return first if (problems - first) * 2 * each <= processors else problems


@functools.cache
def kernel_of(padded: int, tables: int, chunk: int) -> Kernel:
    """For so many nodes, with that many groups of warps that have tables."""
    numbers = {"GP": padded, "TABLES": tables, "CHUNK": chunk, "STATS": STATS.value}
    defines = (*numbers.items(), ("SHARED", shared_of(padded, tables, chunk)))
    return Kernel(_SOURCE, "march", defines, exactly=True)


def shared_of(padded: int, tables: int, chunk: int) -> int:
    """Bytes of shared memory: tables twice; rows, codes of both sides and F at the first node; barriers."""
    rows = tables * _ROWS
    codes = rows // padded * (2 * chunk + 32)
    return 2 * rows // 8 * _EIGHT + _STAGES * (chunk // 8 * _EIGHT + 2 * codes + 384) + 128


@functools.cache
def here(device: torch.device) -> bool:
    """Whether a device has the instructions of warpgroup.cu."""
    return compiles(device) and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def processors(device: int) -> int:
    """How many multiprocessors a device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
