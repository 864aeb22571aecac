"""Sums of a causal call: what the keys before a chunk leave on the nodes, and the chunk's own keys exactly."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import march
from .collect import count_ramps
from .finish import finish
from .formula import Formula
from .grid import Grid
from .launch import Known, launches
from .layout import count_blocks, of_heads
from .locate import locate
from .matrix import matrix
from .near import sum_near
from .plan import plan
from .read import read
from .record import empty, zeros
from .tables import Flags, Output, Places, Readable
from .walk import levels, walk_chunks

# points of a chunk: more take longer by pairs, fewer by tables
CHUNK = 256
# bytes of tables that are in memory at a time, if the inputs are not larger; heads beyond wait for the next round
_WORKSPACE = 1 << 30


@dataclass(frozen=True)
class Result:
    """The output `(P, M, C)`, the sums of the weights `(P, M)`, and the nodes."""

    out: Tensor
    totals: Tensor
    grid: Grid
    flags: Flags


def launches_of(
    query, key, value, weight, bandwidth, kernel: Formula, count: int, group: int, normalise: bool
) -> Known:
    """What is known of the launches of calls like this one."""
    return launches("causal", CHUNK, query, key, value, weight, bandwidth, *kernel.constants, count, group, normalise)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bandwidth: Tensor,
    kernel: Formula,
    count: int,
    group: int,
    normalise: bool,
) -> Result:
    """Attention (`normalise`) or kernel sums of `query (P, group * M, D)`, `key (P, N, D)`, `value (P, N, C)`."""
    problems, rows, dims = query.shape
    seen, channels = value.shape[1:]
    numbers = zeros(problems * (group + 2), query.device)
    row_flags, shared, phi_largest = numbers.split([problems * group, problems, problems])
    flags = Flags(row_flags, shared, group)
    known = launches_of(query, key, value, weight, bandwidth, kernel, count, group, normalise)
    grid = plan(query, key, weight, bandwidth, kernel, count, flags, known, chunked=True)
    out = empty(problems, rows, channels, dtype=value.dtype, device=value.device)
    totals = empty(problems, rows, device=query.device)
    if march.serves(grid, query, key, value, weight, group):
        output = Output(out, totals, flags, normalise)
        for units in march.march(grid, query, key, value):
            finish(grid, query, key, units, output, march.CHUNKS[kernel.kind])
        return Result(out, totals, grid, flags)
    phi = matrix(grid, phi_largest)
    parts, alike = _parts(problems, workspace(grid, value, rows), query, key, value)
    for some in parts:
        part = grid.some(some, alike)
        inputs = (query, key, value, weight, phi, phi_largest)
        queries, keys, values, counted, between, largest = (of_heads(one, some) for one in inputs)
        places = locate(part, keys, counted, grid.place_type, grid.line_type)
        table, unscale = walk_chunks(part, places, values, between, largest, CHUNK, part.changes)
        normaliser = _levels(part, places, counted, between)
        places, lines = locate(part, queries, None, grid.place_type, grid.line_type), places.lines
        near = sum_near(part, queries, keys, places.lines, lines, values, counted, group, CHUNK)
        readable = Readable(table, table, normaliser, unscale)
        sums = Output(of_heads(out, some), of_heads(totals, some), flags.some(some), normalise, near)
        read(part, places, readable, sums)
    return Result(out, totals, grid, flags)


def _parts(problems: int, each: int, *inputs: Tensor) -> tuple[list[slice], bool]:
    """The rounds of a call, and whether they are of one size, and such that addresses are aligned as in the first."""
    parts = list(rounds(problems, each, *inputs))
    sizes = {some.stop - some.start for some in parts}
    return parts, len(sizes) == 1 and min(sizes) % 4 == 0


def _levels(grid: Grid, places: Places, weight: Tensor | None, phi: Tensor) -> Tensor:
    """What the weights of the keys before every chunk give at the nodes."""
    counts = count_ramps(grid, places.first, CHUNK)
    seconds = count_ramps(grid, places.second, CHUNK) if grid.formula.exponential else counts
    whole = None
    if weight is not None:
        short = -weight.shape[1] % CHUNK
        own = torch.nn.functional.pad(weight.float(), (0, short)).unflatten(1, (-1, CHUNK)).sum(2)
        whole = (own.cumsum(1) - own).T.contiguous()
    return levels(grid, counts, seconds, whole, phi, CHUNK, grid.changes)


def workspace(grid: Grid, value: Tensor, rows: int) -> int:
    """Bytes of the tables, of places and of what comes with them, for one head."""
    seen, channels = value.shape[1:]
    tables = -(-seen // CHUNK) * grid.layout.padded * (channels * grid.layout.table_type.itemsize + 12)
    # in float32 as if all were, which causal gradients take
    return grid.dims * (tables + 4 * (rows + seen) * (3 if grid.formula.exponential else 2))


def rounds(problems: int, each: int, *inputs: Tensor) -> Iterator[slice]:
    """Heads whose tables are made together, which are `each` bytes a head."""
    most = max(1, max(_WORKSPACE, sum(part.nbytes for part in inputs)) // each)
    fewest = count_blocks(problems, most)
    # of one size and aligned if a few rounds more make them so, see `forward`; else nearly of one size
    even = (number for number in range(fewest, 2 * fewest) if problems % (4 * number) == 0)
    together = count_blocks(problems, next(even, fewest)) if problems else 1
    for first in range(0, problems, together):
        yield slice(first, min(first + together, problems))
