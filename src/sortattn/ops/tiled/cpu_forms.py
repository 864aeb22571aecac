"""Kernels made by the user on the CPU: `t = sum_d f(u / tau)` for a spline or a polynomial exponential `f`, and `f'`.

Its numbers are a `form`, flat: of a spline with J nodes these, and anchors, values and slopes of its J + 1 pieces; of
`p(|v|) e^(-|v|)` the coefficients of `p`, and those of `p' - p`.
"""

from ...cpu.compiled import inlined
from ...cpu.exponential import exp
from ...cpu.simd import Constant, absolute, at, from_zero, load, positive, signed, smaller, splat, spread, store, zeros
from .cpu_pairs import KEY_LANES, KEYS, QUERIES
from .cpu_pairs import WIDTH as KEY_WIDTH

WIDTH = 16
LANES = Constant(WIDTH)
# as in `PolynomialExponential.univariate`: beyond, the exponential is zero, and a power might be infinite
FARTHEST = 1000.0


@inlined
def _nodes(form):
    return (form.shape[0] - 3) // 4


@inlined
def _value(form, count, piece, spot):
    """That of a piece, as if it went on for ever."""
    anchor, value = splat(at(form, count + piece), LANES), splat(at(form, 2 * count + 1 + piece), LANES)
    return value + splat(at(form, 3 * count + 2 + piece), LANES) * (spot - anchor)


@inlined
def _slope(form, count, piece, spot):
    return splat(at(form, 3 * count + 2 + piece), LANES)


def _of_spline(part):
    @inlined
    def mean(form, spot):
        """The mean of what the spline has on either side of some places."""
        count = _nodes(form)
        below = above = part(form, count, 0, spot)
        for j in range(count):
            beyond = spot - splat(at(form, j), LANES)
            piece = part(form, count, j + 1, spot)
            below, above = positive(beyond, piece, below), from_zero(beyond, piece, above)
        return splat(type(at(form, 0))(0.5), LANES) * (below + above)

    return mean


_values, _slopes = _of_spline(_value), _of_spline(_slope)


@inlined
def add_up_spline(tiles, place, keys, dims, bandwidth, form, block):
    """`block (QUERIES, KEYS)`: the sums for the tile `(D, QUERIES)` at this place and `keys (D, KEYS)`."""
    tau = splat(bandwidth, LANES)
    for i in range(QUERIES):
        for first in range(0, KEYS, WIDTH):
            total = zeros(block, LANES)
            for d in range(dims):
                distance = splat(at(tiles, place + 4 * d + i), LANES) - load(keys, d * KEYS + first, LANES)
                total = total + _values(form, distance / tau)
            store(block, i * KEYS + first, total)


@inlined
def add_up_polynomial(tiles, place, keys, dims, bandwidth, form, block):
    """The same of a polynomial exponential."""
    tau = splat(bandwidth, KEY_LANES)
    for i in range(QUERIES):
        for first in range(0, KEYS, KEY_WIDTH):
            total = zeros(block, KEY_LANES)
            for d in range(dims):
                distance = splat(at(tiles, place + 4 * d + i), KEY_LANES) - load(keys, d * KEYS + first, KEY_LANES)
                total = total + _decayed(form, 0, absolute(distance) / tau)
            store(block, i * KEYS + first, total)


@inlined
def _decayed(form, start, spot):
    """`p(x) e^-x` at some places, the coefficients of p from `start` on."""
    real = type(at(form, 0))
    spot = smaller(spot, spread(real(FARTHEST), spot))
    value = nothing = spread(real(0.0), spot)
    for k in range(form.shape[0] // 2 - 1, -1, -1):
        value = value * spot + spread(at(form, start + k), spot)
    return value * exp(nothing - spot)


@inlined
def add_spline_slopes(query, key, start, stop, first, count, bandwidth, form, block, by_query, by_block):
    """Add what a tile of queries and a block of keys give each other; the numbers of pairs are `-w`, over tau.

    Queries are `(M, D)`, with D a multiple of the lanes, and so are the keys, of which the block begins with row
    `first`; `by_block (KEYS, D)` is flat.
    """
    dims = query.shape[1]
    queries, keys, out = query.reshape(query.size), key.reshape(key.size), by_query.reshape(by_query.size)
    tau = splat(bandwidth, LANES)
    for i in range(min(QUERIES, stop - start)):
        for d in range(0, dims, WIDTH):
            place = (start + i) * dims + d
            own, total = load(queries, place, LANES), load(out, place, LANES)
            for n in range(count):
                distance = own - load(keys, (first + n) * dims + d, LANES)
                part = splat(at(block, i * KEYS + n), LANES) * _slopes(form, distance / tau)
                total = total - part
                store(by_block, n * dims + d, load(by_block, n * dims + d, LANES) + part)
            store(out, place, total)


@inlined
def add_polynomial_slopes(query, key, start, stop, first, count, bandwidth, form, block, by_query, by_block):
    """The same of a polynomial exponential."""
    dims = query.shape[1]
    queries, keys, out = query.reshape(query.size), key.reshape(key.size), by_query.reshape(by_query.size)
    tau = splat(bandwidth, LANES)
    for i in range(min(QUERIES, stop - start)):
        for d in range(0, dims, WIDTH):
            place = (start + i) * dims + d
            own, total = load(queries, place, LANES), load(out, place, LANES)
            for n in range(count):
                distance = own - load(keys, (first + n) * dims + d, LANES)
                slope = _decayed(form, form.shape[0] // 2, absolute(distance) / tau)
                part = signed(distance, splat(at(block, i * KEYS + n), LANES) * slope)
                total = total - part
                store(by_block, n * dims + d, load(by_block, n * dims + d, LANES) + part)
            store(out, place, total)
