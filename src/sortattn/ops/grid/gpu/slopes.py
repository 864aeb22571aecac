"""The derivatives of what points read off the nodes, by the points and by the bandwidth."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .grid import Grid
from .language import split_place
from .launch import quick
from .layout import channel_block, count_blocks
from .locate import sinh_ratio
from .record import empty
from .tables import Places, Slopes


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
def looked_up(row, rows_at, table_at, node, wanted, channels, CHANNELS: tl.constexpr, ONE: tl.constexpr):
    """`<row, table_node>` in float32 where it is wanted; `row` are all channels, if ONE block holds them."""
    channel = tl.arange(0, CHANNELS)[None, :]
    spot = table_at + node * channels + channel
    if ONE:
        number = tl.load(spot, mask=wanted & (channel < channels), other=0.0)
        return tl.sum(row * number.to(tl.float32), 1, keep_dims=True)
    else:
        found = tl.zeros(node.shape, tl.float32)
        for c0 in range(0, channels, CHANNELS):
            has = wanted & (c0 + channel < channels)
            number = tl.load(spot + c0, mask=has, other=0.0).to(tl.float32)
            number *= tl.load(rows_at + c0 + channel, mask=has, other=0.0).to(tl.float32)
            found += tl.sum(number, 1, keep_dims=True)
        return found


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
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    ONE: tl.constexpr,
    EXPONENTIAL: tl.constexpr,
    FACTORS: tl.constexpr,
    EXTRAS: tl.constexpr,
    BANDWIDTH: tl.constexpr,
):
    """`out (P, D, N)`: the derivative of `sum_g w_g(t_nd) (<row_n, F_dg> + extra_n E_dg) factor_n` by `t_nd`.

    `changes (P, D, GP, C)` holds the changes of F from node to node, `levels` F itself, which only exponentials need,
    `normaliser (P, D, GP, 2)` both for E. On a node it is the mean of the derivatives of both sides; `lefts (P, D, GP)`
    is the cell on the left of every node. With BANDWIDTH a program's part of the derivative by the bandwidth goes to
    `by_bandwidth (P, programs)`. ONE: a block holds all channels. With a CHUNK every chunk of so many points has tables
    and a normaliser of its own, `(chunks, P, D, GP, ...)`.
    """
    problem = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    here = n < length
    safe = tl.minimum(n, length - 1)
    at = problem * length + safe
    tau = tl.load(bandwidth + problem)
    scale, level_scale = tl.load(unscale + problem), tl.load(level_unscale + problem)
    factor = tl.full((ROWS, 1), 1.0, tl.float32)
    if FACTORS:
        factor = tl.load(factors + at)
    extra = tl.zeros((ROWS, 1), tl.float32)
    if EXTRAS:
        extra = tl.load(extras + at)
    channel = tl.arange(0, CHANNELS)[None, :]
    rows_at = rows + at * channels
    row = tl.load(rows_at + channel, mask=channel < channels, other=0.0).to(tl.float32)
    stretched = tl.zeros((ROWS, 1), tl.float32)
    lines = problem * D
    if CHUNK:
        lines += (tl.program_id(0) * ROWS // CHUNK).to(tl.int64) * tl.num_programs(1) * D
    for d in range(0, D):
        line, tables = (problem * D + d) * GP, (lines + d) * GP
        cell, share = split_place(tl.load(places + (problem * D + d) * length + safe))
        left = tl.load(lefts + line + cell)
        on_node = share == 0
        start, before = tl.load(nodes + line + cell), tl.load(nodes + line + left)
        width, width_left = tl.load(nodes + line + cell + 1) - start, tl.load(nodes + line + left + 1) - before
        half = tl.where(on_node, 0.5, 1.0)
        table = changes + tables * channels
        change = scale * looked_up(row, rows_at, table, cell, here, channels, CHANNELS, ONE)
        left_change = scale * looked_up(row, rows_at, table, left, here & on_node, channels, CHANNELS, ONE)
        if EXTRAS:
            change += extra * tl.load(normaliser + (tables + cell) * 2 + 1)
            left_change += extra * tl.load(normaliser + (tables + left) * 2 + 1)
        if EXPONENTIAL:
            table = levels + tables * channels
            level = level_scale * looked_up(row, rows_at, table, cell, here, channels, CHANNELS, ONE)
            left_level = level_scale * looked_up(row, rows_at, table, left, here & on_node, channels, CHANNELS, ONE)
            if EXTRAS:
                level += extra * tl.load(normaliser + (tables + cell) * 2)
                left_level += extra * tl.load(normaliser + (tables + left) * 2)
            x = tl.load(points + at * D + d).to(tl.float32)
            h, h_left = width / tau, width_left / tau
            z = tl.minimum(tl.maximum((x - start) / tau, 0.0), h)
            rise, fall = cosh_ratio(z, h) / tau, cosh_ratio(h - z, h) / tau
            rise_left, fall_left = cosh_ratio(h_left, h_left) / tau, cosh_ratio(0.0 * h_left, h_left) / tau
            slope = half * (change * rise + level * (rise - fall))
            slope += (1 - half) * (left_change * rise_left + left_level * (rise_left - fall_left))
            if BANDWIDTH:
                above, below = _stretch(z, h, tau), _stretch(h - z, h, tau)
                stretched += change * above + level * (above + below)
        else:
            slope = half * change / tl.where(width > 0, width, 1.0)
            slope += (1 - half) * left_change / tl.where(width_left > 0, width_left, 1.0)
        tl.store(out + (problem * D + d) * length + n, (slope * factor).to(out.dtype.element_ty), mask=here)
    if BANDWIDTH:
        total = tl.sum(tl.where(here, stretched * factor, 0.0))
        tl.store(by_bandwidth + problem * tl.num_programs(0) + tl.program_id(0), total)


@triton.jit
def reference_kernel(totals, reference, length, ROWS: tl.constexpr):
    """`reference (P)`: one over the least of `totals (P, length)`, without its sign, of those that see anything."""
    problem = tl.program_id(0).to(tl.int64)
    least = tl.full((ROWS,), float("inf"), tl.float32)
    for start in range(0, length, ROWS):
        n = start + tl.arange(0, ROWS)
        size = tl.abs(tl.load(totals + problem * length + n, mask=n < length, other=0.0))
        least = tl.minimum(least, tl.where(size >= 1.1754943508222875e-38, size, float("inf")))
    found = tl.min(least, 0)
    tl.store(reference + problem, tl.where(found < float("inf"), 1 / found, 1.0))


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


def derive(
    grid: Grid,
    points: Tensor,
    places: Places,
    rows: Tensor,
    tables: Slopes,
    factors: Tensor | None,
    extras: Tensor | None,
    out: Tensor,
    wants_bandwidth: bool,
    chunk: int = 0,
) -> Tensor | None:
    """The derivatives by `points (P, N, D)`, to `out (P, D, N)`, and those by the bandwidth `(P,)`, if wanted.

    They are those of what the points read off the nodes, multiplied with `rows (P, N, C)` and, for one more
    channel, with `extras (P, N)`, all of it with `factors (P, N)`.
    """
    length, channels = rows.shape[1:]
    tall, wide = min(32, chunk or 32), channel_block(channels)
    programs = count_blocks(length, tall)
    exponential = grid.formula.exponential
    parts = out.new_empty(grid.problems, programs, dtype=torch.float32) if wants_bandwidth and exponential else None
    quick(slopes_kernel, None)[(programs, grid.problems)](
        points,
        places.first,
        grid.nodes,
        tables.lefts,
        grid.bandwidth,
        rows,
        rows if factors is None else factors,
        rows if extras is None else extras,
        tables.changes.rows,
        tables.levels.rows,
        tables.changes.normaliser,
        tables.changes.unscale,
        tables.levels.unscale,
        out,
        out if parts is None else parts,
        length,
        channels,
        D=grid.dims,
        GP=grid.layout.padded,
        ROWS=tall,
        CHUNK=chunk,
        CHANNELS=wide,
        ONE=channels <= wide,
        EXPONENTIAL=exponential,
        FACTORS=factors is not None,
        EXTRAS=extras is not None,
        BANDWIDTH=parts is not None,
        num_warps=4,
    )
    return None if parts is None else parts.double().sum(1).float()


def prepare(grid: Grid, grad: Tensor, out: Tensor, totals: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`rows (P, M, C)`, `factors`, `extras` and `weights (P, M)`, and `reference (P)`, see `prepare_kernel`."""
    problems, length, channels = grad.shape
    reference = empty(problems, device=grad.device)
    quick(reference_kernel, grid.launches)[(problems,)](totals, reference, length, ROWS=4096, num_warps=8)
    rows = empty(*grad.shape, dtype=grad.dtype, device=grad.device)
    factors, extras, weights = (empty(problems, length, device=grad.device) for _ in range(3))
    quick(prepare_kernel, grid.launches)[(count_blocks(length, 64), problems)](
        grad,
        out,
        totals,
        reference,
        rows,
        factors,
        extras,
        weights,
        length,
        channels,
        ROWS=64,
        CHANNELS=channel_block(channels),
    )
    return rows, factors, extras, weights, reference
