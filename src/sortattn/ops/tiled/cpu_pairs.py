"""Numbers of pairs on the CPU: four queries at a time against a block of keys, whose lanes are neighbouring keys.

With `t = sum_d a(q_d - k_d)`:

    kernel           a(u)                   Phi(q, k)
    add_riesz        |u|                    (|q|_1 + |k|_1 - t) / tau + eps D
    add_laplace      exp(-|u| / tau)        t
    add_bump         max(0, tau - |u|)      t / tau
    laplace          |u|                    exp(-t / tau)
    riesz            u^2                    (|q|_2 + |k|_2 - sqrt(t)) / tau + eps
    gauss            u^2                    exp(-t / (2 tau^2))
    made by the user, see cpu_forms.py      t

Differences are those of the coordinates as they were given: an offset costs no digits, and ties are ties. With `o` in
the middle of all points, `exp(-|u| / tau)` is the lesser of `e^(q - o) e^(o - k)` and `e^(o - q) e^(k - o)`, each of
which is made of one number for the query and one for the key; in dimensions where points are so far apart that these
would overflow, there is an exponential for every pair.
"""

import numpy as np

from ...cpu.compiled import inlined
from ...cpu.exponential import exp
from ...cpu.memory import empty, zeroed
from ...cpu.simd import (
    Constant,
    absolute,
    at,
    inner,
    larger,
    load,
    multiply_add,
    narrow,
    positive,
    put,
    smaller,
    splat,
    store,
    value_of,
    widen,
    zeros,
)

# kernels by their number, which the compiler knows
ADD_RIESZ, ADD_LAPLACE, ADD_BUMP, LAPLACE, RIESZ, SPLINE, POLYNOMIAL_EXPONENTIAL, GAUSS = range(8)
# of whose logarithms the sums are
LIFTED = (LAPLACE, GAUSS)
# queries that are taken together, and keys of a block
QUERIES, KEYS = 4, 64
ALL = Constant(KEYS)
# lanes of a vector: keys, or channels
WIDTH = 32
KEY_LANES = Constant(WIDTH)
# dimensions whose powers are made together
SOME = Constant(16)
# e-folds between the outermost points up to which exponentials are products: the middle is half as far from each
REACH = 80.0


@inlined
def transpose(points, start, count, room):
    """`room (D, KEYS)`: rows `start ... start + count - 1` of `points (N, D)`, zeros for those that are missing."""
    dims = points.shape[1]
    for d in range(dims):
        for n in range(count):
            put(room, d * KEYS + n, points[start + n, d])
        for n in range(count, KEYS):
            put(room, d * KEYS + n, points.dtype.type(0.0))


@inlined
def tiles_of(points):
    """Rows `(M, D)` in tiles `(D, QUERIES)`, flat; the last row stands in for those that are missing."""
    count, dims = points.shape
    tiles = empty(-(-count // QUERIES) * QUERIES * dims, points)
    for m in range(0, count, QUERIES):
        for i in range(QUERIES):
            row = points[min(m + i, count - 1)]
            for d in range(dims):
                put(tiles, m * dims + d * QUERIES + i, row[d])
    return tiles


@inlined
def extremes(points, low, high):
    """Widen `low (D,)` and `high (D,)` to hold all of `points (N, D)`."""
    for n in range(points.shape[0]):
        for d in range(points.shape[1]):
            low[d] = min(low[d], points[n, d])
            high[d] = max(high[d], points[n, d])


@inlined
def norms_of(kernel, points):
    """Those of `points (N, D)` that the kernel adds, `(N,)`; none where it adds none."""
    number = value_of(kernel)
    norms = zeroed(points.shape[0] if number in (ADD_RIESZ, RIESZ) else 0, points)
    for n in range(norms.shape[0]):
        total = points.dtype.type(0.0)
        # one after the other, as distances are summed: what is left of their difference has fewer digits otherwise
        for d in range(points.shape[1]):
            total += abs(points[n, d]) if number == ADD_RIESZ else points[n, d] * points[n, d]
        norms[n] = total if number == ADD_RIESZ else np.sqrt(total)
    return norms


@inlined
def add_norm_slopes(kernel, points, norms, by_norm, rate, out):
    """Add the gradient by `points (N, D)` from that by their norms, which are taken over the bandwidth."""
    for n in range(norms.shape[0]):
        factor = points.dtype.type(by_norm[n]) * rate
        for d in range(points.shape[1]):
            if value_of(kernel) == ADD_RIESZ:
                out[n, d] += factor * np.sign(points[n, d])
            elif norms[n] > 0.0:
                out[n, d] += factor * (points[n, d] / norms[n])


@inlined
def powers(points, middle, rate, apart):
    """`(2, N, D)`: `e^(x - o)` and `e^(o - x)` of `points (N, D)`, in units of the bandwidth; zeros if `apart (D,)`."""
    real = points.dtype.type
    count, dims = points.shape
    made = empty((2, count, dims), points)
    flat, rising, falling = points.reshape(points.size), made[0].reshape(points.size), made[1].reshape(points.size)
    one, width = splat(real(1.0), SOME), value_of(SOME)
    whole = dims // width * width
    for n in range(count):
        for d in range(0, whole, width):
            far = load(apart, d, SOME)
            # in two parts: the exponent, rounded, would cost as many digits as it is large
            exponent = (widen(load(flat, n * dims + d, SOME)) - load(middle, d, SOME)) * splat(rate, SOME)
            exponent = positive(widen(far), splat(0.0, SOME), exponent)
            near = narrow(exponent, points)
            rest = narrow(exponent - widen(near), points)
            store(rising, n * dims + d, (one - far) * exp(near) * (one + rest))
            store(falling, n * dims + d, (one - far) * exp(zeros(points, SOME) - near) * (one - rest))
        for d in range(whole, dims):
            exponent = 0.0 if apart[d] else (np.float64(points[n, d]) - middle[d]) * rate
            near = real(exponent)
            rest = real(exponent - np.float64(near))
            made[0, n, d] = (real(1.0) - apart[d]) * exp(near) * (real(1.0) + rest)
            made[1, n, d] = (real(1.0) - apart[d]) * exp(-near) * (real(1.0) - rest)
    return made


@inlined
def _add(kernel, scalar, keys, reach, total):
    """`total` plus a(u) of one query's coordinate and some keys' ones, in one dimension."""
    number = value_of(kernel)
    distance = splat(scalar, KEY_LANES) - keys
    if number in (RIESZ, GAUSS):
        return total + distance * distance
    if number == ADD_BUMP:
        return total + larger(splat(reach, KEY_LANES) - absolute(distance), splat(type(reach)(0), KEY_LANES))
    return total + absolute(distance)


@inlined
def _add_power(rising, falling, keys_rising, keys_falling, total):
    below = splat(rising, KEY_LANES) * keys_falling
    above = splat(falling, KEY_LANES) * keys_rising
    return total + smaller(below, above)


@inlined
def add_up(kernel, tiles, place, keys, dims, reach, block):
    """`block (QUERIES, KEYS)`: the sums of a(u) for the tile `(D, QUERIES)` at this place and `keys (D, KEYS)`."""
    for first in range(0, KEYS, WIDTH):
        total0 = total1 = total2 = total3 = zeros(block, KEY_LANES)
        for d in range(dims):
            some = load(keys, d * KEYS + first, KEY_LANES)
            total0 = _add(kernel, at(tiles, place + 4 * d), some, reach, total0)
            total1 = _add(kernel, at(tiles, place + 4 * d + 1), some, reach, total1)
            total2 = _add(kernel, at(tiles, place + 4 * d + 2), some, reach, total2)
            total3 = _add(kernel, at(tiles, place + 4 * d + 3), some, reach, total3)
        store(block, first, total0)
        store(block, KEYS + first, total1)
        store(block, 2 * KEYS + first, total2)
        store(block, 3 * KEYS + first, total3)


@inlined
def add_up_powers(rising, falling, place, keys_rising, keys_falling, dims, block):
    """The same sums of `exp(-|u| / tau)`, from the powers of queries and of keys."""
    for first in range(0, KEYS, WIDTH):
        total0 = total1 = total2 = total3 = zeros(block, KEY_LANES)
        for d in range(dims):
            up, down = load(keys_rising, d * KEYS + first, KEY_LANES), load(keys_falling, d * KEYS + first, KEY_LANES)
            total0 = _add_power(at(rising, place + 4 * d), at(falling, place + 4 * d), up, down, total0)
            total1 = _add_power(at(rising, place + 4 * d + 1), at(falling, place + 4 * d + 1), up, down, total1)
            total2 = _add_power(at(rising, place + 4 * d + 2), at(falling, place + 4 * d + 2), up, down, total2)
            total3 = _add_power(at(rising, place + 4 * d + 3), at(falling, place + 4 * d + 3), up, down, total3)
        store(block, first, total0)
        store(block, KEYS + first, total1)
        store(block, 2 * KEYS + first, total2)
        store(block, 3 * KEYS + first, total3)


@inlined
def add_up_exponentials(tiles, place, keys, far, rate, block):
    """Add the same of the `far` dimensions, with an exponential for every pair."""
    for d in far:
        for i in range(QUERIES):
            query = splat(at(tiles, place + 4 * d + i), KEY_LANES)
            for first in range(0, KEYS, WIDTH):
                distance = absolute(query - load(keys, d * KEYS + first, KEY_LANES))
                total = load(block, i * KEYS + first, KEY_LANES) + exp(distance * splat(-rate, KEY_LANES))
                store(block, i * KEYS + first, total)


@inlined
def multiply(tiles, place, rows, channels, block):
    """`block (QUERIES, KEYS)`: inner products of the tile `(C, QUERIES)` at this place and `rows (C, KEYS)`."""
    for first in range(0, KEYS, WIDTH):
        total0 = total1 = total2 = total3 = zeros(block, KEY_LANES)
        for c in range(channels):
            some = load(rows, c * KEYS + first, KEY_LANES)
            total0 = multiply_add(at(tiles, place + 4 * c), some, total0)
            total1 = multiply_add(at(tiles, place + 4 * c + 1), some, total1)
            total2 = multiply_add(at(tiles, place + 4 * c + 2), some, total2)
            total3 = multiply_add(at(tiles, place + 4 * c + 3), some, total3)
        store(block, first, total0)
        store(block, KEYS + first, total1)
        store(block, 2 * KEYS + first, total2)
        store(block, 3 * KEYS + first, total3)


@inlined
def finish(kernel, block, rate, constant, rows, columns):
    """Make sums of a(u) what is said above, but for exponentials of them; rows and columns are the norms."""
    number = value_of(kernel)
    if number in (ADD_LAPLACE, SPLINE, POLYNOMIAL_EXPONENTIAL):
        return
    for i in range(QUERIES):
        for n in range(KEYS):
            entry = at(block, i * KEYS + n)
            if number == RIESZ:
                entry = np.sqrt(entry)
            if number in (ADD_RIESZ, RIESZ):
                # the norms first: where the signs of query and key differ, nothing is left of their sum
                entry = ((at(rows, i) + at(columns, n)) - entry) * rate + constant
            else:
                entry = -entry * rate if number in LIFTED else entry * rate
            if number == GAUSS:
                entry = entry * rate / 2
            put(block, i * KEYS + n, entry)


@inlined
def hide(block, limits, weights, nothing):
    """Put `nothing` where a query does not see a key: from the `limits (QUERIES,)` on, and without weight."""
    for i in range(QUERIES):
        for n in range(KEYS):
            put(block, i * KEYS + n, at(block, i * KEYS + n) if at(weights, n) != 0.0 else nothing)
        for n in range(limits[i], KEYS):
            put(block, i * KEYS + n, nothing)


@inlined
def total_of(block, i):
    """The sum of the numbers of one query, always in the same order."""
    return inner(load(block, i * KEYS, ALL), splat(block.dtype.type(1.0), ALL))


@inlined
def exponentials(block, i, most):
    """Those of the numbers of one query, divided by `e^most`; zero where there are none."""
    for first in range(i * KEYS, (i + 1) * KEYS, WIDTH):
        entry = load(block, first, KEY_LANES)
        # what is minus infinity stays below zero, or is no number
        there = entry + splat(block.dtype.type(np.inf), KEY_LANES)
        store(block, first, positive(there, exp(entry - splat(most, KEY_LANES)), zeros(block, KEY_LANES)))
