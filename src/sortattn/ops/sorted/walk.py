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

The factors of the y^l, of all nodes together, are summed in two stages: in the working precision since the last fold,
and in float64 before it, so a bump does not cancel. All numbers are distances within a tile of a few dozen targets, so
an offset of the inputs costs nothing and no exponential overflows.

With terms above, a first sweep from the top finds what the sources above the first target of every tile give. Within
the tile a source stays on that side until it is far below; while it is near it adds `b - a` to the targets above it.
"""

from collections import namedtuple

import numpy as np

from ...cpu.compiled import compiled
from ...cpu.memory import zeroed
from ...cpu.simd import (
    FOUR,
    SPARE,
    at,
    inner,
    lane,
    load,
    multiply_add,
    narrow,
    pack,
    prefetch,
    put,
    splat,
    store,
    value_of,
    widen,
    zeros,
)  # fmt: skip
from .events import FOLD, four, list_tile, near_weights
from .moments import absorb, fold, shift, sum_far
from .plan import first_beyond
from .sweep import sweep_from_top

# sources in a window that are summed one by one
FEW = 32
# widths of the window after which its moments are summed afresh
RENEW = 2.0
# groups of targets between fetching rows and summing them: what SPARE leaves room for
AHEAD = SPARE // 4 - 1
# bytes of rows that a second-level cache holds, from where they need not be fetched ahead
NEARBY = 1 << 20

# the points that are summed: their rows (N * width, flat) and extra scalars by index; sorted coordinates, with SPARE
# infinities behind them, and their order, with zeros
Sources = namedtuple("Sources", "rows extra points order count")
# the points that are summed for: sorted coordinates and their order
Targets = namedtuple("Targets", "points order count")
# a sided kernel; `scale * shares_below[j, l, i] = b_ji C(i, l)`, `shares_above` alike, `removed` is minus that; and
# `pascal[k, i] = C(k, i)`; for a folded line, `coefficients` are those of its node and `constant` is divided by `scale`
Profile = namedtuple(
    "Profile",
    "nodes below above shares_below shares_above removed scale pascal rate span tied compact folded coefficients "
    "constant",
)


@compiled
def _sum_ties(lanes, rows, scalars, points, order, count, start, row):
    """Sum the rows of all sources that equal source `start` into `row`; returns the sum of their extra scalars."""
    width = value_of(lanes)
    moments = zeroed(width, np.float64)
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
def walk(
    lanes, depth, terms, sources, targets, profile, decays, plan, events, sums, initial, initial_extra, ties, out,
    out_extra, products,
):  # fmt: skip
    """Sum the sources for all targets, for the channels of one block and one dimension.

    `lanes`, `depth` and `terms` are Constants: the number of channels, of coefficients of the profile's polynomials,
    and of rows of `sums`, which is twice the depth if there is a side above. Without `products` the sums are added to
    the rows `out (M * lanes)` and to `out_extra (M)`; with `products (M)` they are multiplied with those rows and
    scalars, and the inner products are added to `products`.

    `initial` and `initial_extra` are the moments before any source is passed. On a folded line all targets and sources
    are positive, or targets zero, and distances are taken from zero.
    """
    width, powers, number = value_of(lanes), value_of(depth), value_of(terms)
    two_sided = number > powers
    real = out.dtype.type
    rows, scalars, points, order, count = sources
    rate, nodes, pascal, compact = profile.rate, profile.nodes, profile.pascal, profile.compact
    below, above, shares, removed = profile.below, profile.above, profile.shares_below, profile.removed
    target_points, target_order = targets.points, targets.order
    source_low, source_high, target_low, target_high = decays
    tiles, groups, starts, nears = plan.tiles, plan.groups, plan.starts, plan.nears
    top, top_extra = plan.top, plan.top_extra
    near_stops, far_stops = plan.near_stops, plan.far_stops
    near_indices, near, far_indices, far, own, stride = events
    moments, extras, local, local_extra, base, base_extra = sums
    families = nodes.shape[0]
    final = families - 1
    ties_at, ties_extra = np.int64(-1), 0.0
    folded = profile.folded != 0
    moments[:] = 0.0
    extras[:] = 0.0
    if two_sided:
        sweep_from_top(lanes, depth, sources, targets, profile, decays, plan, events, sums)
    previous = 0.0
    renewed = 0.0
    support = nodes[final] - nodes[0]
    ones, scale = splat(real(1.0), FOUR), splat(profile.scale, FOUR)
    last_group = np.int64(groups[plan.number]) - 1
    distant = (rows.size + out.size) * rows.itemsize > NEARBY
    for tile in range(plan.number):
        start, stop = np.int64(tiles[tile]), np.int64(tiles[tile + 1])
        group = np.int64(groups[tile])
        origin = 0.0 if folded else np.float64(target_points[start])
        end = np.float64(target_points[stop - 1])
        # what has left the window of a compact kernel cancels but for rounding, which grows with the distance: behind a
        # gap, and now and then, the sums are begun afresh
        fresh = tile == 0 or (
            compact and (origin - np.float64(target_points[start - 1]) > support or origin - renewed > RENEW * support)
        )
        if fresh:
            renewed = origin
            # an odd kernel has half of its jump at zero
            part = 0.5 if profile.folded < 0 and target_points[start] == 0.0 else 1.0
            for k in range(powers):
                store(moments, k * width, splat(part, lanes) * load(initial, k * width, lanes))
                extras[k] = part * initial_extra[k]
        elif folded:
            if profile.folded < 0 and target_points[start - 1] == 0.0:
                for k in range(powers):
                    half = splat(0.5, lanes) * load(initial, k * width, lanes)
                    store(moments, k * width, load(moments, k * width, lanes) + half)
                    extras[k] += 0.5 * initial_extra[k]
        else:
            shift(lanes, depth, moments, extras, origin - previous, rate, pascal)
        previous = origin
        for j in range(families):
            if fresh:
                first = np.int64(starts[group * families + final]) if compact else np.int64(0)
            else:
                first = np.int64(starts[(group - 1) * families + j])
            absorb(
                lanes, depth, rows, scalars, points, order, first, np.int64(starts[group * families + j]),
                origin - nodes[j], False, rate, shares, j, None, far_indices, far, own, stride, moments, extras, local,
                local_extra, base, base_extra,
            )  # fmt: skip
        if folded and starts[group] == count:
            # all sources are passed: what rounding has left of their sum would be multiplied with the distance
            store(moments, (powers - 1) * width, zeros(moments, lanes))
            store(local, (powers - 1) * width, zeros(local, lanes))
            extras[powers - 1] = local_extra[powers - 1] = 0.0
        fold(lanes, powers, moments, extras, local, local_extra, base, base_extra)
        if two_sided:
            for k in range(powers):
                place = tile * powers + k
                store(base, (powers + k) * width, load(top, place * width, lanes))
                store(moments, (powers + k) * width, widen(load(top, place * width, lanes)))
                base_extra[powers + k] = top_extra[place]
                extras[powers + k] = top_extra[place]
        list_tile(
            depth, terms, points, order, source_low, source_high, target_points, target_low, target_high, start, stop,
            origin, group, nodes, below, above, shares, removed, starts, nears, near_stops, far_stops, near_indices,
            near, far_indices, far, stride,
        )  # fmt: skip
        near_start = far_start = pending = 0
        for m in range(start, stop, 4):
            near_stop, far_stop = np.int64(near_stops[group]), np.int64(far_stops[group])
            if distant:
                # of all nodes the first is the first to come to a source
                n = np.int64(at(starts, min(group + AHEAD, last_group) * families))
                for i in range(4):
                    prefetch(out, np.int64(at(target_order, m + 4 * AHEAD + i)) * width, lanes)
                    prefetch(rows, np.int64(at(order, n + i)) * width, lanes)
            lowest, highest = group * families, group * families + final
            if compact and (starts[lowest] <= nears[highest] or nears[lowest] - starts[highest] <= FEW):
                # no source is in the windows of all four, or few are: weights close to zero keep all their digits
                last = np.float64(target_points[min(m + 3, stop - 1)])
                begin = np.int64(starts[highest])
                # to the very edge: there may be a jump, and beside a coordinate of 1e30 a support of one has no width
                close = first_beyond(points, np.int64(nears[lowest]), last - nodes[0])
                _sum_windows(
                    lanes, depth, rows, scalars, points, order, begin, close, nodes, below, target_points, target_order,
                    m, min(m + 4, stop), out, out_extra, products,
                )  # fmt: skip
            else:
                m1, m2, m3 = min(m + 1, stop - 1), min(m + 2, stop - 1), min(m + 3, stop - 1)
                target0, target1 = np.int64(at(target_order, m)), np.int64(at(target_order, m1))
                target2, target3 = np.int64(at(target_order, m2)), np.int64(at(target_order, m3))
                spots = widen(four(target_points, m, stop))
                low, high = ones, ones
                if two_sided:
                    low, high = four(target_low, m, stop), four(target_high, m, stop)
                # from the smallest sums to the largest: near sources, far ones, the dimensions before
                total0 = total1 = total2 = total3 = zeros(out, lanes)
                extra = zeros(out, FOUR)
                for event in range(near_start, near_stop):
                    index = np.int64(at(near_indices, event))
                    row = load(rows, index * width, lanes)
                    total0 = multiply_add(at(near, 4 * event), row, total0)
                    total1 = multiply_add(at(near, 4 * event + 1), row, total1)
                    total2 = multiply_add(at(near, 4 * event + 2), row, total2)
                    total3 = multiply_add(at(near, 4 * event + 3), row, total3)
                    extra = extra + load(near, 4 * event, FOUR) * splat(at(scalars, index), FOUR)
                if profile.tied:
                    for j in range(families):
                        n = np.int64(nears[lowest + j])
                        last = lane(spots, 3) - nodes[j]
                        if n < count and np.float64(at(points, n)) == last:
                            # ties with the last of the four are summed once for all targets that share them
                            if ties_at != n:
                                ties_at = n
                                ties_extra = _sum_ties(lanes, rows, scalars, points, order, count, n, ties)
                            difference = narrow(spots - splat(lane(spots, 3), FOUR), out)
                            factor = near_weights(FOUR, depth, terms, below, above, j, difference, ones, ones)
                            row = load(ties, 0, lanes)
                            total0 = multiply_add(lane(factor, 0), row, total0)
                            total1 = multiply_add(lane(factor, 1), row, total1)
                            total2 = multiply_add(lane(factor, 2), row, total2)
                            total3 = multiply_add(lane(factor, 3), row, total3)
                            extra = extra + factor * splat(real(ties_extra), FOUR)
                # far: below by the distance from the first target of the tile, above by that to the last
                distance = narrow(spots - splat(origin, FOUR), out)
                factor = low * scale
                for k in range(number):
                    if k == powers:
                        distance = narrow(splat(end, FOUR) - spots, out)
                        factor = high * scale
                    row = load(base, k * width, lanes) + load(local, k * width, lanes)
                    total0 = multiply_add(lane(factor, 0), row, total0)
                    total1 = multiply_add(lane(factor, 1), row, total1)
                    total2 = multiply_add(lane(factor, 2), row, total2)
                    total3 = multiply_add(lane(factor, 3), row, total3)
                    extra = extra + factor * splat(at(base_extra, k) + at(local_extra, k), FOUR)
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
            # what lies below the next group is far for it
            sum_far(lanes, terms, rows, scalars, far_indices, far_start, far_stop, far, stride, local, local_extra)
            pending += far_stop - far_start
            near_start, far_start = near_stop, far_stop
            group += 1
            if pending > FOLD:
                fold(lanes, number, moments, extras, local, local_extra, base, base_extra)
                pending = 0
        fold(lanes, number, moments, extras, local, local_extra, base, base_extra)
