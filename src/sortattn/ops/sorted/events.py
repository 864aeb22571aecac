"""Rows that are about to be summed: which, and with which weights.

A tile's events are listed before any of its rows is read. That takes short loops with long chains of instructions out
of the loops over rows, and it lets sixteen weights be computed at a time.
"""

from collections import namedtuple

import numpy as np

from ...cpu.compiled import inlined
from ...cpu.memory import ones, zeroed
from ...cpu.simd import (
    BATCH,
    FOUR,
    SPARE,
    at,
    cycle,
    heaviside,
    load,
    narrow,
    pack,
    put,
    repeat,
    splat,
    store,
    value_of,
    widen,
    zeros,
)

# sources that are summed in the working precision before float64 takes over
FOLD = 128

# near sources: their indices, and weights for each target of a group of four, `near[4 * event + target]`; far sources
# alike, with a weight for each row of the sums, `far[row * stride + event]`; `own` is room for their exponentials
Events = namedtuple("Events", "near_indices near far_indices far own stride")


@inlined
def make_events(terms, room, like):
    """Room for that many events, and for what is computed together with the last of them."""
    stride = room + SPARE
    return Events(
        zeroed(stride, np.int32),
        zeroed(4 * stride, like),
        zeroed(stride, np.int32),
        zeroed(terms * stride, like),
        ones(FOLD + SPARE, like),
        stride,
    )


@inlined
def four(numbers, m, stop):
    """Entries `m ... m + 3` as a vector; behind `stop` the last one before it stands in."""
    if m + 4 <= stop:
        return load(numbers, m, FOUR)
    return pack(
        at(numbers, m),
        at(numbers, min(m + 1, stop - 1)),
        at(numbers, min(m + 2, stop - 1)),
        at(numbers, min(m + 3, stop - 1)),
    )


@inlined
def near_weights(lanes, depth, terms, below, above, j, difference, low, high):
    """What sources at node `j` add: `difference` is `s - x_j - t`, `low` is `e^(-rate difference)`, `high` its inverse.

    Where there is a side above, all near sources have been summed as if they were on that side.
    """
    powers = value_of(depth)
    weight = splat(below[j, powers - 1], lanes)
    for k in range(powers - 2, -1, -1):
        weight = weight * difference + splat(below[j, k], lanes)
    if value_of(terms) > powers:
        opposite = splat(above[j, powers - 1], lanes)
        for k in range(powers - 2, -1, -1):
            opposite = splat(above[j, k], lanes) - opposite * difference
        weight = weight * low - opposite * high
    return heaviside(difference, weight)


@inlined
def list_far(order, start, stop, indices, event):
    """Sources `start ... stop - 1` as the events from `event` on."""
    for n in range(start, stop, SPARE):
        store(indices, event + n - start, load(order, n, BATCH))


@inlined
def weigh_far(depth, points, start, stop, origin, above, shares, j, decay, skipped, weights, first, stride):
    """The weights of far sources in the sums of powers `0, 1 ...`, at `weights[first]`, `weights[first + stride]` ...

    With `z = origin - t`, or minus that on the side `above`, the weight for `y^l` is
    `sum_(i>=l) shares[j, l, i] z^(i-l) e^(-rate z)`; the exponential of source n is `decay[n - skipped]`.
    """
    powers = value_of(depth)
    # the origin in two parts: the difference from the first is exact where it is small
    major = weights.dtype.type(origin)
    minor = weights.dtype.type(origin - np.float64(major))
    for n in range(start, stop, SPARE):
        z = splat(major, BATCH) - load(points, n, BATCH) + splat(minor, BATCH)
        if above:
            z = zeros(weights, BATCH) - z
        for power in range(powers):
            # the exponential comes first: a power of a large distance may be infinite where it is zero
            term = load(decay, n - skipped, BATCH)
            weight = splat(shares[j, power, power], BATCH) * term
            for i in range(power + 1, powers):
                term = term * z
                weight = weight + splat(shares[j, power, i], BATCH) * term
            store(weights, first + power * stride + n - start, weight)


@inlined
def list_tile(
    depth, terms, points, order, source_low, source_high, spots, target_low, target_high, start, stop, origin, group,
    nodes, below, above, shares, removed, starts, nears, near_stops, far_stops, near_indices, near, far_indices, far,
    stride,
):  # fmt: skip
    """List the events of targets `start ... stop - 1`, a tile with that origin whose first group is `group`.

    Those of a group end at `near_stops[group]`: sources between the first and the last of its targets, at every node;
    and at `far_stops[group]`: sources between its first target and that of the next group, far for all to come.
    """
    powers, families = value_of(depth), nodes.shape[0]
    two_sided = value_of(terms) > powers
    end = np.float64(at(spots, stop - 1))
    near_stop = far_stop = 0
    for m in range(start, stop, 4):
        places = widen(four(spots, m, stop))
        low, high = cycle(four(target_low, m, stop)), cycle(four(target_high, m, stop))
        for j in range(families):
            first, last = np.int64(at(starts, group * families + j)), np.int64(at(nears, group * families + j))
            # in two parts: the difference of a source from the first is exact where it is small
            major = narrow(places - splat(nodes[j], FOUR), near)
            minor = cycle(narrow(places - splat(nodes[j], FOUR) - widen(major), near))
            # four sources and four targets at a time
            for n in range(first, last, 4):
                event = near_stop + n - first
                store(near_indices, event, load(order, n, FOUR))
                difference = cycle(major) - repeat(load(points, n, FOUR)) + minor
                fall = low * repeat(load(source_low, n, FOUR))
                rise = high * repeat(load(source_high, n, FOUR))
                store(near, 4 * event, near_weights(BATCH, depth, terms, below, above, j, difference, fall, rise))
            near_stop += last - first
        put(near_stops, group, np.int32(near_stop))
        if m + 4 < stop:
            for j in range(families):
                place = group * families + j
                first, last = np.int64(at(starts, place)), np.int64(at(starts, place + families))
                list_far(order, first, last, far_indices, far_stop)
                weigh_far(
                    depth, points, first, last, origin - nodes[j], False, shares, j, source_low, 0, far, far_stop,
                    stride,
                )  # fmt: skip
                if two_sided:
                    # they are no longer above
                    weigh_far(
                        depth, points, first, last, end, True, removed, j, source_high, 0, far,
                        powers * stride + far_stop, stride,
                    )  # fmt: skip
                far_stop += last - first
        put(far_stops, group, np.int32(far_stop))
        group += 1
