"""The walker: sums over sorted points of a sided kernel, for one dimension and a block of channels.

A sided kernel is, for `u = s - t`,

    f(u) = sum_j  H(u - x_j) b_j(u - x_j) e^(-rate (u - x_j))  +  H(-u - x_j) a_j(-u - x_j) e^(-rate (-u - x_j))

with nodes `x_j`, polynomials `b_j` (sources *below* the target) and `a_j` (sources *above*), and `H(0) = 1/2`, so a tie is
shared equally between the sides. `|u|`, `sign`, the bump, any spline, Laplace, Matern and the derivatives of all of
them are such kernels. Only a node at zero may have terms above.

Targets are walked upwards, four at a time, with one pointer per node into the sources. The sources that the four lie
among are *near*: they are few, and are summed directly by the formula. Those below are *far*, and are known by their
moments. With an origin `o` just below, `y = s - o` and `z = o - x_j - t`, the binomial theorem gives

    sum_n b(y + z_n) e^(-rate (y + z_n)) v_n = e^(-rate y) sum_l y^l  sum_{i>=l} b_i C(i,l)  sum_n z_n^(i-l) e^(-rate z_n) v_n.

Moments are summed in two stages: in the working precision since the last fold, and in float64 before it. What the nodes
give together is combined in float64 before it is rounded, so a bump does not cancel; and all numbers are distances
within a tile of a few dozen targets, so an offset of the inputs costs nothing and no exponential overflows. Far sources
above are the mirror image, found by a first sweep from the top.
"""

import math
from collections import namedtuple

import numpy as np
from numba import types
from numba.extending import overload

from .compiled import compiled
from .simd import (
    SCAN, Constant, at, count_below, count_up_to, float_from_bits, inner, lane, load, magnitude, multiply_add, narrow, pack, put, smaller, splat, step,
    store, value_of, widen, zeros,
)  # fmt: skip

FOUR = Constant(4)
# targets of a tile, which share an origin
TILE = 64
# sources that are summed in the working precision before float64 takes over
FOLD = 128
# a tile spans at most this many e-folds, so e^(rate * span) stays far from overflow
MAX_EXPONENT = 8.0

# the points that are summed: their rows (N * width, flat) and extra scalars by index; sorted coordinates, with SCAN
# infinities behind them, and their order
Sources = namedtuple("Sources", "rows extra points order count")
# the points that are summed for: sorted coordinates and their order
Targets = namedtuple("Targets", "points order count")
# a sided kernel; `spread_below[j, l, i] = b_ji C(i, l)`, `spread_above` alike, and `pascal[k, i] = C(k, i)`
Profile = namedtuple("Profile", "nodes below above spread_below spread_above pascal rate span two_sided tied compact")
# by source: e^(-rate z) relative to the first and to the last target of its tile; by target: the counterparts
Decays = namedtuple("Decays", "source_low source_high target_low target_high")
# tiles: first target and first group of each, and their number; groups of four: how many sources lie below the first of
# them and below the last, at every node, and how many not above the last; `top` and `top_extra` are work space
Plan = namedtuple("Plan", "tiles groups number starts nears above top top_extra")

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)


@compiled
def _exp32(x):
    """e^x in float32 to about one unit in the last place, written so that LLVM vectorises it; zero below e^-87."""
    bounded = min(max(x, np.float32(-87.0)), np.float32(87.0))
    power = np.floor(bounded * _LOG2E + np.float32(0.5))
    r = bounded - power * _LN2_HIGH - power * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    scale = float_from_bits(np.int32((np.int32(power) + np.int32(127)) << np.int32(23)))
    return p * scale if x > np.float32(-87.0) else np.float32(0.0)


def _exp(x):
    """e^x in the type of `x`."""
    return math.exp(x)


@overload(_exp)
def _exp_compiled(x):
    if x == types.float32:
        return lambda x: _exp32(x)
    return lambda x: math.exp(x)


@compiled
def _first_from(points, n, place):
    """The first of the sorted points from `n` on that is not below `place`."""
    # sixteen at a time and without a branch for each: how many lie between two targets cannot be predicted
    while True:
        passed = count_below(points, n, place)
        n += passed
        if passed < SCAN:
            return n


@compiled
def _first_beyond(points, n, place):
    """The first of the sorted points from `n` on that lies beyond `place`."""
    while True:
        passed = count_up_to(points, n, place)
        n += passed
        if passed < SCAN:
            return n


@compiled
def plan_tiles(points, span, tiles, groups):
    """Cut sorted targets into tiles of at most TILE that span at most `span`, and those into groups of four.

    Returns the number of tiles; `tiles[i]` is the first target of tile i and `groups[i]` its first group. Behind the last
    tile stand the number of targets and the number of groups.
    """
    number = start = group = 0
    while start < points.shape[0]:
        tiles[number], groups[number] = start, group
        number += 1
        first = points[start]
        stop = min(start + TILE, points.shape[0])
        while stop > start + 1 and not points[stop - 1] - first <= span:
            stop -= 1
        group += (stop - start + 3) // 4
        start = stop
    tiles[number], groups[number] = points.shape[0], group
    return number


@compiled
def plan_groups(sources, targets, nodes, tiles, groups, number, starts, nears, above):
    """Find the sources that each group of targets lies among, see Plan."""
    families = nodes.shape[0]
    for j in range(families):
        starts[j, 0] = 0
    for tile in range(number):
        stop = np.int64(tiles[tile + 1])
        group = np.int64(groups[tile])
        for m in range(tiles[tile], stop, 4):
            first, last = np.float64(at(targets, m)), np.float64(at(targets, min(m + 3, stop - 1)))
            # all nodes together: each waits for its own last step only
            for j in range(families):
                n = _first_from(sources, np.int64(starts[j, max(group - 1, 0)]), first - nodes[j])
                starts[j, group] = n
                nears[j, group] = _first_from(sources, n, last - nodes[j])
            above[group] = _first_beyond(sources, np.int64(nears[0, group]), last)
            group += 1


@compiled
def _fill_exponentials(points, start, stop, origin, end, rate, falling, low, high):
    """`e^(-rate (x - origin))` and `e^(-rate (end - x))` for targets, which are `falling`; for sources their inverses."""
    real = low.dtype.type
    whole = math.exp(-rate * (end - origin))
    if falling:
        for i in range(start, stop):
            low[i] = _exp(real(-rate * (np.float64(points[i]) - origin)))
    else:
        whole = 1.0 / whole
        for i in range(start, stop):
            low[i] = _exp(real(rate * (np.float64(points[i]) - origin)))
    # the two multiply to the same number everywhere in the tile: a division is cheaper than an exponential
    product = real(whole)
    for i in range(start, stop):
        high[i] = product / low[i]


@compiled
def fill_decays(points, targets, rate, tiles, number, source_low, source_high, target_low, target_high):
    """Exponentials of all sources and targets relative to the two ends of the tile they are in, see Decays.

    Sources between two tiles have none: they are absorbed with weights of their own.
    """
    n = 0
    for tile in range(number):
        start, stop = np.int64(tiles[tile]), np.int64(tiles[tile + 1])
        origin, end = np.float64(targets[start]), np.float64(targets[stop - 1])
        _fill_exponentials(targets, start, stop, origin, end, rate, True, target_low, target_high)
        first = _first_from(points, n, origin)
        n = _first_beyond(points, first, end)
        _fill_exponentials(points, first, n, origin, end, rate, False, source_low, source_high)


@compiled
def _shift(lanes, depth, moments, extras, j, distance, rate, pascal):
    """Move `moments[k] = sum z^k e^(-rate z) v` to an origin further by `distance >= 0`: `z` becomes `z + distance`."""
    width, powers = value_of(lanes), value_of(depth)
    decay = math.exp(-rate * distance) if rate != 0.0 else 1.0
    for k in range(powers - 1, -1, -1):
        total = zeros(moments, lanes)
        extra = 0.0
        factor = decay
        for i in range(k, -1, -1):
            term = factor * pascal[k, i]
            total = multiply_add(term, load(moments, (j * powers + i) * width, lanes), total)
            extra += term * extras[j * powers + i]
            factor *= distance
        store(moments, (j * powers + k) * width, total)
        extras[j * powers + k] = extra


@compiled
def _combine(lanes, depth, moments, extras, spread, combined, combined_extra, first):
    """What far sources with these moments give, as factors of `y^l`: `sum_j sum_i spread[j, l, i] moments[j, i - l]`."""
    width, powers = value_of(lanes), value_of(depth)
    for power in range(powers):
        total = zeros(moments, lanes)
        extra = 0.0
        for j in range(spread.shape[0]):
            for i in range(power, powers):
                factor = spread[j, power, i]
                total = multiply_add(factor, load(moments, (j * powers + i - power) * width, lanes), total)
                extra += factor * extras[j * powers + i - power]
        store(combined, (first + power) * width, narrow(total, combined))
        combined_extra[first + power] = extra


@compiled
def _fold(lanes, depth, local, local_extra, moments, extras):
    """Move what was summed in the working precision to the moments in float64."""
    width = value_of(lanes)
    for place in range(extras.shape[0]):
        total = widen(load(local, place * width, lanes))
        store(moments, place * width, load(moments, place * width, lanes) + total)
        store(local, place * width, zeros(local, lanes))
        extras[place] += np.float64(local_extra[place])
        local_extra[place] = 0.0


@compiled
def _absorb(lanes, depth, rows, scalars, points, order, start, stop, origin, sign, rate, weights, moments, extras, j):
    """Add the moments of sources `start ... stop - 1` to those of node `j`, with `z = sign (origin - t) >= 0`."""
    width, powers = value_of(lanes), value_of(depth)
    real = rows.dtype.type
    while start < stop:
        count = min(stop - start, FOLD)
        for i in range(count):
            distance = sign * (origin - np.float64(points[start + i]))
            weights[i] = _exp(real(-rate * distance)) if rate != 0.0 else real(1.0)
        for k in range(powers):
            total = zeros(rows, lanes)
            extra = real(0.0)
            for i in range(count):
                index = np.int64(at(order, start + i))
                total = multiply_add(at(weights, i), load(rows, index * width, lanes), total)
                extra += at(weights, i) * at(scalars, index)
            place = j * powers + k
            store(moments, place * width, load(moments, place * width, lanes) + widen(total))
            extras[place] += np.float64(extra)
            for i in range(count):
                weights[i] *= real(sign * (origin - np.float64(points[start + i])))
        start += count


@compiled
def _absorb_higher(
    lanes, depth, rows, scalars, points, order, start, stop, origin, sign, decays, local, local_extra, j
):
    """Add moments two and up of sources `start ... stop - 1`, which the main loop leaves out, to `local`."""
    width, powers = value_of(lanes), value_of(depth)
    real = local.dtype.type
    for k in range(2, powers):
        place = j * powers + k
        total = load(local, place * width, lanes)
        extra = local_extra[place]
        for n in range(start, stop):
            index = np.int64(at(order, n))
            weight = at(decays, n)
            distance = real(sign * (origin - np.float64(at(points, n))))
            for _ in range(k):
                weight *= distance
            total = multiply_add(weight, load(rows, index * width, lanes), total)
            extra += weight * at(scalars, index)
        store(local, place * width, total)
        local_extra[place] = extra


@compiled
def _absorb_local(lanes, depth, rows, scalars, points, order, start, stop, origin, sign, decays, local, local_extra, j):
    """Add the moments of sources `start ... stop - 1`, which lie in the tile, to `local`."""
    width, powers = value_of(lanes), value_of(depth)
    real = local.dtype.type
    low = load(local, j * powers * width, lanes)
    second = j * powers + min(1, powers - 1)
    high = load(local, second * width, lanes)
    low_extra, high_extra = local_extra[j * powers], local_extra[second]
    for n in range(start, stop):
        index = np.int64(at(order, n))
        row = load(rows, index * width, lanes)
        scalar = at(scalars, index)
        weight = at(decays, n)
        low = multiply_add(weight, row, low)
        low_extra += weight * scalar
        if powers > 1:
            weight *= real(sign * (origin - np.float64(at(points, n))))
            high = multiply_add(weight, row, high)
            high_extra += weight * scalar
    store(local, j * powers * width, low)
    local_extra[j * powers] = low_extra
    if powers > 1:
        store(local, second * width, high)
        local_extra[second] = high_extra
    if powers > 2:
        _absorb_higher(
            lanes, depth, rows, scalars, points, order, start, stop, origin, sign, decays, local, local_extra, j
        )


@compiled
def _sweep_from_top(lanes, depth, sources, targets, profile, decays, plan, weights):
    """`plan.top[group]`: what the sources above a group of targets give, by powers of the distance to the tile's end."""
    width, powers = value_of(lanes), value_of(depth)
    rows, scalars, points, order, count = sources
    real = rows.dtype.type
    moments = np.zeros(powers * width)
    extras = np.zeros(powers)
    local = np.zeros(powers * width, rows.dtype)
    local_extra = np.zeros(powers, rows.dtype)
    base = np.zeros(powers * width, rows.dtype)
    base_extra = np.zeros(powers, rows.dtype)
    above, top, top_extra, tiles = plan.above, plan.top, plan.top_extra, plan.tiles
    spread, pascal, decay = profile.spread_above, profile.pascal, decays.source_high
    spots = targets.points
    group = np.int64(plan.groups[plan.number])
    n = count
    previous = 0.0
    for tile in range(plan.number - 1, -1, -1):
        start, stop = np.int64(tiles[tile]), np.int64(tiles[tile + 1])
        end = np.float64(spots[stop - 1])
        if tile < plan.number - 1:
            _shift(lanes, depth, moments, extras, 0, previous - end, profile.rate, pascal)
        previous = end
        first = np.int64(above[group - 1])
        _absorb(
            lanes, depth, rows, scalars, points, order, first, n, end, -1.0, profile.rate, weights, moments, extras, 0
        )
        _combine(lanes, depth, moments, extras, spread, base, base_extra, 0)
        n = first
        pending = 0
        for _ in range(start, stop, 4):
            group -= 1
            first = np.int64(above[group])
            _absorb_local(lanes, depth, rows, scalars, points, order, first, n, end, -1.0, decay, local, local_extra, 0)
            pending += n - first
            n = first
            if pending > FOLD:
                _fold(lanes, depth, local, local_extra, moments, extras)
                _combine(lanes, depth, moments, extras, spread, base, base_extra, 0)
                pending = 0
            for power in range(powers):
                total = load(base, power * width, lanes)
                extra = base_extra[power]
                for i in range(power, powers):
                    factor = real(spread[0, power, i])
                    total = multiply_add(factor, load(local, (i - power) * width, lanes), total)
                    extra += factor * local_extra[i - power]
                store(top, (group * powers + power) * width, total)
                top_extra[group * powers + power] = extra
        _fold(lanes, depth, local, local_extra, moments, extras)


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
        at(numbers, m), at(numbers, min(m + 1, stop - 1)), at(numbers, min(m + 2, stop - 1)), at(numbers, min(m + 3, stop - 1))
    )


@compiled
def _add_directly(lanes, depth, rows, scalars, points, order, start, stop, nodes, below, above, spot, total, extra):
    """Add to `total` and `extra` the sources of one window of a compact kernel, one by one; returns both."""
    width, powers = value_of(lanes), value_of(depth)
    real = rows.dtype.type
    for n in range(start, stop):
        distance = spot - np.float64(at(points, n))
        # beyond the last node the terms cancel but for rounding; there the kernel is zero
        if distance > nodes[-1]:
            continue
        weight = 0.0
        for j in range(nodes.shape[0]):
            beyond = distance - nodes[j]
            if beyond >= 0.0:
                term = 0.0
                for k in range(powers - 1, -1, -1):
                    term = term * beyond + np.float64(below[j, k])
                weight += term if beyond > 0.0 else 0.5 * term
        index = np.int64(at(order, n))
        total = multiply_add(real(weight), load(rows, index * width, lanes), total)
        extra += real(weight) * at(scalars, index)
    return total, extra


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
    tiles, groups, starts, nears, top, top_extra = (
        plan.tiles,
        plan.groups,
        plan.starts,
        plan.nears,
        plan.top,
        plan.top_extra,
    )
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
        _sweep_from_top(lanes, depth, sources, targets, profile, decays, plan, weights)
    previous = 0.0
    ones = splat(real(1.0), FOUR)
    for tile in range(plan.number):
        start, stop = np.int64(tiles[tile]), np.int64(tiles[tile + 1])
        group = np.int64(groups[tile])
        origin = np.float64(target_points[start])
        end = np.float64(target_points[stop - 1])
        for j in range(families):
            if tile > 0:
                _shift(lanes, depth, moments, extras, j, origin - previous, rate, pascal)
            first = np.int64(starts[j, group - 1]) if tile > 0 else np.int64(0)
            _absorb(
                lanes, depth, rows, scalars, points, order, first, np.int64(starts[j, group]), origin - nodes[j], 1.0, rate,
                weights, moments, extras, j,
            )  # fmt: skip
        previous = origin
        _combine(lanes, depth, moments, extras, spread, base, base_extra, 0)
        pending = 0
        for m in range(start, stop, 4):
            m1, m2, m3 = min(m + 1, stop - 1), min(m + 2, stop - 1), min(m + 3, stop - 1)
            target0, target1 = np.int64(at(target_order, m)), np.int64(at(target_order, m1))
            target2, target3 = np.int64(at(target_order, m2)), np.int64(at(target_order, m3))
            spots = widen(_four(target_points, m, stop))
            low, high = ones, ones
            if rate != 0.0:
                low, high = _four(target_low, m, stop), _four(target_high, m, stop)
            # no source is in the windows of all four: they are few, or lie at the edges, and are summed one by one
            sparse = profile.compact and starts[0, group] <= nears[final, group]
            if products is None:
                total0, total1 = load(out, target0 * width, lanes), load(out, target1 * width, lanes)
                total2, total3 = load(out, target2 * width, lanes), load(out, target3 * width, lanes)
                extra = pack(
                    at(out_extra, target0), at(out_extra, target1), at(out_extra, target2), at(out_extra, target3)
                )
            else:
                total0 = total1 = total2 = total3 = zeros(out, lanes)
                extra = zeros(out, FOUR)
            if sparse:
                begin = np.int64(starts[final, group])
                close = _first_beyond(points, np.int64(nears[0, group]), lane(spots, 3) - nodes[0])
                total0, extra0 = _add_directly(
                    lanes, depth, rows, scalars, points, order, begin, close, nodes, below, above, lane(spots, 0), total0,
                    lane(extra, 0),
                )  # fmt: skip
                total1, extra1 = _add_directly(
                    lanes, depth, rows, scalars, points, order, begin, close, nodes, below, above, lane(spots, 1), total1,
                    lane(extra, 1),
                )  # fmt: skip
                total2, extra2 = _add_directly(
                    lanes, depth, rows, scalars, points, order, begin, close, nodes, below, above, lane(spots, 2), total2,
                    lane(extra, 2),
                )  # fmt: skip
                total3, extra3 = _add_directly(
                    lanes, depth, rows, scalars, points, order, begin, close, nodes, below, above, lane(spots, 3), total3,
                    lane(extra, 3),
                )  # fmt: skip
                extra = pack(extra0, extra1, extra2, extra3)
            else:
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
            # from the last to the first: behind the end of a tile the last target stands in for those that are missing
            if products is None:
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
                    _absorb_local(
                        lanes, depth, rows, scalars, points, order, first, n, origin - nodes[j], 1.0, source_low, local,
                        local_extra, j,
                    )  # fmt: skip
                    pending += n - first
                if pending > FOLD:
                    _fold(lanes, depth, local, local_extra, moments, extras)
                    _combine(lanes, depth, moments, extras, spread, base, base_extra, 0)
                    pending = 0
        _fold(lanes, depth, local, local_extra, moments, extras)
