"""The kernel between the nodes, `Phi_gg`, with the correction of `correction`."""

import triton
import triton.language as tl
from torch import Tensor

from ....kernels import RIESZ_EPSILON
from .grid import Grid
from .language import STATS
from .launch import quick
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
def _row_crossed(nodes, turn, edge, G: tl.constexpr, POWER: tl.constexpr):
    """The row of the rectangle that the line `s - t = edge` crosses, of those whose row and column add up to `turn`.

    Of these there is one at most, as `s - t` rises along them; if there is none, it is the row where one would be. From
    a turn to the next either the row or the column grows by one, also before the first turn and behind the last one.
    """
    inner = tl.minimum(tl.maximum(turn, 0), 2 * G - 4)
    row, last = tl.maximum(inner - (G - 2), 0), tl.minimum(inner, G - 2)
    for power in tl.static_range(POWER):
        step = 1 << (POWER - 1 - power)
        probe = tl.minimum(row + (step - 1), last)
        below = tl.load(nodes + probe + 1) - tl.load(nodes + inner - probe) <= edge
        row = tl.where(below, row + step, row)
    return tl.where(turn < 0, -1, tl.minimum(row, last))


@triton.jit
def _corners(nodes, stats, row, column, edge, jump, rate, G: tl.constexpr, GP: tl.constexpr):
    """What rectangles add at their four corners for a kink of this jump, see `correction`, and how the line goes on.

    `from_left`: the rectangle of the turn before is in the column before, `to_right`: that of the next one in the next.
    """
    inside = (row >= 0) & (column < G - 1)
    r, c = tl.maximum(row, 0), tl.minimum(column, G - 1)
    c_next = tl.minimum(column + 1, G - 1)
    s0, s1 = tl.load(nodes + r), tl.load(nodes + row + 1)
    t0, t1 = tl.load(nodes + c), tl.load(nodes + c_next)
    d00, d10, d01, d11 = s0 - t0, s1 - t0, s0 - t1, s1 - t1
    # compared as in `_row_crossed`, so that both agree where the line goes through a corner
    from_left, to_right = d00 <= edge, d11 > edge
    across, along = s1 - s0, t1 - t0
    crossed = inside & (d10 > edge) & (d01 < edge) & (across > 0) & (along > 0)
    scale = tl.maximum(across + along, 1e-37)
    unit = 1 / scale
    z00, z10, z01, z11 = (d00 - edge) * unit, (d10 - edge) * unit, (d01 - edge) * unit, (d11 - edge) * unit
    # where it is crossed, z10 is above zero and z01 below
    p00, p11 = tl.maximum(z00, 0.0), tl.maximum(z11, 0.0)
    area = tl.where(crossed, (across * unit) * (along * unit), 1.0)
    mean = (z10 * z10 * z10 - p00 * p00 * p00 - p11 * p11 * p11) / (6 * area)
    error = tl.minimum(tl.maximum(mean - (p00 + z10 + p11) / 4, -0.25), 0.0) * (scale * rate)
    w00, w10 = tl.maximum(1 - 2 * tl.abs(z00), 0.0), tl.maximum(1 - 2 * tl.abs(z10), 0.0)
    w01, w11 = tl.maximum(1 - 2 * tl.abs(z01), 0.0), tl.maximum(1 - 2 * tl.abs(z11), 0.0)
    spread = tl.sqrt(tl.load(stats + r) * tl.load(stats + c))
    whole = jump * error * spread / tl.maximum(w00 + w10 + w01 + w11, 1e-9)
    whole = tl.where(crossed, whole, 0.0)
    row_start, row_end = whole * tl.load(stats + GP + r), whole * tl.load(stats + 2 * GP + r)
    start, end = tl.load(stats + GP + c), tl.load(stats + 2 * GP + c)
    e00, e10 = w00 * row_start * start, w10 * row_end * start
    e01, e11 = w01 * row_start * end, w11 * row_end * end
    return e00, e10, e01, e11, from_left, to_right


@triton.jit
def _correct(
    nodes,
    stats,
    phi,
    first,
    edge,
    jump,
    rate,
    G: tl.constexpr,
    POWER: tl.constexpr,
    ROWS: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Adds the correction for a kink beside zero to ROWS rows of `phi (GP, GP)`, from the first one given.

    The line goes up through the rectangles, from (row, column) to the next row or the next column: one for every sum of
    the two, a turn. At the corners below (row + 1, column) and above it (row, column + 1) nothing but this rectangle,
    the one before and the next one adds anything, so that all turns are taken at a time and no corner is met twice.
    """
    GP: tl.constexpr = 1 << POWER
    k = tl.arange(0, TURNS)
    begin, end = first - 1, tl.minimum(2 * G - 3, first + ROWS + G - 2)
    # neighbours are looked up within a block: the last two turns of one are the first two of the next
    for start in range(begin, end, TURNS - 2):
        turn = start + k
        row = _row_crossed(nodes, turn, edge, G, POWER)
        near = True
        if GP > ROWS:
            near = (tl.max(row, 0) >= first - 1) & (tl.min(row, 0) < first + ROWS)
        if near:
            column = turn - row
            own = (k < TURNS - 1) & ((k > 0) | (turn == begin))
            has_lower = own & (row + 1 >= first) & (row + 1 < first + ROWS) & (column < G)
            has_upper = own & (row >= first) & (row < first + ROWS) & (column < G - 1)
            lower, upper = phi + (row + 1) * GP + column, phi + row * GP + column + 1
            low, high = tl.load(lower, mask=has_lower, other=0.0), tl.load(upper, mask=has_upper, other=0.0)
            e00, e10, e01, e11, from_left, to_right = _corners(nodes, stats, row, column, edge, jump, rate, G, GP)
            before = tl.where(k > 0, tl.gather(e11, tl.maximum(k - 1, 0), 0), 0.0)
            behind = tl.gather(e00, tl.minimum(k + 1, TURNS - 1), 0)
            tl.store(lower, low + (e10 + tl.where(from_left, before, 0.0) + tl.where(to_right, 0.0, behind)), has_lower)
            tl.store(
                upper, high + (e01 + tl.where(from_left, 0.0, before) + tl.where(to_right, behind, 0.0)), has_upper
            )


@triton.jit
def _plain(i, j, nodes, tau, numbers, count, epsilon, G: tl.constexpr, DECAYS: tl.constexpr, RIESZ: tl.constexpr):
    """The kernel between nodes i and j of one dimension, without any correction."""
    # the second one is loaded for all i: then a thread has a row, and sums along it take fewer instructions
    s, t = tl.load(nodes + tl.minimum(i, G - 1)), tl.load(nodes + tl.minimum(j + 0 * i, G - 1))
    if RIESZ:
        # |s| + |t| - |s - t|: twice the smaller one where the signs agree
        least = tl.minimum(tl.abs(s), tl.abs(t))
        value = tl.where(s * t > 0, least * (2 / tau), 0.0) + epsilon
    elif DECAYS:
        value = exponential((s - t) * (1 / tau), numbers, count)
    else:
        value = spline((s - t) * (1 / tau), numbers, count)
    return value


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
    value = _plain(i, j, nodes, tau, numbers, count, epsilon, G, DECAYS, RIESZ)
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
    POWER: tl.constexpr,
    ROWS: tl.constexpr,
    TALL: tl.constexpr,
    DECAYS: tl.constexpr,
    RIESZ: tl.constexpr,
):
    """ROWS rows of `phi (P * D, GP, GP)`, zero beyond G; `largest (P)` is raised to the largest of them.

    Corrections touch few places, in memory. They may make the largest number less, so that it is looked for at the end.
    """
    GP: tl.constexpr = 1 << POWER
    at = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    line, cells = nodes + at * GP, stats + at * STATS * GP
    tau = tl.load(bandwidth + at // D)
    out = phi + at * GP * GP
    i, j = tl.arange(0, TALL)[:, None], tl.arange(0, ROWS)[None, :]
    for i0 in range(first, first + ROWS, TALL):
        for j0 in range(0, GP, ROWS):
            value = _plain(i0 + i, j0 + j, line, tau, numbers, count, epsilon, G, DECAYS, RIESZ)
            if G < GP:
                value = tl.where((i0 + i < G) & (j0 + j < G), value, 0.0)
            tl.store(out + (i0 + i) * GP + j0 + j, value)
    for k in range(0, jumps):
        kink, jump = tl.load(kinks + k), tl.load(kinks + jumps + k)
        # other threads have written what is read now
        tl.debug_barrier()
        if kink == 0:
            row = first + tl.arange(0, ROWS)
            value = tl.load(out + row * (GP + 1)) - jump * tl.load(cells + (STATS - 1) * GP + row)
            tl.store(out + row * (GP + 1), value, mask=row < G)
        else:
            _correct(line, cells, out, first, kink * tau, jump, 1 / tau, G, POWER, ROWS, 2 * ROWS)
    tl.debug_barrier()
    most = tl.zeros((TALL, ROWS), tl.int32)
    for i0 in range(first, first + ROWS, TALL):
        for j0 in range(0, GP, ROWS):
            value = tl.load(out + (i0 + i) * GP + j0 + j)
            most = tl.maximum(most, tl.abs(value).to(tl.int32, bitcast=True))
    tl.atomic_max(largest + at // D, tl.max(tl.max(most, 1), 0), sem="relaxed")


def between_nodes(grid: Grid, largest: Tensor) -> Tensor | None:
    """`matrix`, or None where `transform` computes it for itself."""
    return matrix(grid, largest) if grid.formula.beside else None


def matrix(grid: Grid, largest: Tensor) -> Tensor:
    """`Phi_gg (P, D, GP, GP)`; raises `largest (P)` to its largest number."""
    padded = grid.layout.padded
    rows = min(padded, 64)
    phi = empty(grid.problems, grid.dims, padded, padded, device=grid.nodes.device)
    quick(matrix_kernel, grid.launches)[(grid.problems * grid.dims, padded // rows)](
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
        POWER=padded.bit_length() - 1,
        ROWS=rows,
        TALL=min(rows, 32),
        DECAYS=grid.formula.decays,
        RIESZ=grid.formula.riesz,
        num_warps=4,
    )
    return phi
