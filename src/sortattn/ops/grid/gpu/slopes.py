"""The derivatives of what points read off the nodes, by the points and by the bandwidth."""

import triton
import triton.language as tl

from .language import product, split_place
from .locate import sinh_ratio


@triton.jit
def cosh_ratio(z, width):
    """`cosh(z) / sinh(width)` for `0 <= z <= width`."""
    narrow = tl.maximum(width, 1e-20)
    gap = tl.where(narrow < 0.01, 2 * narrow * (1 - narrow), 1 - tl.exp(-2 * narrow))
    return tl.exp(z - width) * (1 + tl.exp(-2 * z)) / gap


@triton.jit
def _stretch(z, width, tau):
    """The derivative of `sinh(z) / sinh(width)` by the bandwidth, to which both are inversely proportional."""
    narrow = tl.maximum(width, 1e-3)
    whole = narrow * (1 + tl.exp(-2 * narrow)) / (1 - tl.exp(-2 * narrow))
    return (whole * sinh_ratio(z, width) - z * cosh_ratio(z, width)) / tau


@triton.jit
def slopes_kernel(
    points,
    places,
    nodes,
    lefts,
    bandwidth,
    rows,
    factors,
    extras,
    changes,
    levels,
    normaliser,
    unscale,
    level_unscale,
    out,
    by_bandwidth,
    length,
    channels,
    D: tl.constexpr,
    GP: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EXPONENTIAL: tl.constexpr,
    FACTORS: tl.constexpr,
    EXTRAS: tl.constexpr,
    BANDWIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """`out (P, D, N)`: the derivative of `sum_g w_g(t_nd) (<row_n, F_dg> + extra_n E_dg) factor_n` by `t_nd`.

    `changes (P, D, GP, C)` holds the changes of F from node to node, `levels` F itself, which only exponentials need,
    `normaliser (P, D, GP, 2)` both for E. On a node it is the mean of the derivatives of both sides; `lefts (P, D, GP)`
    is the cell on the left of every node. With BANDWIDTH a program's part of the derivative by the bandwidth goes to
    `by_bandwidth (P, programs)`.
    """
    problem = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = n < length
    safe = tl.minimum(n, length - 1)
    g = tl.arange(0, GP)
    tau = tl.load(bandwidth + problem)
    scale = tl.load(unscale + problem)
    level_scale = tl.load(level_unscale + problem)
    factor = tl.full((ROWS,), 1.0, tl.float32)
    if FACTORS:
        factor = tl.load(factors + problem * length + safe)
    extra = tl.zeros((ROWS,), tl.float32)
    if EXTRAS:
        extra = tl.load(extras + problem * length + safe)
    stretched = tl.zeros((ROWS,), tl.float32)
    for d in range(0, D):
        change = tl.zeros((ROWS, GP), tl.float32)
        level = tl.zeros((ROWS, GP), tl.float32)
        for c0 in range(0, channels, CHANNELS):
            c = c0 + tl.arange(0, CHANNELS)
            has = c < channels
            row = tl.load(
                rows + (problem * length + safe)[:, None] * channels + c[None, :], mask=has[None, :], other=0.0
            )
            spot = ((problem * D + d) * GP + g)[None, :] * channels + c[:, None]
            # gradients may be too small for float16: tables go to their type
            table = tl.load(changes + spot, mask=has[:, None], other=0.0).to(row.dtype)
            change = product(row, table, change, PRECISION, EMULATED)
            if EXPONENTIAL:
                table = tl.load(levels + spot, mask=has[:, None], other=0.0).to(row.dtype)
                level = product(row, table, level, PRECISION, EMULATED)
        line = (problem * D + d) * GP
        cell, share = split_place(tl.load(places + (problem * D + d) * length + safe))
        left = tl.load(lefts + line + cell)
        on_node = share == 0
        change *= scale
        if EXTRAS:
            change += extra[:, None] * tl.load(normaliser + (line + g) * 2 + 1)[None, :]
        start, before = tl.load(nodes + line + cell), tl.load(nodes + line + left)
        width, width_left = tl.load(nodes + line + cell + 1) - start, tl.load(nodes + line + left + 1) - before
        half = tl.where(on_node, 0.5, 1.0)
        rest = 1 - half
        own, other = g[None, :] == cell[:, None], g[None, :] == left[:, None]
        if EXPONENTIAL:
            level *= level_scale
            if EXTRAS:
                level += extra[:, None] * tl.load(normaliser + (line + g) * 2)[None, :]
            x = tl.load(points + (problem * length + safe) * D + d).to(tl.float32)
            h, h_left = width / tau, width_left / tau
            z = tl.minimum(tl.maximum((x - start) / tau, 0.0), h)
            rise, fall = cosh_ratio(z, h) / tau, cosh_ratio(h - z, h) / tau
            rise_left, fall_left = cosh_ratio(h_left, h_left) / tau, cosh_ratio(0.0 * h_left, h_left) / tau
            own_change, left_change = half * rise, rest * rise_left
            own_level, left_level = half * (rise - fall), rest * (rise_left - fall_left)
            slope = tl.sum(tl.where(own, change * own_change[:, None] + level * own_level[:, None], 0.0), 1)
            slope += tl.sum(tl.where(other, change * left_change[:, None] + level * left_level[:, None], 0.0), 1)
            if BANDWIDTH:
                above, below = _stretch(z, h, tau), _stretch(h - z, h, tau)
                both = change * above[:, None] + level * (above + below)[:, None]
                stretched += tl.sum(tl.where(own, both, 0.0), 1)
        else:
            own_rate = half / tl.where(width > 0, width, 1.0)
            left_rate = rest / tl.where(width_left > 0, width_left, 1.0)
            rate = tl.where(own, own_rate[:, None], 0.0) + tl.where(other, left_rate[:, None], 0.0)
            slope = tl.sum(change * rate, 1)
        tl.store(out + (problem * D + d) * length + n, (slope * factor).to(out.dtype.element_ty), mask=here)
    if BANDWIDTH:
        total = tl.sum(tl.where(here, stretched * factor, 0.0), 0)
        tl.store(by_bandwidth + problem * tl.num_programs(0) + tl.program_id(0), total)


@triton.jit
def prepare_kernel(
    grads,
    outs,
    totals,
    reference,
    rows,
    factors,
    extras,
    weights,
    length,
    channels,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """What a gradient of the output `y = z / t` says of z and t, by rows.

    `factors` are `1 / t`, or zero where nothing is seen; `extras` are `-<grad, y>`. Divided by `reference (P)`, so that
    16 bits have room for them: `rows`, the gradient by z, and `weights`, that by t.
    """
    problem = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = m < length
    at = problem * length + m
    total = tl.load(totals + at, mask=here, other=0.0)
    empty = tl.abs(total) < 1.1754943508222875e-38
    factor = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
    scaled = factor / tl.load(reference + problem)
    dot = tl.zeros((ROWS,), tl.float32)
    for c0 in range(0, channels, CHANNELS):
        c = c0 + tl.arange(0, CHANNELS)
        spot = at[:, None] * channels + c[None, :]
        inside = here[:, None] & (c < channels)[None, :]
        grad = tl.load(grads + spot, mask=inside, other=0.0).to(tl.float32)
        dot += tl.sum(grad * tl.load(outs + spot, mask=inside, other=0.0).to(tl.float32), 1)
        tl.store(rows + spot, (grad * scaled[:, None]).to(rows.dtype.element_ty), mask=inside)
    tl.store(factors + at, factor, mask=here)
    tl.store(extras + at, -dot, mask=here)
    tl.store(weights + at, -dot * scaled, mask=here)
