"""A line folded at zero, see `kernels.Terms`: its halves, and what the sources of one half give before any is passed.

A target `s` starts with `-f(|s|)` from every source on its side, and with the constant from all: that takes the sums of
the rows of all sources, and of those with positive and with negative coordinates in every dimension.
"""

from collections import namedtuple

import numpy as np

from .compiled import compiled
from .simd import aligned, at, load, multiply_add, store, value_of, widen, zeros

# rows that are summed in the working precision before float64 takes over
_BLOCK = 32

# sums of rows, each with that of their extra scalars: of all sources; of all with the signs of their coordinates, for
# each of the columns that are walked together; of the sources at zero in one dimension; and for one half what `walk`
# begins with
Halves = namedtuple("Halves", "total total_extra signed signed_extra zero zero_extra initial initial_extra signs")


@compiled
def make_halves(lanes, depth, columns, real):
    """Room for the sums of that many columns; `real` is an array of the working precision."""
    width, powers = value_of(lanes), value_of(depth)
    return Halves(
        aligned(width, np.empty(0)),
        np.zeros(1),
        aligned(columns * width, np.empty(0)),
        np.zeros(columns),
        aligned(width, np.empty(0)),
        np.zeros(1),
        aligned(powers * width, np.empty(0)),
        np.zeros(powers),
        np.empty(4 * _BLOCK, real.dtype),
    )


@compiled
def _add(lanes, totals, place, part):
    width = value_of(lanes)
    store(totals, place * width, load(totals, place * width, lanes) + widen(part))


@compiled
def sum_rows(lanes, rows, scalars, order, start, stop, total, extra):
    """The sum of the rows `order[start] ... order[stop - 1]`, in float64: rows of sources at zero may be very large."""
    width = value_of(lanes)
    total[:] = 0.0
    extra[0] = 0.0
    for n in range(start, stop):
        index = np.int64(at(order, n))
        _add(lanes, total, 0, load(rows, index * width, lanes))
        extra[0] += np.float64(at(scalars, index))


@compiled
def sum_signed(lanes, columns, number, count, rows, scalars, halves):
    """`halves.signed`: of `number` columns d, the sums of `sign(columns[d, n]) rows[n]` over n."""
    width = value_of(lanes)
    totals, extras, signs = halves.signed, halves.signed_extra, halves.signs
    real = rows.dtype.type
    totals[:] = 0.0
    extras[:] = 0.0
    for d in range(0, number, 4):
        for first in range(0, count, _BLOCK):
            block = min(_BLOCK, count - first)
            for i in range(4):
                column = columns[min(d + i, number - 1)]
                for n in range(block):
                    spot = column[first + n]
                    signs[i * _BLOCK + n] = real(spot > 0.0) - real(spot < 0.0)
            total0 = total1 = total2 = total3 = zeros(rows, lanes)
            for n in range(block):
                row = load(rows, (first + n) * width, lanes)
                total0 = multiply_add(at(signs, n), row, total0)
                total1 = multiply_add(at(signs, _BLOCK + n), row, total1)
                total2 = multiply_add(at(signs, 2 * _BLOCK + n), row, total2)
                total3 = multiply_add(at(signs, 3 * _BLOCK + n), row, total3)
            for i in range(min(4, number - d)):
                for n in range(block):
                    extras[d + i] += np.float64(signs[i * _BLOCK + n]) * np.float64(scalars[first + n])
            _add(lanes, totals, d, total0)
            if d + 1 < number:
                _add(lanes, totals, d + 1, total1)
            if d + 2 < number:
                _add(lanes, totals, d + 2, total2)
            if d + 3 < number:
                _add(lanes, totals, d + 3, total3)


@compiled
def begin_half(lanes, depth, halves, d, negative, coefficients, constant):
    """`halves.initial`: what a target on that side has from all sources there, and the constant, in column d."""
    sign = -1.0 if negative else 1.0
    width, powers = value_of(lanes), value_of(depth)
    for k in range(powers):
        share = -0.5 * np.float64(coefficients[k])
        for c in range(width):
            ours = halves.total[c] - halves.zero[c] + sign * halves.signed[d * width + c]
            halves.initial[k * width + c] = share * ours
        ours = halves.total_extra[0] - halves.zero_extra[0] + sign * halves.signed_extra[d]
        halves.initial_extra[k] = share * ours
    halves.initial[:width] += constant * halves.total
    halves.initial_extra[0] += constant * halves.total_extra[0]


@compiled
def zeros_of(line, count):
    """Where the zeros of a sorted line begin and end."""
    return np.searchsorted(line[:count], 0.0, side="left"), np.searchsorted(line[:count], 0.0, side="right")
