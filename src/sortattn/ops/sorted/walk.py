"""The walker: sums over sorted points of a sided kernel, for one dimension and a block of channels.

A sided kernel is, for `u = s - t`,

    f(u) = sum_j  H(u - x_j) b_j(u - x_j) e^(-rate (u - x_j))  +  H(-u - x_j) a_j(-u - x_j) e^(-rate (-u - x_j))

with nodes `x_j`, polynomials `b_j` (sources *below* the target) and `a_j` (sources *above*), and `H(0) = 1/2`, so a tie
is shared equally between the sides. `|u|`, `sign`, the bump, any spline, Laplace, Matern and the derivatives of all of
them are such kernels. Only a node at zero may have terms above.

Targets are walked upwards, four at a time, with one pointer per node into the sources. The sources that the four lie
among are *near*: they are few, and are summed directly by the formula. Those below are *far*, and are known by their
moments. With an origin `o` just below, `y = s - o` and `z = o - x_j - t`, the binomial theorem gives

    sum_n b(y + z_n) e^(-rate (y + z_n)) v_n
        = e^(-rate y) sum_l y^l  sum_{i>=l} b_i C(i,l)  sum_n z_n^(i-l) e^(-rate z_n) v_n.

Moments are summed in two stages: in the working precision since the last fold, and in float64 before it. What the nodes
give together is combined in float64 before it is rounded, so a bump does not cancel; and all numbers are distances
within a tile of a few dozen targets, so an offset of the inputs costs nothing and no exponential overflows. Far sources
above are the mirror image, found by a first sweep from the top.
"""

from collections import namedtuple

import numpy as np

from .compiled import compiled
from .moments import FOLD, absorb, absorb_local, combine, fold, shift
from .plan import first_beyond
from .simd import (
    Constant,
    at,
    inner,
    lane,
    load,
    magnitude,
    multiply_add,
    narrow,
    pack,
    put,
    smaller,
    splat,
    step,
    store,
    value_of,
    widen,
    zeros,
)  # fmt: skip
from .sweep import sweep_from_top

FOUR = Constant(4)
# sources in a window that are summed one by one
FEW = 32
# widths of the window after which its moments are summed afresh
RENEW = 2.0

# the points that are summed: their rows (N * width, flat) and extra scalars by index; sorted coordinates, with SCAN
# infinities behind them, and their order
Sources = namedtuple("Sources", "rows extra points order count")
# the points that are summed for: sorted coordinates and their order
Targets = namedtuple("Targets", "points order count")
# a sided kernel; `spread_below[j, l, i] = b_ji C(i, l)`, `spread_above` alike, and `pascal[k, i] = C(k, i)`
Profile = namedtuple("Profile", "nodes below above spread_below spread_above pascal rate span two_sided tied compact")


@compiled
def _near_weights(depth, below_table, above_table, two_sided, j, difference, decay):
    """The kernel's terms at node `j` for four targets: `difference` is `s - x_j - t`, `decay` is `e^(-rate |...|)`."""
    powers = value_of(depth)
    distance = magnitude(difference)
    below = splat(below_table[j, powers - 1], FOUR)
    for k in range(powers - 2, -1, -1):
        below = below * distance + splat(below_table[j, k], FOUR)
    if not two_sided:
        return below * step(difference)
    above = splat(above_table[j, powers - 1], FOUR)
    for k in range(powers - 2, -1, -1):
        above = above * distance + splat(above_table[j, k], FOUR)
    return (above + (below - above) * step(difference)) * decay


@compiled
def _sum_ties(lanes, rows, scalars, points, order, count, start, row):
    """Sum the rows of all sources that equal source `start` into `row`; returns the sum of their extra scalars."""
    width = value_of(lanes)
    moments = np.zeros(width)
    extra = 0.0
    n = start
    while n < count and points[n] == points[start]:
        total = zeros(row, lanes)
        stop = min(n + FOLD, count)
        while n < stop and points[n] == points[start]:
            index = np.int64(at(order, n))
            total = total + load(rows, index * width, lanes)
            extra += np.float64(at(scalars, index))
            n += 1
        store(moments, 0, load(moments, 0, lanes) + widen(total))
    store(row, 0, narrow(load(moments, 0, lanes), row))
    return extra


@compiled
def _four(numbers, m, stop):
    """Entries `m ... m + 3` as a vector; behind `stop` the last one before it stands in."""
    if m + 4 <= stop:
        return load(numbers, m, FOUR)
    return pack(
        at(numbers, m),
        at(numbers, min(m + 1, stop - 1)),
        at(numbers, min(m + 2, stop - 1)),
        at(numbers, min(m + 3, stop - 1)),
    )


@compiled
def _sum_windows(
    lanes, depth, rows, scalars, points, order, start, stop, nodes, below, target_points, target_order, first, last,
    out, out_extra, products,
):  # fmt: skip
    """Serve targets `first ... last - 1` of a compact kernel one source at a time, of sources `start ... stop - 1`."""
    width, powers = value_of(lanes), value_of(depth)
    real = rows.dtype.type
    for m in range(first, last):
        spot = np.float64(target_points[m])
        target = np.int64(target_order[m])
        total = zeros(rows, lanes)
        extra = real(0.0)
        for n in range(start, stop):
            distance = spot - np.float64(at(points, n))
            # beyond the last node the terms cancel but for rounding; there the kernel is zero
            if distance > nodes[-1]:
                continue
            weight = 0.0
            for j in range(nodes.shape[0]):
                further = distance - nodes[j]
                if further >= 0.0:
                    term = 0.0
                    for k in range(powers - 1, -1, -1):
                        term = term * further + np.float64(below[j, k])
                    weight += term if further > 0.0 else 0.5 * term
            index = np.int64(at(order, n))
            total = multiply_add(real(weight), load(rows, index * width, lanes), total)
            extra += real(weight) * at(scalars, index)
        if products is None:
            store(out, target * width, load(out, target * width, lanes) + total)
            out_extra[target] += extra
        else:
            products[target] += inner(total, load(out, target * width, lanes)) + extra * out_extra[target]


@compiled
def walk(lanes, depth, sources, targets, profile, decays, plan, out, out_extra, products):
    """Sum the sources for all targets, for the channels of one block and one dimension.

    `lanes` and `depth` are Constants: the number of channels, and of coefficients of the profile's polynomials. Without
    `products` the sums are added to the rows `out (M * lanes)` and to `out_extra (M)`; with `products (M)` they are
    multiplied with those rows and scalars, and the inner products are added to `products`.
    """
    width, powers = value_of(lanes), value_of(depth)
    real = out.dtype.type
    rows, scalars, points, order, count = sources
    rate, nodes, pascal, spread = profile.rate, profile.nodes, profile.pascal, profile.spread_below
    below, above, two_sided = profile.below, profile.above, profile.two_sided
    target_points, target_order = targets.points, targets.order
    source_low, source_high, target_low, target_high = decays
    tiles, groups, starts, nears = plan.tiles, plan.groups, plan.starts, plan.nears
    top, top_extra = plan.top, plan.top_extra
    families = nodes.shape[0]
    final = families - 1
    weights = np.empty(FOLD, out.dtype)
    moments = np.zeros(families * powers * width)
    extras = np.zeros(families * powers)
    local = np.zeros(families * powers * width, out.dtype)
    local_extra = np.zeros(families * powers, out.dtype)
    base = np.zeros(powers * width, out.dtype)
    base_extra = np.zeros(powers, out.dtype)
    ties = np.zeros(families * width, out.dtype)
    ties_extra = np.zeros(families)
    ties_at = np.full(families, -1)
    shares = spread.astype(out.dtype)
    four = np.empty(4, out.dtype)
    if two_sided:
        sweep_from_top(lanes, depth, sources, targets, profile, decays, plan, weights)
    previous = 0.0
    renewed = 0.0
    support = nodes[final] - nodes[0]
    ones = splat(real(1.0), FOUR)
    for tile in range(plan.number):
        start, stop = np.int64(tiles[tile]), np.int64(tiles[tile + 1])
        group = np.int64(groups[tile])
        origin = np.float64(target_points[start])
        end = np.float64(target_points[stop - 1])
        # what has left the window of a compact kernel cancels but for rounding, which grows with the distance: behind a
        # gap, and now and then, the moments of the window are summed afresh
        fresh = tile == 0 or (
            profile.compact
            and (origin - np.float64(target_points[start - 1]) > support or origin - renewed > RENEW * support)
        )
        if fresh:
            renewed = origin
            moments[:] = 0.0
            extras[:] = 0.0
        for j in range(families):
            if fresh:
                first = np.int64(starts[final, group]) if profile.compact else np.int64(0)
            else:
                shift(lanes, depth, moments, extras, j, origin - previous, rate, pascal)
                first = np.int64(starts[j, group - 1])
            absorb(
                lanes, depth, rows, scalars, points, order, first, np.int64(starts[j, group]), origin - nodes[j], 1.0,
                rate, weights, moments, extras, j,
            )  # fmt: skip
        previous = origin
        combine(lanes, depth, moments, extras, spread, base, base_extra, 0)
        pending = 0
        for m in range(start, stop, 4):
            if profile.compact and (
                starts[0, group] <= nears[final, group] or nears[0, group] - starts[final, group] <= FEW
            ):
                # no source is in the windows of all four, or few are: weights close to zero keep all their digits
                last = np.float64(target_points[min(m + 3, stop - 1)])
                begin = np.int64(starts[final, group])
                # to the very edge: there may be a jump, and beside a coordinate of 1e30 a support of one has no width
                close = first_beyond(points, np.int64(nears[0, group]), last - nodes[0])
                _sum_windows(
                    lanes, depth, rows, scalars, points, order, begin, close, nodes, below, target_points, target_order,
                    m, min(m + 4, stop), out, out_extra, products,
                )  # fmt: skip
            else:
                m1, m2, m3 = min(m + 1, stop - 1), min(m + 2, stop - 1), min(m + 3, stop - 1)
                target0, target1 = np.int64(at(target_order, m)), np.int64(at(target_order, m1))
                target2, target3 = np.int64(at(target_order, m2)), np.int64(at(target_order, m3))
                spots = widen(_four(target_points, m, stop))
                low, high = ones, ones
                if rate != 0.0:
                    low, high = _four(target_low, m, stop), _four(target_high, m, stop)
                # from the smallest sums to the largest: near sources, far ones, the dimensions before
                total0 = total1 = total2 = total3 = zeros(out, lanes)
                extra = zeros(out, FOUR)
                # near: sources between the first and the last of the four, at every node
                for j in range(families):
                    places = spots - splat(nodes[j], FOUR)
                    for n in range(np.int64(starts[j, group]), np.int64(nears[j, group])):
                        index = np.int64(at(order, n))
                        row = load(rows, index * width, lanes)
                        decay = ones
                        if rate != 0.0:
                            decay = smaller(
                                low * splat(at(source_low, n), FOUR), high * splat(at(source_high, n), FOUR)
                            )
                        difference = narrow(places - splat(np.float64(at(points, n)), FOUR), out)
                        factor = _near_weights(depth, below, above, two_sided, j, difference, decay)
                        # through memory: a lane is broadcast by a load, which costs no register for its place
                        store(four, 0, factor)
                        total0 = multiply_add(at(four, 0), row, total0)
                        total1 = multiply_add(at(four, 1), row, total1)
                        total2 = multiply_add(at(four, 2), row, total2)
                        total3 = multiply_add(at(four, 3), row, total3)
                        extra = extra + factor * splat(at(scalars, index), FOUR)
                if profile.tied:
                    for j in range(families):
                        n = np.int64(nears[j, group])
                        last = lane(spots, 3) - nodes[j]
                        if n < count and np.float64(at(points, n)) == last:
                            # ties with the last of the four are summed once for all targets that share them
                            if ties_at[j] != n:
                                ties_at[j] = n
                                ties_extra[j] = _sum_ties(
                                    lanes, rows, scalars, points, order, count, n, ties[j * width :]
                                )
                            decay = ones
                            if rate != 0.0:
                                decay = smaller(
                                    low * splat(at(source_low, n), FOUR), high * splat(at(source_high, n), FOUR)
                                )
                            difference = narrow(spots - splat(lane(spots, 3), FOUR), out)
                            factor = _near_weights(depth, below, above, two_sided, j, difference, decay)
                            row = load(ties, j * width, lanes)
                            total0 = multiply_add(lane(factor, 0), row, total0)
                            total1 = multiply_add(lane(factor, 1), row, total1)
                            total2 = multiply_add(lane(factor, 2), row, total2)
                            total3 = multiply_add(lane(factor, 3), row, total3)
                            extra = extra + factor * splat(real(ties_extra[j]), FOUR)
                # far below
                distance = narrow(spots - splat(origin, FOUR), out)
                factor = low
                for power in range(powers):
                    far = load(base, power * width, lanes)
                    far_extra = at(base_extra, power)
                    for j in range(families):
                        for i in range(power, powers):
                            share = shares[j, power, i]
                            place = j * powers + i - power
                            far = multiply_add(share, load(local, place * width, lanes), far)
                            far_extra += share * at(local_extra, place)
                    total0 = multiply_add(lane(factor, 0), far, total0)
                    total1 = multiply_add(lane(factor, 1), far, total1)
                    total2 = multiply_add(lane(factor, 2), far, total2)
                    total3 = multiply_add(lane(factor, 3), far, total3)
                    extra = extra + factor * splat(far_extra, FOUR)
                    factor = factor * distance
                # far above
                if two_sided:
                    distance = narrow(splat(end, FOUR) - spots, out)
                    factor = high
                    for power in range(powers):
                        far = load(top, (group * powers + power) * width, lanes)
                        total0 = multiply_add(lane(factor, 0), far, total0)
                        total1 = multiply_add(lane(factor, 1), far, total1)
                        total2 = multiply_add(lane(factor, 2), far, total2)
                        total3 = multiply_add(lane(factor, 3), far, total3)
                        extra = extra + factor * splat(at(top_extra, group * powers + power), FOUR)
                        factor = factor * distance
                # from the last to the first: behind the end of a tile the last target stands in for those missing
                if products is None:
                    extra = extra + pack(
                        at(out_extra, target0), at(out_extra, target1), at(out_extra, target2), at(out_extra, target3)
                    )
                    total3 = total3 + load(out, target3 * width, lanes)
                    total2 = total2 + load(out, target2 * width, lanes)
                    total1 = total1 + load(out, target1 * width, lanes)
                    total0 = total0 + load(out, target0 * width, lanes)
                    store(out, target3 * width, total3)
                    put(out_extra, target3, lane(extra, 3))
                    store(out, target2 * width, total2)
                    put(out_extra, target2, lane(extra, 2))
                    store(out, target1 * width, total1)
                    put(out_extra, target1, lane(extra, 1))
                    store(out, target0 * width, total0)
                    put(out_extra, target0, lane(extra, 0))
                else:
                    extra = extra * pack(
                        at(out_extra, target0), at(out_extra, target1), at(out_extra, target2), at(out_extra, target3)
                    )
                    products[target0] += inner(total0, load(out, target0 * width, lanes)) + lane(extra, 0)
                    if m + 1 < stop:
                        products[target1] += inner(total1, load(out, target1 * width, lanes)) + lane(extra, 1)
                    if m + 2 < stop:
                        products[target2] += inner(total2, load(out, target2 * width, lanes)) + lane(extra, 2)
                    if m + 3 < stop:
                        products[target3] += inner(total3, load(out, target3 * width, lanes)) + lane(extra, 3)
            # what lies below the next group, if it is in the same tile, is far for it
            group += 1
            if m + 4 < stop:
                for j in range(families):
                    first, n = np.int64(starts[j, group - 1]), np.int64(starts[j, group])
                    absorb_local(
                        lanes, depth, rows, scalars, points, order, first, n, origin - nodes[j], 1.0, source_low, local,
                        local_extra, j,
                    )  # fmt: skip
                    pending += n - first
                if pending > FOLD:
                    fold(lanes, depth, local, local_extra, moments, extras)
                    combine(lanes, depth, moments, extras, spread, base, base_extra, 0)
                    pending = 0
        fold(lanes, depth, local, local_extra, moments, extras)
