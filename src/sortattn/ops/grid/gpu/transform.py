"""From nodes to nodes: the tables of keys become tables that queries read, `F = Phi S`."""

import triton
import triton.language as tl
from torch import Tensor

from ....kernels import RIESZ_EPSILON
from . import decay
from .grid import Grid
from .language import STATS
from .launch import quick
from .layout import channel_block, count_blocks, power_of_two, registers
from .matrix import between, bound
from .record import empty
from .riesz import riesz_kernel
from .tables import Readable, Tables


@triton.jit
def _rounded(change, first, row, GP: tl.constexpr):
    """Changes `(GP, C)` that float16 has, such that F, which is `first` at the first node, is right at every node.

    Rounded one by one, the errors of all changes before a node would add up there, which a query far from all keys
    would see. So it is F that is rounded, to multiples of a power of two that is small enough for both changes beside
    a node, and then has no more bits than they may have.
    """
    index = row + 0 * change.to(tl.int32)
    before = tl.where(row > 0, tl.gather(change, tl.maximum(index - 1, 0), 0), 0.0)
    most = tl.maximum(tl.abs(change), tl.abs(before))
    # below the most significant bit of a change there are ten others, and nothing is below 2^-24
    unit = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    unit = tl.maximum(unit * 2.0**-10, 2.0**-24) * 2
    level = first + tl.cumsum(change, 0) - change
    # behind this sum a float32 has no smaller bits
    level = tl.where(row > 0, (level + unit * 12582912.0) - unit * 12582912.0, first)
    after = tl.gather(level, tl.minimum(index + 1, GP - 1), 0)
    return tl.where(row < GP - 1, after - level, 0.0)


@triton.jit
def transform_kernel(
    table,
    counts,
    seconds,
    whole,
    phi,
    phi_largest,
    nodes,
    stats,
    bandwidth,
    numbers,
    kinks,
    largest,
    factor,
    out,
    base,
    normaliser,
    unscale,
    count,
    jumps,
    epsilon,
    length,
    channels,
    D: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    DIMS: tl.constexpr,
    HATS: tl.constexpr,
    MADE: tl.constexpr,
    DECAYS: tl.constexpr,
    RIESZ: tl.constexpr,
    CHANGES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MASKED: tl.constexpr,
    FACTOR: tl.constexpr,
    FACTORED: tl.constexpr,
    APART: tl.constexpr,
    SCALED: tl.constexpr,
):
    """From `table (P, D, GP, C)` of ramps, or of HATS, to what points read.

    - `out (P, D, GP, C)`: F, or its CHANGES from node to node, times a power of two that keeps them within 16 bits, of
      which `unscale (P)` is the inverse; NaN where the head holds what is no number
    - `base (P, D, C)`: with CHANGES, F at the first node; where weights are FACTORED it is the last row of `out`,
      and changes are rounded for what is summed, see `_rounded`, or APART
    - `normaliser (P, D, GP, 2)`: the same for sums of weights, unscaled: F at a node, and its change to the next one
      or F there. WEIGHTED: `counts (P, D, GP)` are made like the rows. Otherwise they are sums of ramps of `length`
      points, MASKED of `whole (P)`; those of `seconds` differ for exponentials

    Without MADE the kernel between nodes is computed here, otherwise it is in `phi`, and the largest number of it, as
    bits, in `phi_largest (P)`; `largest (P)` is that of the table. With FACTOR, `factor (P)` multiplies everything.
    """
    at = tl.program_id(0).to(tl.int64)
    problem = at // D
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    has = channel < channels
    scalar = 1.0
    if FACTOR:
        scalar = tl.load(factor + problem)
    tau = tl.load(bandwidth + problem)
    kernel = (nodes + at * GP, stats + at * STATS * GP, tau, numbers, kinks, count, jumps, epsilon)
    if MADE:
        size = tl.load(phi_largest + problem).to(tl.float32, bitcast=True)
    else:
        size = bound(nodes + problem * D * GP, tau, numbers, count, epsilon, D, DIMS, G, GP, DECAYS, RIESZ)
    size *= tl.load(largest + problem).to(tl.float32, bitcast=True) * tl.abs(scalar) * (2.0 * GP)
    if SCALED:
        scale = tl.exp2(tl.floor(14.0 - tl.log2(tl.maximum(size, 1e-30))))
    else:
        scale = 1.0 + 0.0 * size
    # infinities and NaN
    scale = tl.where(size < float("inf"), scale, float("nan"))
    rows_at = table + at * GP * channels + channel[None, :]
    found = tl.zeros((BLOCK, CHANNELS), tl.float32)
    start = tl.zeros((CHANNELS,), tl.float32)
    level, rise = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    matrix = phi + at * GP * GP
    for j0 in range(0, GP, BLOCK):
        j = j0 + tl.arange(0, BLOCK)
        before = tl.where(j > 0, j - 1, GP - 1)
        inside = (j < G)[:, None] & has[None, :]
        if HATS:
            shares = tl.load(rows_at + j[:, None] * channels, mask=inside, other=0.0)
        else:
            shares = tl.load(rows_at + before[:, None] * channels, mask=inside, other=0.0)
            inner = (j < G - 1)[:, None] & has[None, :]
            shares -= tl.load(rows_at + j[:, None] * channels, mask=inner, other=0.0)
        if HATS and WEIGHTED:
            number = tl.load(counts + at * GP + j, mask=j < G, other=0.0)
        else:
            number = tl.load(counts + at * GP + before, mask=j < G, other=0.0)
            if not WEIGHTED:
                number = tl.where(j == 0, length * 1.0, number)
                if MASKED:
                    number = tl.where(j == 0, tl.load(whole + problem), number)
            number -= tl.load(seconds + at * GP + j, mask=j < G - 1, other=0.0)
        next_ = tl.minimum(i + 1, G - 1)
        if not MADE:
            row, column, next_row = i[:, None], j[None, :], next_[:, None]
            if TRANSPOSED:
                here = between(column, row, *kernel, G, GP, DECAYS, RIESZ)
                there = between(column, next_row, *kernel, G, GP, DECAYS, RIESZ)
                first = between(j, 0 * j, *kernel, G, GP, DECAYS, RIESZ)
            else:
                here = between(row, column, *kernel, G, GP, DECAYS, RIESZ)
                there = between(next_row, column, *kernel, G, GP, DECAYS, RIESZ)
                first = between(0 * j, j, *kernel, G, GP, DECAYS, RIESZ)
        elif TRANSPOSED:
            here = tl.load(matrix + j[None, :] * GP + i[:, None])
            there = tl.load(matrix + j[None, :] * GP + next_[:, None])
            first = tl.load(matrix + j * GP)
        else:
            here = tl.load(matrix + i[:, None] * GP + j[None, :])
            there = tl.load(matrix + next_[:, None] * GP + j[None, :])
            first = tl.load(matrix + j)
        change = there - here
        level += tl.sum(here * number[None, :], 1)
        if CHANGES:
            found = tl.dot(change, shares, found, input_precision="tf32x3")
            start += tl.sum(first[:, None] * shares, 0)
            rise += tl.sum(change * number[None, :], 1)
        else:
            found = tl.dot(here, shares, found, input_precision="tf32x3")
            rise += tl.sum(there * number[None, :], 1)
    found *= scalar * scale
    rows = (i < G)[:, None] & has[None, :]
    if FACTORED and CHANGES:
        # behind the last node there is no change: F at the first one stands there
        first = (start * scalar * scale)[None, :].to(out.dtype.element_ty).to(tl.float32)
        if not APART:
            found = _rounded(tl.where((i < G - 1)[:, None], found, 0.0), first, i[:, None], GP)
        found = tl.where((i < G - 1)[:, None], found, 0.0)
        found = tl.where((i == GP - 1)[:, None], first, found)
        rows = has[None, :] & (i < GP)[:, None]
    spot = out + (at * GP + i)[:, None] * channels + channel[None, :]
    tl.store(spot, tl.where(rows, found, 0.0).to(out.dtype.element_ty), mask=has[None, :])
    if tl.program_id(1) == 0:
        tl.store(base + at * channels + channel, start * scalar, mask=has)
        if (tl.program_id(2) == 0) & (at % D == 0):
            tl.store(unscale + problem, 1.0 / scale)
    if tl.program_id(2) == 0:
        pair = normaliser + (at * GP + i) * 2
        tl.store(pair, level * scalar)
        tl.store(pair + 1, rise * scalar)


def transform(
    grid: Grid,
    tables: Tables,
    phi: Tensor | None,
    largest: Tensor | None,
    *,
    changes: bool,
    transposed: bool = False,
    factor: Tensor | None = None,
    apart: bool = False,
) -> Readable:
    """What points read, from the tables and `phi`, see `between_nodes`; `apart`: changes for slopes."""
    table = tables.rows
    formula = grid.formula
    channels = table.shape[3]
    padded, block = grid.layout.padded, grid.layout.block
    wide = channel_block(channels)
    out = empty(*table.shape, dtype=grid.layout.table_type, device=table.device)
    base = empty(grid.problems, grid.dims, channels, device=table.device)
    normaliser = empty(grid.problems, grid.dims, padded, 2, device=table.device)
    unscale = empty(grid.problems, device=table.device)
    readable = Readable(out, base, normaliser, unscale)
    # in float32 it was not tried on a GPU
    if formula.riesz and changes and not grid.hats and grid.layout.narrow:
        _add_up(grid, tables, readable, factor)
        return readable
    if changes and decay.serves(grid):
        decay.change_levels(grid, tables, readable, factor, apart)
        return readable
    programs = (grid.problems * grid.dims, padded // block, count_blocks(channels, wide))
    quick(transform_kernel, grid.launches, changes, transposed, apart)[programs](
        table,
        tables.counts,
        tables.seconds,
        tables.counts if tables.whole is None else tables.whole,
        table if phi is None else phi,
        tables.largest if largest is None else largest,
        grid.nodes,
        grid.stats,
        grid.bandwidth,
        formula.numbers,
        formula.kinks,
        tables.largest,
        tables.counts if factor is None else factor,
        out,
        base,
        normaliser,
        unscale,
        formula.count,
        formula.jumps,
        RIESZ_EPSILON,
        tables.length,
        channels,
        D=grid.dims,
        G=grid.layout.count,
        GP=padded,
        BLOCK=block,
        CHANNELS=wide,
        DIMS=power_of_two(grid.dims),
        HATS=grid.hats,
        MADE=phi is not None,
        DECAYS=formula.decays,
        RIESZ=formula.riesz,
        CHANGES=changes,
        TRANSPOSED=transposed,
        WEIGHTED=tables.weighted,
        MASKED=tables.whole is not None,
        FACTOR=factor is not None,
        FACTORED=grid.factored,
        APART=apart,
        SCALED=grid.layout.narrow,
        # four blocks a multiprocessor, where there is room
        **(registers(128) if block <= 32 else {}),
    )
    return readable


def _add_up(grid: Grid, tables: Tables, readable: Readable, factor: Tensor | None) -> None:
    """The changes of `add_riesz`, which is its own transpose."""
    channels = tables.rows.shape[3]
    wide = channel_block(channels)
    programs = (grid.problems * grid.dims, count_blocks(channels, wide))
    quick(riesz_kernel, grid.launches, tables.weighted, factor is None)[programs](
        tables.rows,
        tables.counts,
        tables.counts if tables.whole is None else tables.whole,
        grid.nodes,
        grid.stats,
        grid.bandwidth,
        grid.formula.kinks,
        tables.largest,
        tables.counts if factor is None else factor,
        readable.rows,
        readable.base,
        readable.normaliser,
        readable.unscale,
        grid.formula.jumps,
        RIESZ_EPSILON,
        tables.length,
        channels,
        D=grid.dims,
        G=grid.layout.count,
        GP=grid.layout.padded,
        CHANNELS=wide,
        DIMS=power_of_two(grid.dims),
        WEIGHTED=tables.weighted,
        MASKED=tables.whole is not None,
        FACTOR=factor is not None,
        SCALED=grid.layout.narrow,
        num_warps=8 if grid.layout.padded > 32 else 4,
    )
