"""What far sources give to the targets of a tile: sums of weighted rows that every target combines for itself.

For a target at `y` from the tile's origin they give `e^(-rate y) sum_l y^l sums[l]`. A row `sums[l]` is kept in float64
(`moments`), with what was added since the last fold beside it in the working precision (`local`), and what the moments
were then, rounded (`base`). Every row of channels has an extra scalar beside it, which is summed alike.
"""

import math
from collections import namedtuple

import numpy as np

from ...cpu.compiled import inlined
from ...cpu.exponential import exp
from ...cpu.memory import zeroed
from ...cpu.simd import BATCH, SPARE, at, load, multiply_add, narrow, splat, store, value_of, widen, zeros
from .events import FOLD, list_far, weigh_far

# sums of far sources, flat, a row for each power on each side; the extras go with them
Sums = namedtuple("Sums", "moments extras local local_extra base base_extra")


@inlined
def make_sums(lanes, terms, real):
    """Empty Sums of `terms` rows; `real` is an array of the working precision."""
    width = value_of(lanes)
    return Sums(
        zeroed(terms * width, np.float64),
        zeroed(terms, np.float64),
        zeroed(terms * width, real),
        zeroed(terms, real),
        zeroed(terms * width, real),
        zeroed(terms, real),
    )


@inlined
def shift(lanes, depth, moments, extras, distance, rate, pascal):
    """Move the origin by `distance >= 0` towards the targets: `y` becomes `y + distance`."""
    width, powers = value_of(lanes), value_of(depth)
    decay = math.exp(-rate * distance) if rate != 0.0 else 1.0
    for k in range(powers):
        total = zeros(moments, lanes)
        extra = 0.0
        factor = decay
        for i in range(k, powers):
            term = factor * pascal[i, k]
            total = multiply_add(term, load(moments, i * width, lanes), total)
            extra += term * extras[i]
            factor *= distance
        store(moments, k * width, total)
        extras[k] = extra


@inlined
def fold(lanes, terms, moments, extras, local, local_extra, base, base_extra):
    """Move what was summed in the working precision to the moments in float64, and round those."""
    width = value_of(lanes)
    for k in range(terms):
        total = load(moments, k * width, lanes) + widen(load(local, k * width, lanes))
        store(moments, k * width, total)
        store(base, k * width, narrow(total, base))
        store(local, k * width, zeros(local, lanes))
        extras[k] += np.float64(local_extra[k])
        base_extra[k] = extras[k]
        local_extra[k] = 0.0


@inlined
def sum_far(lanes, terms, rows, scalars, indices, start, stop, weights, stride, local, local_extra):
    """Add events `start ... stop - 1` to all rows of `local`, two rows at a time: more would not stay in registers."""
    width, number = value_of(lanes), value_of(terms)
    for k in range(0, number, 2):
        other = min(k + 1, number - 1)
        first, second = load(local, k * width, lanes), load(local, other * width, lanes)
        first_extra, second_extra = local_extra[k], local_extra[other]
        for event in range(start, stop):
            index = np.int64(at(indices, event))
            row = load(rows, index * width, lanes)
            scalar = at(scalars, index)
            weight = at(weights, k * stride + event)
            first = multiply_add(weight, row, first)
            first_extra += weight * scalar
            if number > 1:
                weight = at(weights, other * stride + event)
                second = multiply_add(weight, row, second)
                second_extra += weight * scalar
        # where the number is odd the last row has been summed twice, and this is its first sum
        if number > 1:
            store(local, other * width, second)
            local_extra[other] = second_extra
        store(local, k * width, first)
        local_extra[k] = first_extra


@inlined
def absorb(
    lanes, depth, rows, scalars, points, order, start, stop, origin, above, rate, shares, j, decays, indices, far, own,
    stride, moments, extras, local, local_extra, base, base_extra,
):  # fmt: skip
    """Add any number of sources, `start ... stop - 1`, to the sums; the last of them are not folded yet.

    Their exponentials are `decays`, or None for those that have to be computed.
    """
    while start < stop:
        count = min(stop - start, FOLD)
        list_far(order, start, start + count, indices, 0)
        if decays is None:
            if rate != 0.0:
                growth = splat(rate if above else -rate, BATCH)
                for i in range(0, count, SPARE):
                    distance = splat(origin, BATCH) - widen(load(points, start + i, BATCH))
                    store(own, i, exp(narrow(growth * distance, own)))
            weigh_far(depth, points, start, start + count, origin, above, shares, j, own, start, far, 0, stride)
        else:
            weigh_far(depth, points, start, start + count, origin, above, shares, j, decays, 0, far, 0, stride)
        sum_far(lanes, depth, rows, scalars, indices, 0, count, far, stride, local, local_extra)
        start += count
        if start < stop:
            fold(lanes, value_of(depth), moments, extras, local, local_extra, base, base_extra)
