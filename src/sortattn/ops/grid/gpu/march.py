"""Causal calls on Hopper, where tables never go to memory: launches of march.cu."""

import functools
from collections.abc import Iterator
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
# bytes that a unit has for a query
_UNIT = 2 * CHANNELS + 4
# as in kinds.cu
KINDS = {"riesz": 0, "bump": 1, "laplace": 2}
# bytes that are known of a node
_KNOWN = {"riesz": 0, "bump": 6, "laplace": 6}
# bytes of shared memory that a block can have
_MOST = 227 << 10


@dataclass(frozen=True)
class Units:
    """What the keys of earlier chunks give queries of `heads` heads from `first` on, in parts by blocks of dimensions.

    A head has `each` of them, one after the other: `sums (units, N, C)` in float16, times `unscale (units)`; of every
    half of the channels those that are 8 apart stand together. `totals (units, N)` are the sums of the weights. `rows`
    and `power`, of all heads, are those of `Starts`.
    """

    rows: Tensor
    power: Tensor | None
    sums: Tensor
    totals: Tensor
    unscale: Tensor
    first: int
    heads: int
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


def march(grid: Grid, query: Tensor, key: Tensor, rows: Tensor) -> Iterator[Units]:
    """What the `rows (P, N, 64)` of the keys before its own chunk give every query, launch by launch.

    The units of a launch lie where those of the one before did.
    """
    problems, length, _ = rows.shape
    kind, padded = grid.formula.kind, grid.layout.padded
    riesz, short = kind == "riesz", key.dtype == torch.bfloat16
    queries = locate(grid, query, None, _place_type(kind)).first
    # others weigh keys by the points themselves
    keys = locate(grid, key, None, _place_type(kind)).first if riesz else key
    chunk = CHUNKS[kind]
    starts = find_starts(grid, key, rows, chunk)
    lines = grid.dims * padded
    each = lines // (2 * _ROWS)
    # as large as the inputs
    most = problems * 2 * (2 * grid.dims + CHANNELS) // _UNIT
    turns = list(waves(problems, each, processors(rows.get_device()), most))
    number = max(heads * 2 * each // tables for _, heads, tables in turns)
    sums = empty(number, length, CHANNELS, dtype=torch.float16, device=rows.device)
    totals, unscale = (empty(number, *shape, device=rows.device) for shape in ((length,), ()))
    for first, heads, tables in turns:
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
            first,
            length,
            grid.dims,
            grid.layout.count,
            RIESZ_EPSILON,
            shared=shared_of(padded, tables, chunk, kind),
        )
        yield Units(starts.rows, starts.power, sums, totals, unscale, first, heads, 2 * each // tables)


def _place_type(kind: str) -> torch.dtype:
    """Of queries: codes, for exponentials words with a factor."""
    return torch.int32 if kind == "laplace" else torch.int16


def waves(problems: int, each: int, processors: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Launches: the first head, how many there are, and how many groups of warps of a block have tables.

    With two of these a head has `each` blocks. A launch has at most `most` of them, or one for every multiprocessor.

    >>> list(waves(48, 4, 132, 139)), list(waves(40, 8, 132, 139))
    ([(0, 33, 2), (33, 15, 1)], [(0, 16, 2), (16, 16, 2), (32, 8, 1)])
    """
    together = max(1, max(1, most // processors) * processors // each)
    for start in range(0, problems, together):
        heads = min(together, problems - start)
        first = divided(heads, each, processors)
        if first:
            yield start, first, 2
        if first < heads:
            yield start + first, heads - first, 1


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
