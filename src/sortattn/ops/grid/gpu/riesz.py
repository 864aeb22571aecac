"""From nodes to nodes for `add_riesz`, whose kernel between nodes has no bends but near its diagonal: no product.

With ramps R_i, their last one S for all points, hats `H_i = R_i-1 - R_i`, cells of which the part `p_i` is above zero
and `n_i` below, and what the correction `c_i` adds at node i, see `correction`:

    F_i+1 - F_i = 2 / tau (p_i R_i - n_i (S - R_i)) + c_i+1 H_i+1 - c_i H_i
"""

import triton
import triton.language as tl

from .language import STATS
from .matrix import bound


@triton.jit
def _cells(nodes, stats, at, i, tau, kinks, jumps, epsilon, G: tl.constexpr, GP: tl.constexpr):
    """Of a line `at`: twice the parts of the cells behind nodes i that are above and below zero, in bandwidths; what is
    added at these nodes and the next ones on the diagonal; and what all points give all nodes.
    """
    line, rate = nodes + at * GP, 2 / tau
    start, stop = tl.load(line + tl.minimum(i, G - 1)), tl.load(line + tl.minimum(i + 1, G - 1))
    above = (tl.maximum(stop, 0.0) - tl.maximum(start, 0.0)) * rate
    below = (tl.maximum(-start, 0.0) - tl.maximum(-stop, 0.0)) * rate
    jump = 0.0
    for k in range(0, jumps):
        jump += tl.where(tl.load(kinks + k) == 0, tl.load(kinks + jumps + k), 0.0)
    extra = stats + (at * STATS + STATS - 1) * GP
    here = -jump * tl.load(extra + i, mask=i < G, other=0.0)
    there = -jump * tl.load(extra + i + 1, mask=i < G - 1, other=0.0)
    # of nodes that are all on one side of zero, the nearest one
    beyond = (tl.maximum(tl.load(line), 0.0) + tl.maximum(-tl.load(line + G - 1), 0.0)) * rate + epsilon
    return above, below, here, there, beyond


@triton.jit
def _levels(counts, number, i, above, below, here, there, beyond, G: tl.constexpr):
    """F and its changes at nodes i for one more channel, sums of ramps in `counts`, of which all is `number`."""
    ramp = tl.load(counts + i, mask=i < G - 1, other=0.0)
    last = tl.where(i > 0, tl.load(counts + i - 1, mask=(i > 0) & (i < G), other=0.0), number)
    next_ = tl.load(counts + i + 1, mask=i < G - 2, other=0.0)
    return _level(ramp, last - ramp, ramp - next_, number, above, below, here, there, beyond, 0)


@triton.jit
def _level(ramp, hat, next_hat, number, above, below, here, there, beyond, AXIS: tl.constexpr):
    """F at the nodes along an axis, and its change to the next one."""
    rise, rest, hat = above * ramp, below * (number - ramp), here * hat
    # from zero on to either side, as they are small there
    before, behind = tl.cumsum(rise, AXIS) - rise, tl.cumsum(rest, AXIS, reverse=True)
    return before + behind + beyond * number + hat, rise - rest - hat + there * next_hat


@triton.jit
def riesz_kernel(
    table,
    counts,
    whole,
    nodes,
    stats,
    bandwidth,
    kinks,
    largest,
    factor,
    out,
    base,
    normaliser,
    unscale,
    jumps,
    epsilon,
    length,
    channels,
    D: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CHANNELS: tl.constexpr,
    DIMS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MASKED: tl.constexpr,
    FACTOR: tl.constexpr,
    SCALED: tl.constexpr,
):
    """What `transform_kernel` makes with CHANGES from `table (P, D, GP, C)` of ramps, for one dimension of a head."""
    at = tl.program_id(0).to(tl.int64)
    problem = at // D
    i = tl.arange(0, GP)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    has = channel < channels
    scalar = 1.0
    if FACTOR:
        scalar = tl.load(factor + problem)
    tau = tl.load(bandwidth + problem)
    size = bound(nodes + problem * D * GP, tau, kinks, 0, epsilon, D, DIMS, G, GP, False, True)
    size *= tl.load(largest + problem).to(tl.float32, bitcast=True) * tl.abs(scalar) * (2.0 * GP)
    if SCALED:
        scale = tl.exp2(tl.floor(14.0 - tl.log2(tl.maximum(size, 1e-30))))
    else:
        scale = 1.0 + 0.0 * size
    # infinities and NaN
    scale = tl.where(size < float("inf"), scale, float("nan"))

    above, below, here, there, beyond = _cells(nodes, stats, at, i, tau, kinks, jumps, epsilon, G, GP)
    rows_at = table + at * GP * channels + channel[None, :]
    row, rows = i[:, None], (i < G - 1)[:, None]
    everything = tl.load(rows_at + (GP - 1) * channels, mask=has[None, :], other=0.0)
    ramp = tl.load(rows_at + row * channels, mask=rows & has[None, :], other=0.0)
    # the ramp before the first node is one everywhere, as the last one of the table is
    last = tl.load(rows_at + tl.where(row > 0, row - 1, GP - 1) * channels, mask=(row < G) & has[None, :], other=0.0)
    next_ = tl.load(rows_at + (row + 1) * channels, mask=(row < G - 2) & has[None, :], other=0.0)
    rest = below[:, None] * (everything - ramp)
    hat = here[:, None] * (last - ramp)
    change = above[:, None] * ramp - rest - hat + there[:, None] * (ramp - next_)
    spot = out + (at * GP + row) * channels + channel[None, :]
    found = tl.where(rows, change * (scalar * scale), 0.0)
    tl.store(spot, found.to(out.dtype.element_ty), mask=has[None, :])
    start = tl.sum(rest + tl.where(row == 0, hat + beyond * everything, 0.0), 0)
    tl.store(base + at * channels + channel, start * scalar, mask=has)

    if tl.program_id(1) == 0:
        if at % D == 0:
            tl.store(unscale + problem, 1.0 / scale)
        if WEIGHTED:
            number = tl.load(counts + at * GP + GP - 1)
        elif MASKED:
            number = tl.load(whole + problem)
        else:
            number = length * 1.0
        level, rise = _levels(counts + at * GP, number, i, above, below, here, there, beyond, G)
        pair = normaliser + (at * GP + i) * 2
        tl.store(pair, level * scalar)
        tl.store(pair + 1, tl.where(i < G - 1, rise, 0.0) * scalar)


@triton.jit
def riesz_levels_kernel(
    counts,
    whole,
    nodes,
    stats,
    bandwidth,
    kinks,
    normaliser,
    jumps,
    epsilon,
    chunks,
    problems,
    D: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """What `levels_kernel` makes with CHANGES, `normaliser (chunks, P, D, GP, 2)`, for one dimension of a head."""
    at = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, GP)[None, :]
    tau = tl.load(bandwidth + at // D)
    above, below, here, there, beyond = _cells(nodes, stats, at, i, tau, kinks, jumps, epsilon, G, GP)
    # of all chunks before, also where cells before the first and behind the last one would be
    carried, carried_last, carried_next = (
        tl.zeros((1, GP), tl.float32),
        tl.zeros((1, GP), tl.float32),
        tl.zeros((1, GP), tl.float32),
    )
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)[:, None]
        line = chunk.to(tl.int64) * problems * D + at
        known = chunk < chunks
        spot = counts + line * GP + i
        ramp = tl.load(spot, mask=known & (i < G - 1), other=0.0)
        last = tl.load(spot - 1, mask=known & (i > 0) & (i < G), other=0.0)
        next_ = tl.load(spot + 1, mask=known & (i < G - 2), other=0.0)
        ramps = tl.cumsum(ramp, 0) - ramp + carried
        lasts = tl.cumsum(last, 0) - last + carried_last
        nexts = tl.cumsum(next_, 0) - next_ + carried_next
        carried += tl.sum(ramp, 0)[None, :]
        carried_last += tl.sum(last, 0)[None, :]
        carried_next += tl.sum(next_, 0)[None, :]
        if MASKED:
            number = tl.load(whole + chunk * problems + at // D, mask=known, other=0.0)
        else:
            number = (chunk * CHUNK).to(tl.float32)
        lasts = tl.where(i > 0, lasts, number)
        level, change = _level(ramps, lasts - ramps, ramps - nexts, number, above, below, here, there, beyond, 1)
        pair = tl.join(level, tl.where(i < G - 1, change, 0.0))
        spot = normaliser + ((line * GP + i) * 2)[:, :, None] + tl.arange(0, 2)[None, None, :]
        tl.store(spot, pair, mask=known[:, :, None])
