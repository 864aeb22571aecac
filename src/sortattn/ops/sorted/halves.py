"""A line folded at zero, see `kernels.Terms`: its halves, and what the sources of one half give before any is passed.

A target `s` starts with `-f(|s|)` from every source on its side, and with the constant from all: that takes the sums of
the rows of all sources, and of those with positive and with negative coordinates in every dimension.
"""

from collections import namedtuple

import numpy as np

from ...cpu.compiled import compiled
from ...cpu.memory import empty, zeroed
from ...cpu.simd import at, load, multiply_add, splat, store, value_of, widen, zeros

# rows that are summed in the working precision before float64 takes over
_BLOCK = 32

# a side of zero with so few sources, or at most this part of all, is summed by itself: as what the other side leaves of
# all of them it would drown in the rounding of that side
_FEW = 256
_PART = 8

# sums of rows, each with that of their extra scalars: of all sources; of those with positive coordinates in each of the
# columns that are walked together; of those in one half of one column; and what `walk` begins with there
Halves = namedtuple("Halves", "total total_extra positive positive_extra side side_extra initial initial_extra weights")


@compiled
def make_halves(lanes, depth, columns, real):
    """Room for the sums of that many columns; `real` is an array of the working precision."""
    width, powers = value_of(lanes), value_of(depth)
    return Halves(
        zeroed(width, np.float64),
        zeroed(1, np.float64),
        zeroed(columns * width, np.float64),
        zeroed(columns, np.float64),
        zeroed(width, np.float64),
        zeroed(1, np.float64),
        zeroed(powers * width, np.float64),
        zeroed(powers, np.float64),
        empty(4 * _BLOCK, real),
    )


@compiled
def _add(lanes, totals, place, part):
    width = value_of(lanes)
    store(totals, place * width, load(totals, place * width, lanes) + widen(part))


@compiled
def sum_rows(lanes, rows, scalars, order, start, stop, total, extra):
    """The sum of the rows `order[start] ... order[stop - 1]`, in float64."""
    width = value_of(lanes)
    total[:] = 0.0
    extra[0] = 0.0
    for n in range(start, stop):
        index = np.int64(at(order, n))
        _add(lanes, total, 0, load(rows, index * width, lanes))
        extra[0] += np.float64(at(scalars, index))


@compiled
def sum_positive(lanes, columns, number, count, rows, scalars, halves):
    """`halves.positive`: of `number` columns, the sums of the rows of sources with positive coordinates."""
    width = value_of(lanes)
    totals, extras, weights = halves.positive, halves.positive_extra, halves.weights
    real = rows.dtype.type
    totals[:] = 0.0
    extras[:] = 0.0
    for d in range(0, number, 4):
        for first in range(0, count, _BLOCK):
            block = min(_BLOCK, count - first)
            for i in range(4):
                # behind the last column it is summed once more, and not kept
                column = columns[min(d + i, number - 1)]
                for n in range(block):
                    weights[i * _BLOCK + n] = real(column[first + n] > 0.0)
            total0 = total1 = total2 = total3 = zeros(rows, lanes)
            for n in range(block):
                row = load(rows, (first + n) * width, lanes)
                total0 = multiply_add(at(weights, n), row, total0)
                total1 = multiply_add(at(weights, _BLOCK + n), row, total1)
                total2 = multiply_add(at(weights, 2 * _BLOCK + n), row, total2)
                total3 = multiply_add(at(weights, 3 * _BLOCK + n), row, total3)
            for i in range(min(4, number - d)):
                for n in range(block):
                    extras[d + i] += np.float64(weights[i * _BLOCK + n]) * np.float64(scalars[first + n])
            _add(lanes, totals, d, total0)
            if d + 1 < number:
                _add(lanes, totals, d + 1, total1)
            if d + 2 < number:
                _add(lanes, totals, d + 2, total2)
            if d + 3 < number:
                _add(lanes, totals, d + 3, total3)


@compiled
def _sum_side(lanes, rows, scalars, order, zero, beyond, d, negative, halves):
    """`halves.side`: of all sources on one side of zero, in column d; its zeros are `zero ... beyond - 1` in order."""
    width, count = value_of(lanes), order.shape[0]
    side, extra = halves.side, halves.side_extra
    start, stop = (0, zero) if negative else (beyond, count)
    if stop - start <= max(_FEW, count // _PART):
        sum_rows(lanes, rows, scalars, order, start, stop, side, extra)
        return
    positive = load(halves.positive, d * width, lanes)
    if negative:
        sum_rows(lanes, rows, scalars, order, zero, beyond, side, extra)
        store(side, 0, load(halves.total, 0, lanes) - load(side, 0, lanes) - positive)
        extra[0] = halves.total_extra[0] - extra[0] - halves.positive_extra[d]
    else:
        store(side, 0, positive)
        extra[0] = halves.positive_extra[d]


@compiled
def begin_half(lanes, depth, rows, scalars, order, zero, beyond, d, negative, profile, halves):
    """`halves.initial`: what a target on that side has from all sources there, and the constant, in column d."""
    width, powers = value_of(lanes), value_of(depth)
    _sum_side(lanes, rows, scalars, order, zero, beyond, d, negative, halves)
    for k in range(powers):
        share = -profile.coefficients[k]
        store(halves.initial, k * width, splat(share, lanes) * load(halves.side, 0, lanes))
        halves.initial_extra[k] = share * halves.side_extra[0]
    constant = splat(profile.constant, lanes) * load(halves.total, 0, lanes)
    store(halves.initial, 0, load(halves.initial, 0, lanes) + constant)
    halves.initial_extra[0] += profile.constant * halves.total_extra[0]


@compiled
def zeros_of(line, count):
    """Where the zeros of a sorted line begin and end."""
    return _passed(line, count, False), _passed(line, count, True)


@compiled
def _passed(line, count, beyond):
    """How many of the sorted points are below zero, or not `beyond` it."""
    start, stop = 0, count
    while start < stop:
        middle = (start + stop) // 2
        if line[middle] < 0.0 or (beyond and line[middle] == 0.0):
            start = middle + 1
        else:
            stop = middle
    return start
