"""The derivatives by points of what they read by hats: the slope of a cell, or on a node the mean of two, looked up."""

import triton
import triton.language as tl
from torch import Tensor

from .grid import Grid
from .language import split_place
from .launch import quick
from .layout import channel_block, count_blocks
from .record import empty
from .slopes import looked_up
from .tables import Places, Readable, Steep

# points of a block, warps, and dimensions in a row
_BLOCK = (128, 4, 8)


@triton.jit
def steep_kernel(
    nodes,
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
    SCALED: tl.constexpr,
):
    """`table (P, D, 2 GP, C)` for one dimension of one head: at `2 i` the slope at node i, at `2 i + 1` that behind it.

    It is times a power of two that keeps it within 16 bits, of which `units (P, D)` is the inverse, and that of the
    changes too; `weights (P, D, 2 GP)` is the same for the sums of weights, as it is.
    """
    at = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, GP)
    line = nodes + at * GP
    x = tl.load(line + g)
    # the cell on the left of a node: others may stand at the same place
    left = tl.maximum(tl.sum((x[None, :] < x[:, None]).to(tl.int32), 1) - 1, 0)
    width = tl.load(line + tl.minimum(g + 1, GP - 1)) - x
    width_left = tl.load(line + tl.minimum(left + 1, GP - 1)) - tl.load(line + left)
    per = tl.where(width > 0, 1 / width, 0.0)
    per_left = tl.where(width_left > 0, 1 / width_left, 0.0)
    rises = normaliser + at * GP * 2 + 1
    rise = tl.load(rises + 2 * g) * per
    tl.store(weights + (at * GP + g) * 2 + 1, rise)
    tl.store(weights + (at * GP + g) * 2, (rise + tl.load(rises + 2 * left) * per_left) / 2)
    rows = changes + at * GP * channels
    scale = 1.0
    if SCALED:
        most = 0.0
        for c0 in range(0, channels, CHANNELS):
            c = c0 + tl.arange(0, CHANNELS)[None, :]
            change = tl.load(rows + g[:, None] * channels + c, mask=c < channels, other=0.0).to(tl.float32)
            most = tl.maximum(most, tl.max(tl.max(tl.abs(change * per[:, None]), 1), 0))
        scale = tl.exp2(tl.floor(14.0 - tl.log2(tl.maximum(most, 1e-30))))
    tl.store(units + at, tl.load(unscale + at // D) / scale)
    for c0 in range(0, channels, CHANNELS):
        c = c0 + tl.arange(0, CHANNELS)[None, :]
        has = c < channels
        slope = tl.load(rows + g[:, None] * channels + c, mask=has, other=0.0).to(tl.float32) * per[:, None]
        before = tl.load(rows + left[:, None] * channels + c, mask=has, other=0.0).to(tl.float32) * per_left[:, None]
        spot = table + (at * GP + g[:, None]) * 2 * channels + c
        tl.store(spot, ((slope + before) * (scale / 2)).to(table.dtype.element_ty), mask=has)
        tl.store(spot + channels, (slope * scale).to(table.dtype.element_ty), mask=has)


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
    dimensions of a point are stored at once. ONE: a block holds all channels; EVEN: and no more.
    """
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
            cell, share = split_place(tl.load(places + line * length + safe))
            entry = line * (2 * GP) + 2 * cell + (share > 0).to(tl.int32)
            if EVEN:
                number = tl.load(table + entry * channels + channel).to(tl.float32)
                slope = tl.sum(row * number, 1, keep_dims=True)
            else:
                slope = looked_up(row, rows_at, table, entry, here, channels, CHANNELS, ONE)
            slope *= tl.load(units + line)
            if COUNTED:
                slope += extra * tl.load(weights + entry)
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
    tall, warps, unroll = _BLOCK
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
