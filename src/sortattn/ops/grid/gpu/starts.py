"""What `march` takes from keys and values themselves: the largest values, and of `add_riesz` F at the first node.

Both are found chunk by chunk. Of `add_riesz` F at the first node x is, for a key t, `2 max(-t, 0) / tau` and what x
adds if it is above zero.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels import RIESZ_EPSILON
from .grid import Grid
from .launch import quick
from .layout import count_blocks, power_of_two
from .record import empty

# channels, and eight columns of which the first is for the sums of the weights
WIDE = 72
# of the largest value of a head, between what the values become float16 as they are; programs of a head otherwise
_MOST, _LEAST, _PROGRAMS = 32768, 1 / 64, 8


@triton.jit
def starts_kernel(
    key,
    rows,
    nodes,
    bandwidth,
    starts,
    largest,
    halves,
    epsilon,
    length,
    chunks,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
    CHANGED: tl.constexpr,
    RIESZ: tl.constexpr,
):
    """To `largest (P, chunks)` the largest of `rows (P, length, CHANNELS)` by its absolute value, NaN if there is one.

    CHANGED: to `halves` the rows as float16. RIESZ: to `starts (P, chunks, WIDE)` what the keys of a chunk give F at
    the first node, of all dimensions together, first for their rows, then for ones; behind these are zeros.
    """
    problem, chunk = tl.program_id(1).to(tl.int64), tl.program_id(0)
    n = chunk * CHUNK + tl.arange(0, CHUNK)
    d, c = tl.arange(0, DIMS), tl.arange(0, CHANNELS)
    here = n < length
    at = problem * length + n
    row = tl.load(rows + at[:, None] * CHANNELS + c[None, :], mask=here[:, None], other=0.0).to(tl.float32)
    if CHANGED:
        tl.store(halves + at[:, None] * CHANNELS + c[None, :], row.to(tl.float16), mask=here[:, None])
    # as bits, of which those of a NaN are larger than all others
    most = tl.max(tl.max(tl.abs(row).to(tl.int32, bitcast=True), 1), 0)
    tl.store(largest + problem * chunks + chunk, most.to(tl.float32, bitcast=True))
    if RIESZ:
        point = tl.load(key + at[:, None] * D + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)
        line = nodes + (problem * D + tl.minimum(d, D - 1)) * GP
        # of nodes that are all on one side of zero, the nearest one
        beyond = tl.maximum(tl.load(line), 0.0) + tl.maximum(-tl.load(line + G - 1), 0.0)
        below = tl.maximum(-point.to(tl.float32), 0.0)
        # where all are below zero, what is beyond the last node is counted with it
        below = tl.maximum(below - tl.maximum(-tl.load(line + G - 1), 0.0)[None, :], 0.0)
        rate = 2 / tl.load(bandwidth + problem)
        start = tl.sum(below, 1) * rate + tl.sum(tl.where(d < D, beyond * rate + epsilon, 0.0), 0)
        start = tl.where(here, start, 0.0)
        out = starts + (problem * chunks + chunk) * WIDE
        tl.store(out + c, tl.sum(start[:, None] * row, 0))
        rest = tl.arange(0, 8)
        tl.store(out + CHANNELS + rest, tl.where(rest == 0, tl.sum(start, 0), 0.0))


@triton.jit
def power_kernel(
    rows, largest, power, halves, size, chunks, SIZE: tl.constexpr, CHUNKS: tl.constexpr, MOST: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """To `power (P)` a power of two: one, unless the largest value of a head is above MOST or below LEAST.

    Then rows are made `halves` once more, times the power, so that they have the digits of a float16.
    """
    problem = tl.program_id(1).to(tl.int64)
    most = tl.zeros((CHUNKS,), tl.int32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        found = tl.load(largest + problem * chunks + chunk, mask=chunk < chunks, other=0.0)
        most = tl.maximum(most, found.to(tl.int32, bitcast=True))
    number = tl.max(most, 0).to(tl.float32, bitcast=True)
    # heads that are not finite have no numbers for outputs anyway
    unfit = ((number > MOST) & (number < float("inf"))) | ((number > 0) & (number < LEAST))
    exponent = tl.floor(tl.log2(MOST / tl.maximum(tl.where(unfit, number, MOST), 1e-30)))
    factor = tl.exp2(exponent)
    if tl.program_id(0) == 0:
        tl.store(power + problem, factor)
    for first in range(tl.program_id(0) * SIZE, tl.where(unfit, size, 0), tl.num_programs(0) * SIZE):
        at = first + tl.arange(0, SIZE)
        row = tl.load(rows + problem * size + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(halves + problem * size + at, (row * factor).to(tl.float16), mask=at < size)


@dataclass(frozen=True)
class Starts:
    """What `starts_kernel` finds: `largest (P, chunks)`, of `add_riesz` `first (P, chunks, WIDE)`; rows as float16.

    These are times a power of two `power (P)`, or as they came if there is none.
    """

    first: Tensor | None
    largest: Tensor
    rows: Tensor
    power: Tensor | None


def find_starts(grid: Grid, key: Tensor, rows: Tensor, chunk: int) -> Starts:
    """Of keys and their `rows (P, N, C)`."""
    problems, length, channels = rows.shape
    chunks = count_blocks(length, chunk)
    riesz = grid.formula.riesz
    largest = empty(problems, chunks, device=rows.device)
    starts = empty(problems, chunks, WIDE, device=rows.device) if riesz else None
    changed = rows.dtype != torch.float16
    halves = empty(*rows.shape, dtype=torch.float16, device=rows.device) if changed else rows
    quick(starts_kernel, grid.launches)[(chunks, problems)](
        key,
        rows,
        grid.nodes,
        grid.bandwidth,
        largest if starts is None else starts,
        largest,
        halves,
        RIESZ_EPSILON,
        length,
        chunks,
        D=grid.dims,
        DIMS=power_of_two(grid.dims),
        G=grid.layout.count,
        GP=grid.layout.padded,
        CHUNK=chunk,
        CHANNELS=channels,
        WIDE=WIDE,
        CHANGED=changed,
        RIESZ=riesz,
        # as measured on one H200: 0.032 ms at 8,192 points, with four of them 0.035, with eight 0.046
        num_warps=2,
    )
    if not changed:
        return Starts(starts, largest, rows, None)
    power = empty(problems, device=rows.device)
    quick(power_kernel, grid.launches)[(_PROGRAMS, problems)](
        rows, largest, power, halves, length * channels, chunks, SIZE=4096, CHUNKS=64, MOST=_MOST, LEAST=_LEAST
    )
    return Starts(starts, largest, halves, power)
