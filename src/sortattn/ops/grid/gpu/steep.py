"""The derivatives by points of what they read by ramps: the slope of a cell, or on a node the mean of two, looked up.

With lengths in bandwidths, u from the middle of a cell and c the factor of a point there, see `factored_ramp`, what
weights of exponentials read is `A cosh(u) / cosh(h / 2) + B sinh(u) / sinh(h / 2)`, where A is the mean of F at both
nodes and B half its change. The slope is c times what is a between both of its ends, `coth(h / 2) B -+ tanh(h / 2) A`:
a point looks up two rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from .grid import Grid
from .language import factor_of, split_place
from .launch import quick
from .layout import channel_block, count_blocks
from .record import empty
from .slopes import looked_up
from .tables import Places, Readable, Steep

# points of a block, warps, and dimensions in a row: of 16,384 points 0.86 ms, with four warps 0.97, with eight 2.0
_BLOCK = (32, 1, 8)
# where they look two rows up, 1.35 ms instead of 1.41
_BLOCK_OF_TWO = (32, 1, 4)


@triton.jit
def _middle(width):
    """`tanh(width / 2)` and, if it is not zero, one over it."""
    gone = tl.exp(-width)
    found = tl.where(width < 0.01, width / 2, (1 - gone) / (1 + gone))
    return found, tl.where(found > 0, 1 / found, 0.0)


@triton.jit
def _split(change, row, GP: tl.constexpr):
    """F at the nodes and its changes, from these `(GP, C)` with F at the first node as their last row."""
    first = tl.sum(tl.where(row == GP - 1, change, 0.0), 0)
    change = tl.where(row < GP - 1, change, 0.0)
    return first[None, :] + tl.cumsum(change, 0) - change, change


@triton.jit
def _around(level, change, change_left, per, per_left, half, half_left, FACTORED: tl.constexpr):
    """Slopes at nodes, the mean of both sides, and behind them; FACTORED before them, and behind them.

    From F at the nodes, its changes behind and before them, and of both cells what multiplies changes and means.
    """
    behind, before = change * per, change_left * per_left
    if FACTORED:
        # nodes at the same place have the same F
        return before + half_left * (level - change_left / 2), behind - half * (level + change / 2)
    else:
        return (behind + before) / 2, behind


@triton.jit
def steep_kernel(
    nodes,
    bandwidth,
    changes,
    normaliser,
    unscale,
    table,
    weights,
    units,
    channels,
    D: tl.constexpr,
    GP: tl.constexpr,
    CHANNELS: tl.constexpr,
    FACTORED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """`table (P, D, 2 GP, C)` for one dimension of one head: at `2 i` the slope at node i, at `2 i + 1` that behind it.

    It is times a power of two that keeps it within 16 bits, of which `units (P, D)` is the inverse, and that of the
    changes too; `weights (P, D, 2 GP)` is the same for the sums of weights, as it is. FACTORED: at `2 i` the slope
    before node i, at `2 i + 1` that behind it.
    """
    at = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GP)
    line = nodes + at * GP
    x = tl.load(line + g)
    # the cell on the left of a node: others may stand at the same place
    left = tl.maximum(tl.sum((x[None, :] < x[:, None]).to(tl.int32), 1) - 1, 0)
    width = tl.load(line + tl.minimum(g + 1, GP - 1)) - x
    width_left = tl.load(line + tl.minimum(left + 1, GP - 1)) - tl.load(line + left)
    if FACTORED:
        tau = tl.load(bandwidth + at // D)
        # beyond the last node there are no cells
        half, per = _middle(tl.where(width < float("inf"), width / tau, 0.0))
        half_left, per_left = _middle(tl.where(width_left < float("inf"), width_left / tau, 0.0))
        half, per, half_left, per_left = half / tau, per / (2 * tau), half_left / tau, per_left / (2 * tau)
    else:
        per = tl.where(width > 0, 1 / width, 0.0)
        per_left = tl.where(width_left > 0, 1 / width_left, 0.0)
        half, half_left = 0.0 * per, 0.0 * per
    sums = normaliser + at * GP * 2
    level, rise, rise_left = tl.load(sums + 2 * g), tl.load(sums + 2 * g + 1), tl.load(sums + 2 * left + 1)
    first, second = _around(level, rise, rise_left, per, per_left, half, half_left, FACTORED)
    tl.store(weights + (at * GP + g) * 2, first)
    tl.store(weights + (at * GP + g) * 2 + 1, second)
    rows = changes + at * GP * channels
    per, per_left, half, half_left = per[:, None], per_left[:, None], half[:, None], half_left[:, None]
    scale = 1.0
    if SCALED:
        most = 0.0
        for c0 in range(0, channels, CHANNELS):
            c = c0 + tl.arange(0, CHANNELS)[None, :]
            change = tl.load(rows + g[:, None] * channels + c, mask=c < channels, other=0.0).to(tl.float32)
            if FACTORED:
                levels, change = _split(change, g[:, None], GP)
                size = tl.abs(change * per) + tl.abs(half * (levels + change / 2))
            else:
                size = tl.abs(change * per)
            most = tl.maximum(most, tl.max(tl.max(size, 1), 0))
        scale = tl.exp2(tl.floor(14.0 - tl.log2(tl.maximum(most, 1e-30))))
    tl.store(units + at, tl.load(unscale + at // D) / scale)
    for c0 in range(0, channels, CHANNELS):
        c = c0 + tl.arange(0, CHANNELS)[None, :]
        has = c < channels
        change = tl.load(rows + g[:, None] * channels + c, mask=has, other=0.0).to(tl.float32)
        before = tl.load(rows + left[:, None] * channels + c, mask=has, other=0.0).to(tl.float32)
        levels = change
        if FACTORED:
            levels, change = _split(change, g[:, None], GP)
        one, other = _around(levels, change, before, per, per_left, half, half_left, FACTORED)
        spot = table + (at * GP + g[:, None]) * 2 * channels + c
        tl.store(spot, (one * scale).to(table.dtype.element_ty), mask=has)
        tl.store(spot + channels, (other * scale).to(table.dtype.element_ty), mask=has)


@triton.jit
def tilt_kernel(
    places,
    rows,
    factors,
    extras,
    table,
    weights,
    units,
    out,
    length,
    channels,
    D: tl.constexpr,
    GP: tl.constexpr,
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EVEN: tl.constexpr,
    ONE: tl.constexpr,
    COUNTED: tl.constexpr,
    FACTORS: tl.constexpr,
    EXTRAS: tl.constexpr,
):
    """`out (P, N, D)`: the derivative of `sum_g w_g(t_nd) (<row_n, F_dg> + extra_n E_dg) factor_n` by `t_nd`.

    From what `steep_kernel` made of F and E, this if COUNTED; without EXTRAS these are one, as FACTORS are. UNROLL
    dimensions of a point are stored at once. Points that are words look two rows up. ONE: a
    block holds all channels; EVEN: and no more.
    """
    FACTORED: tl.constexpr = places.dtype.element_ty == tl.int32
    problem = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    here = n < length
    safe = tl.minimum(n, length - 1)
    at = problem * length + safe
    factor = tl.full((ROWS, 1), 1.0, tl.float32)
    if FACTORS:
        factor = tl.load(factors + at)
    extra = tl.full((ROWS, 1), 1.0, tl.float32)
    if EXTRAS:
        extra = tl.load(extras + at)
    channel = tl.arange(0, CHANNELS)[None, :]
    rows_at = rows + at * channels
    row = tl.load(rows_at + channel, mask=channel < channels, other=0.0).to(tl.float32)
    column = tl.arange(0, UNROLL)[None, :]
    for d in range(0, D, UNROLL):
        slopes = tl.zeros((ROWS, UNROLL), tl.float32)
        for step in tl.static_range(UNROLL):
            line = problem * D + d + step
            place = tl.load(places + line * length + safe)
            cell, share = split_place(place)
            entry = line * (2 * GP) + 2 * cell + (share > 0).to(tl.int32)
            # from one end of the cell to the other, or on a node half of what is before and behind it
            part = tl.where(share > 0, share, 0.5)
            if EVEN:
                spot = table + entry * channels + channel
                number = tl.load(spot).to(tl.float32)
                if FACTORED:
                    number += part * (tl.load(spot + channels).to(tl.float32) - number)
                slope = tl.sum(row * number, 1, keep_dims=True)
            else:
                slope = looked_up(row, rows_at, table, entry, here, channels, CHANNELS, ONE)
                if FACTORED:
                    end = looked_up(row, rows_at, table, entry + 1, here, channels, CHANNELS, ONE)
                    slope += part * (end - slope)
            slope *= tl.load(units + line)
            if COUNTED:
                number = tl.load(weights + entry)
                if FACTORED:
                    number += part * (tl.load(weights + entry + 1) - number)
                slope += extra * number
            if FACTORED:
                slope *= factor_of(place, 9).to(tl.float32) * 2.0**-15
            slopes = tl.where(column == step, slope * factor, slopes)
        tl.store(out + at * D + d + column, slopes.to(out.dtype.element_ty), mask=here)


def steepen(grid: Grid, changes: Readable) -> Steep:
    """The slopes of what points read, from its changes."""
    problems, dims, padded, channels = changes.rows.shape
    device = changes.rows.device
    table = empty(problems, dims, 2 * padded, channels, dtype=changes.rows.dtype, device=device)
    weights = empty(problems, dims, 2 * padded, device=device)
    units = empty(problems, dims, device=device)
    quick(steep_kernel, grid.launches)[(problems * dims,)](
        grid.nodes,
        grid.bandwidth,
        changes.rows,
        changes.normaliser,
        changes.unscale,
        table,
        weights,
        units,
        channels,
        D=dims,
        GP=padded,
        CHANNELS=channel_block(channels),
        FACTORED=grid.factored,
        SCALED=grid.layout.narrow,
    )
    return Steep(changes, table, weights, units)


def tilt(
    grid: Grid,
    places: Places,
    rows: Tensor,
    slopes: Steep,
    counted: bool,
    factors: Tensor | None,
    extras: Tensor | None,
    out: Tensor,
) -> None:
    """The derivatives by points, see `tilt_kernel`, to `out (P, N, D)`."""
    length, channels = rows.shape[1:]
    tall, warps, unroll = _BLOCK_OF_TWO if grid.factored else _BLOCK
    wide = channel_block(channels)
    which = (factors is None, extras is None, length, channels, rows.data_ptr() % 16)
    quick(tilt_kernel, grid.launches, *which)[(count_blocks(length, tall), grid.problems)](
        places.first,
        rows,
        rows if factors is None else factors,
        rows if extras is None else extras,
        slopes.table,
        slopes.weights,
        slopes.units,
        out,
        length,
        channels,
        D=grid.dims,
        GP=grid.layout.padded,
        UNROLL=unroll if grid.dims % unroll == 0 else 1,
        ROWS=tall,
        CHANNELS=wide,
        EVEN=channels == wide,
        ONE=channels <= wide,
        COUNTED=counted,
        FACTORS=factors is not None,
        EXTRAS=extras is not None,
        num_warps=warps,
    )
