"""Moments of far sources, `sum z^k e^(-rate z) v`: adding sources, moving the origin, combining nodes.

Every row of channels has an extra scalar beside it, with moments of its own: `extras` go with `moments`. Arrays are
flat; the moments of node `j` start at row `j * depth`.
"""

import math

import numpy as np

from .compiled import compiled
from .exponential import exp
from .simd import at, load, multiply_add, narrow, store, value_of, widen, zeros

# sources that are summed in the working precision before float64 takes over
FOLD = 128


@compiled
def shift(lanes, depth, moments, extras, j, distance, rate, pascal):
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
def combine(lanes, depth, moments, extras, spread, combined, combined_extra, first):
    """What far sources give, as factors of `y^l`: `sum_j sum_i spread[j, l, i] moments[j, i - l]`."""
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
def fold(lanes, depth, local, local_extra, moments, extras):
    """Move what was summed in the working precision to the moments in float64."""
    width = value_of(lanes)
    for place in range(extras.shape[0]):
        total = widen(load(local, place * width, lanes))
        store(moments, place * width, load(moments, place * width, lanes) + total)
        store(local, place * width, zeros(local, lanes))
        extras[place] += np.float64(local_extra[place])
        local_extra[place] = 0.0


@compiled
def absorb(lanes, depth, rows, scalars, points, order, start, stop, origin, sign, rate, weights, moments, extras, j):
    """Add the moments of sources `start ... stop - 1` to those of node `j`, with `z = sign (origin - t) >= 0`."""
    width, powers = value_of(lanes), value_of(depth)
    real = rows.dtype.type
    while start < stop:
        count = min(stop - start, FOLD)
        for i in range(count):
            distance = sign * (origin - np.float64(points[start + i]))
            weights[i] = exp(real(-rate * distance)) if rate != 0.0 else real(1.0)
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
def absorb_higher(lanes, depth, rows, scalars, points, order, start, stop, origin, sign, decays, local, local_extra, j):
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
def absorb_local(lanes, depth, rows, scalars, points, order, start, stop, origin, sign, decays, local, local_extra, j):
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
        absorb_higher(
            lanes, depth, rows, scalars, points, order, start, stop, origin, sign, decays, local, local_extra, j
        )
