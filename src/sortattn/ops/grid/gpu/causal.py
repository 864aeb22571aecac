"""Sums of a causal call: tables of every chunk of keys, added up for the chunks behind it, and the own chunk exactly."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .launch import Flags, Formula, Grid, Tables, plan

# points of a chunk: more take longer by pairs, fewer by tables
CHUNK = 256
# bytes of tables that are in memory at a time; heads beyond wait for the next round
_WORKSPACE = 1 << 30


@dataclass(frozen=True)
class Result:
    """The output `(P, M, C)`, the sums of the weights `(P, M)`, and the nodes."""

    out: Tensor
    totals: Tensor
    grid: Grid
    flags: Flags


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
    numbers = torch.zeros(problems * (group + 3), dtype=torch.int32, device=query.device)
    row_flags, shared, phi_largest, largest = numbers.split([problems * group, problems, problems, problems])
    flags = Flags(row_flags, shared, group)
    grid = plan(query, key, weight, bandwidth, kernel, count, flags)
    phi = grid.matrix(phi_largest)
    out = torch.empty(problems, rows, channels, dtype=value.dtype, device=value.device)
    totals = torch.empty(problems, rows, device=query.device)
    each = -(-seen // CHUNK) * dims * grid.layout.padded * channels * (4 + grid.layout.table_type.itemsize)
    each += 4 * (rows + 2 * seen) * dims * (3 if kernel.exponential else 2)
    for some in _rounds(problems, each):
        part, counted = grid.some(some), None if weight is None else weight[some]
        places = part.locate(key[some], counted, lines=True)
        tables = _tables(part, places, value[some], counted, largest[some])
        readable = part.prefix(tables, phi[some], phi_largest[some], CHUNK)
        places, lines = part.locate(query[some], lines=True), places.lines
        near = part.near(places.lines, lines, value[some], counted, group, CHUNK)
        part.read(places, readable, flags.some(some), out[some], totals[some], normalise, near)
    return Result(out, totals, grid, flags)


def _tables(grid: Grid, places, value: Tensor, weight: Tensor | None, largest: Tensor) -> Tables:
    """What the keys of every chunk leave on the nodes; `whole (chunks, P)` counts the keys before a chunk."""
    rows = grid.collect(places, value, largest, CHUNK)
    counts = grid.count(places.first, CHUNK)
    seconds = grid.count(places.second, CHUNK) if grid.formula.exponential else counts
    whole = None
    if weight is not None:
        short = -weight.shape[1] % CHUNK
        own = torch.nn.functional.pad(weight.float(), (0, short)).unflatten(1, (-1, CHUNK)).sum(2)
        whole = (own.cumsum(1) - own).T.contiguous()
    return Tables(rows, counts, seconds, largest, value.shape[1], whole)


def _rounds(problems: int, each: int) -> Iterator[slice]:
    """Heads whose tables are made together, `each` bytes for one."""
    together = max(1, _WORKSPACE // max(1, each))
    # rounds of equal size
    together = -(-problems // -(-problems // together))
    for first in range(0, problems, together):
        yield slice(first, min(first + together, problems))
