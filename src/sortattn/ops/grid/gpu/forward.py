"""Sums of a call that is not causal: survey, nodes, places, keys to nodes, nodes to nodes, nodes to queries."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import hopper
from .collect import collect_rows, count_ramps
from .formula import Formula
from .grid import Grid
from .launch import Known, launches
from .layout import of_heads
from .locate import locate
from .matrix import between_nodes
from .plan import plan
from .read import read
from .record import empty, zeros
from .tables import Flags, Output, Tables
from .transform import transform

# bytes of places that are in memory at a time; heads beyond wait for the next round
_WORKSPACE = 512 << 20


@dataclass(frozen=True)
class Result:
    """The output `(P, M, C)`, the sums of the weights `(P, M)`, and what the backward pass needs of the nodes."""

    out: Tensor
    totals: Tensor
    grid: Grid
    tables: Tables
    flags: Flags
    # those of the rows, the shared ones, and the largest numbers of `phi` and of the table
    numbers: Tensor


def launches_of(
    query, key, value, weight, bandwidth, kernel: Formula, count: int, group: int, normalise: bool, *other
) -> Known:
    """What is known of the launches of calls like this one."""
    return launches(query, key, value, weight, bandwidth, *kernel.constants, count, group, normalise, *other)


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
    """Attention (`normalise`) or kernel sums of `query (P, M, D)`, `key (P, N, D)`, `value (P, N, C)`."""
    problems, rows, _ = query.shape
    numbers = zeros(problems * (group + 3), query.device)
    row_flags, shared, phi_largest, largest = numbers.split([problems * group, problems, problems, problems])
    flags = Flags(row_flags, shared, group)
    known = launches_of(query, key, value, weight, bandwidth, kernel, count, group, normalise)
    grid = plan(query, key, weight, bandwidth, kernel, count, flags, known)
    tables = collect(grid, key, value, weight, largest)
    phi = between_nodes(grid, phi_largest)
    readable = transform(grid, tables, phi, phi_largest, changes=grid.changes)
    out = empty(problems, rows, value.shape[2], dtype=value.dtype, device=value.device)
    totals = empty(problems, rows, device=query.device)
    for some in rounds(query, grid.place_type):
        part = grid.some(some)
        places = locate(part, of_heads(query, some), kind=grid.place_type)
        sums = Output(of_heads(out, some), of_heads(totals, some), flags.some(some), normalise)
        read(part, places, readable.some(some), sums)
    return Result(out, totals, grid, tables, flags, numbers)


def collect(grid: Grid, key: Tensor, value: Tensor, weight: Tensor | None, largest: Tensor) -> Tables:
    """The tables of the values and of the weights of keys."""
    if hopper.collects(grid, key, value, weight):
        return hopper.collect(grid, key, value, largest)
    parts = []
    for some in rounds(key, grid.place_type):
        part = grid.some(some)
        places = locate(part, of_heads(key, some), of_heads(weight, some), grid.place_type, bits=grid.bits(value))
        counts = count_ramps(part, places.first, bits=places.bits)
        seconds = count_ramps(part, places.second) if grid.two_counts else counts
        rows = collect_rows(part, places, of_heads(value, some), of_heads(largest, some))
        parts.append((rows, counts, seconds))
    rows, counts, seconds = joined(parts)
    whole = None if weight is None else weight.float().sum(1)
    return Tables(rows, counts, seconds, largest, key.shape[1], whole, weighted=grid.factored)


def joined(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Tensors of all heads from those of rounds."""
    return [part[0] if len(part) == 1 else torch.cat(part) for part in zip(*parts, strict=True)]


def rounds(points: Tensor, kind: torch.dtype = torch.float32) -> Iterator[slice]:
    """Heads whose places, of this type, are made together."""
    problems, length, dims = points.shape
    together = max(1, _WORKSPACE // max(1, kind.itemsize * length * dims))
    # rounds of equal size
    together = -(-problems // -(-problems // together))
    for first in range(0, problems, together):
        yield slice(first, min(first + together, problems))
