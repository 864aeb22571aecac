"""The kernel between the nodes, `Phi_gg`, with the correction of `correction`."""

import triton
import triton.language as tl
from torch import Tensor

from ....kernels import RIESZ_EPSILON
from .grid import Grid
from .language import STATS
from .launch import quick
from .layout import INTERPRETED
from .record import empty


@triton.jit
def spline(u, numbers, count):
    """A continuous spline from `numbers`: the slope before the first kink; kinks, values there, slopes behind.

    Piece by piece and not as a sum of kinks, which would leave rounding where a kernel vanishes.
    """
    value = tl.load(numbers + 1 + count) + tl.load(numbers) * (u - tl.load(numbers + 1))
    for j in range(count):
        kink, level, slope = numbers + 1 + j, numbers + 1 + count + j, numbers + 1 + 2 * count + j
        distance = u - tl.load(kink)
        value = tl.where(distance > 0, tl.load(level) + tl.load(slope) * distance, value)
    return value


@triton.jit
def exponential(u, numbers, count):
    """`p(|u|) e^-|u|` with the coefficients of p, the highest first."""
    distance = tl.minimum(tl.abs(u), 1000.0)
    value = tl.zeros(u.shape, tl.float32)
    for j in range(count):
        value = value * distance + tl.load(numbers + j)
    return value * tl.exp(-distance)


@triton.jit
def _corner(nodes, stats, rate, i, j, kink, A: tl.constexpr, B: tl.constexpr, G: tl.constexpr, GP: tl.constexpr):
    """What the rectangle with the corner (A, B) at nodes i, j adds there, for a kink of slope one; see `correction`."""
    row, column = i - A, j - B
    inside = (row >= 0) & (row < G - 1) & (column >= 0) & (column < G - 1)
    r, c = tl.minimum(tl.maximum(row, 0), G - 2), tl.minimum(tl.maximum(column, 0), G - 2)
    s0, s1 = tl.load(nodes + r) * rate, tl.load(nodes + r + 1) * rate
    t0, t1 = tl.load(nodes + c) * rate, tl.load(nodes + c + 1) * rate
    across, along = s1 - s0, t1 - t0
    scale = tl.maximum(across + along, 1e-30)
    unit = 1 / scale
    z00, z10 = (s0 - t0 - kink) * unit, (s1 - t0 - kink) * unit
    z01, z11 = (s0 - t1 - kink) * unit, (s1 - t1 - kink) * unit
    crossed = inside & (z10 > 0) & (z01 < 0) & (across > 0) & (along > 0)
    p00, p10, p01, p11 = tl.maximum(z00, 0.0), tl.maximum(z10, 0.0), tl.maximum(z01, 0.0), tl.maximum(z11, 0.0)
    area = tl.where(crossed, across * along * unit * unit, 1.0)
    mean = (p10 * p10 * p10 - p00 * p00 * p00 - p11 * p11 * p11 + p01 * p01 * p01) / 6 / area
    error = tl.minimum(tl.maximum(mean - (p00 + p10 + p01 + p11) / 4, -0.25), 0.0) * scale
    w00, w10 = tl.maximum(1 - 2 * tl.abs(z00), 0.0), tl.maximum(1 - 2 * tl.abs(z10), 0.0)
    w01, w11 = tl.maximum(1 - 2 * tl.abs(z01), 0.0), tl.maximum(1 - 2 * tl.abs(z11), 0.0)
    if A == 0 and B == 0:
        share = w00
    elif A == 1 and B == 0:
        share = w10
    elif A == 0:
        share = w01
    else:
        share = w11
    share = share / tl.maximum(w00 + w10 + w01 + w11, 1e-9)
    parts = tl.load(stats + (1 + A) * GP + r) * tl.load(stats + (1 + B) * GP + c)
    spread = tl.sqrt(tl.load(stats + r) * tl.load(stats + c))
    return tl.where(crossed, error * spread * share * parts, 0.0)


@triton.jit
def between(
    i,
    j,
    nodes,
    stats,
    tau,
    numbers,
    kinks,
    count,
    jumps,
    epsilon,
    G: tl.constexpr,
    GP: tl.constexpr,
    DECAYS: tl.constexpr,
    RIESZ: tl.constexpr,
):
    """`Phi_ij` of one dimension, with the correction for a kink at zero; zero beyond G."""
    s, t = tl.load(nodes + tl.minimum(i, G - 1)), tl.load(nodes + tl.minimum(j, G - 1))
    if RIESZ:
        # |s| + |t| - |s - t|: twice the smaller one where the signs agree
        least = tl.minimum(tl.abs(s), tl.abs(t))
        value = tl.where(s * t > 0, least * (2 / tau), 0.0) + epsilon
    elif DECAYS:
        value = exponential((s - t) * (1 / tau), numbers, count)
    else:
        value = spline((s - t) * (1 / tau), numbers, count)
    jump = 0.0
    for k in range(0, jumps):
        jump += tl.where(tl.load(kinks + k) == 0, tl.load(kinks + jumps + k), 0.0)
    value -= tl.where(i == j, jump * tl.load(stats + (STATS - 1) * GP + i), 0.0)
    if G < GP:
        value = tl.where((i < G) & (j < G), value, 0.0)
    return value


@triton.jit
def bound(
    nodes,
    tau,
    numbers,
    count,
    epsilon,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    DECAYS: tl.constexpr,
    RIESZ: tl.constexpr,
):
    """A number that no `Phi_ij` of a head exceeds, from its `nodes (D, GP)`; splines are largest at ends or kinks."""
    d = tl.arange(0, DIMS)
    line = nodes + tl.minimum(d, D - 1) * GP
    low, high = tl.load(line), tl.load(line + G - 1)
    if RIESZ:
        found = 2 * tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 0) / tau + epsilon
    elif DECAYS:
        # u^k e^-u is below k!
        found, factorial = 0.0, 1.0
        for k in range(count):
            found += tl.abs(tl.load(numbers + count - 1 - k)) * factorial
            factorial *= k + 1
    else:
        across = tl.max(high - low, 0) / tau
        found = tl.maximum(tl.abs(spline(across, numbers, count)), tl.abs(spline(-across, numbers, count)))
        for k in range(count):
            found = tl.maximum(found, tl.abs(tl.load(numbers + 1 + count + k)))
    # the correction
    return 2 * found


@triton.jit
def matrix_kernel(
    nodes,
    stats,
    bandwidth,
    numbers,
    kinks,
    phi,
    largest,
    count,
    jumps,
    epsilon,
    D: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    BLOCK: tl.constexpr,
    DECAYS: tl.constexpr,
    RIESZ: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """A block of `phi (P * D, GP, GP)`, zero beyond G; `largest (P)` is raised to the largest of it.

    BESIDE: there are kinks that are not at zero.
    """
    at = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)[None, :]
    line, cells = nodes + at * GP, stats + at * STATS * GP
    tau = tl.load(bandwidth + at // D)
    value = between(i, j, line, cells, tau, numbers, kinks, count, jumps, epsilon, G, GP, DECAYS, RIESZ)
    if BESIDE:
        for k in range(0, jumps):
            kink, jump = tl.load(kinks + k), tl.load(kinks + jumps + k)
            # most blocks are not near the line
            i0, j0 = tl.program_id(1) * BLOCK, tl.program_id(2) * BLOCK
            s_least, t_least = tl.load(line + tl.maximum(i0 - 1, 0)), tl.load(line + tl.maximum(j0 - 1, 0))
            s_most, t_most = (
                tl.load(line + tl.minimum(i0 + BLOCK, G - 1)),
                tl.load(line + tl.minimum(j0 + BLOCK, G - 1)),
            )
            if (kink != 0) & (s_most - t_least >= kink * tau) & (s_least - t_most <= kink * tau):
                extra = _corner(line, cells, 1 / tau, i, j, kink, 0, 0, G, GP)
                extra += _corner(line, cells, 1 / tau, i, j, kink, 1, 0, G, GP)
                extra += _corner(line, cells, 1 / tau, i, j, kink, 0, 1, G, GP)
                extra += _corner(line, cells, 1 / tau, i, j, kink, 1, 1, G, GP)
                value += tl.where((i < G) & (j < G), jump * extra, 0.0)
    tl.store(phi + at * GP * GP + i * GP + j, value)
    bits = tl.abs(value).to(tl.int32, bitcast=True)
    tl.atomic_max(largest + at // D, tl.max(tl.max(bits, 1), 0))


def between_nodes(grid: Grid, largest: Tensor) -> Tensor | None:
    """`matrix`, or None where `transform` computes it for itself."""
    return matrix(grid, largest) if grid.formula.beside else None


def matrix(grid: Grid, largest: Tensor) -> Tensor:
    """`Phi_gg (P, D, GP, GP)`; raises `largest (P)` to its largest number."""
    padded = grid.layout.padded
    # small blocks fit into the registers, and more of them are far from all kinks beside zero
    block = padded if INTERPRETED else 16 if grid.formula.beside else min(padded, 32)
    phi = empty(grid.problems, grid.dims, padded, padded, device=grid.nodes.device)
    quick(matrix_kernel, grid.launches)[(grid.problems * grid.dims, padded // block, padded // block)](
        grid.nodes,
        grid.stats,
        grid.bandwidth,
        grid.formula.numbers,
        grid.formula.kinks,
        phi,
        largest,
        grid.formula.count,
        grid.formula.jumps,
        RIESZ_EPSILON,
        D=grid.dims,
        G=grid.layout.count,
        GP=padded,
        BLOCK=block,
        DECAYS=grid.formula.decays,
        RIESZ=grid.formula.riesz,
        BESIDE=grid.formula.beside,
        num_warps=2 if grid.formula.beside else 4,
    )
    return phi
