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
from .locate import locate
from .record import empty
from .starts import WIDE, find_starts

_SOURCE = Path(__file__).with_name("march.cu")
# points of a chunk, as measured on one H200 at 8,192 points: with 64 a call has 0.06 ms less for pairs of add_riesz and
# add_bump and 0.08 less for those of add_laplace, but 0.06, 0.03 and 0.07 more for tables, which are left in shared
# memory twice as often, and add_riesz 0.03 more for first nodes
CHUNKS = {"riesz": 128, "bump": 64, "laplace": 128}
CHANNELS = 64
# rows of tables that four warps have in registers; bytes of eight rows in shared memory
_ROWS, _EIGHT = 256, WIDE // 8 * 128
# as in kinds.cu
KINDS = {"riesz": 0, "bump": 1, "laplace": 2}
# bytes that are known of a node
_KNOWN = {"riesz": 0, "bump": 6, "laplace": 6}
# bytes of shared memory that a block can have
_MOST = 227 << 10


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
        and here(query.device)
    )


def march(grid: Grid, query: Tensor, key: Tensor, rows: Tensor) -> Units:
    """What the `rows (P, N, 64)` of the keys before its own chunk give every query."""
    problems, length, _ = rows.shape
    kind, padded = grid.formula.kind, grid.layout.padded
    riesz, short = kind == "riesz", key.dtype == torch.bfloat16
    queries = locate(grid, query, None, _place_type(kind)).first
    # others weigh keys by the points themselves
    keys = locate(grid, key, None, _place_type(kind)).first if riesz else key
    chunk = CHUNKS[kind]
    starts = find_starts(grid, key, rows, chunk)
    lines = grid.dims * padded
    each, first, number = _units(grid, problems, processors(rows.get_device()))
    sums = empty(number, length, CHANNELS, dtype=torch.float16, device=rows.device)
    totals, unscale = (empty(number, *shape, device=rows.device) for shape in ((length,), ()))
    for tables, start, heads in ((2, 0, first), (1, first, problems - first)):
        if not heads:
            continue
        direct(kernel_of(padded, tables, chunk, kind, short and not riesz), grid.launches)(
            (lines // (tables * _ROWS), heads),
            128 * (tables + 2),
            queries,
            keys,
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
            shared=shared_of(padded, tables, chunk, kind),
        )
    return Units(starts.rows, starts.power, sums, totals, unscale, first, each)


def _place_type(kind: str) -> torch.dtype:
    """Of queries: codes, for exponentials words with a factor."""
    return torch.int32 if kind == "laplace" else torch.int16


def workspace(grid: Grid, heads: int, length: int) -> int:
    """Bytes of the units of some heads, of places, and of rows if they are not float16."""
    rows = 0 if grid.layout.dtype == torch.float16 else 2 * CHANNELS
    # of add_riesz those of keys too
    places = grid.dims * _place_type(grid.formula.kind).itemsize * (2 if grid.formula.riesz else 1)
    units = _units(grid, heads, processors(grid.nodes.get_device()))[2]
    return length * (units * (2 * CHANNELS + 4) + heads * (places + rows))


def _units(grid: Grid, heads: int, processors: int) -> tuple[int, int, int]:
    """How many units the first heads have, how many heads these are, and how many units there are in all."""
    each = grid.dims * grid.layout.padded // (2 * _ROWS)
    first = divided(heads, each, processors)
    return each, first, (2 * heads - first) * each


def divided(problems: int, each: int, processors: int) -> int:
    """How many heads take `each` blocks, if the others, which take twice as many of half the size, are then one wave.

    All blocks take as long as the sequence is: a last wave of few blocks would take as long as a full one.

    >>> divided(48, 4, 132)
    33
    """
    first = problems * each // processors * processors // each
    return first if (problems - first) * 2 * each <= processors else problems


@functools.cache
def kernel_of(padded: int, tables: int, chunk: int, kind: str, short: bool) -> Kernel:
    """For so many nodes, with that many groups of warps that have tables; `short` for points in bfloat16."""
    numbers = {"KIND": KINDS[kind], "GP": padded, "TABLES": tables, "CHUNK": chunk, "SHORT": int(short)}
    numbers |= {"STAGES": _stages(padded, tables, chunk, kind), "STATS": STATS.value}
    defines = (*numbers.items(), ("SHARED", shared_of(padded, tables, chunk, kind)))
    return Kernel(_SOURCE, "march", defines, exactly=True)


def shared_of(padded: int, tables: int, chunk: int, kind: str) -> int:
    """Bytes of shared memory: tables twice, stages, barriers, and what is known of nodes."""
    rows = tables * _ROWS
    known = rows * _KNOWN[kind]
    stages = _stages(padded, tables, chunk, kind)
    return 2 * rows // 8 * _EIGHT + stages * _stage(padded, tables, chunk, kind) + 128 + known


def _stages(padded: int, tables: int, chunk: int, kind: str) -> int:
    """How many chunks are in shared memory at a time: three, if they fit beside the tables."""
    rest = tables * _ROWS * (_EIGHT // 4 + _KNOWN[kind]) + 128
    return 3 if rest + 3 * _stage(padded, tables, chunk, kind) <= _MOST else 2


def _stage(padded: int, tables: int, chunk: int, kind: str) -> int:
    """Bytes of a chunk: rows; points of both sides; of add_riesz F at the first node."""
    dims = tables * _ROWS // padded
    if kind == "riesz":
        points = 2 * dims * (2 * chunk + 32) + 384
    else:
        points = 2 * dims * chunk + dims * _place_type(kind).itemsize * (chunk + 16)
    return chunk // 8 * _EIGHT + points


@functools.cache
def here(device: torch.device) -> bool:
    """Whether a device has the instructions of warpgroup.cu."""
    return compiles(device) and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def processors(device: int) -> int:
    """How many multiprocessors a device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
