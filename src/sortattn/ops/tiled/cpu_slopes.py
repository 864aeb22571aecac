"""The backward pass on the CPU: every block of keys against all queries, four at a time.

With `W_mn = <g_m, v_n> + h_m`, where `g` and `h` are the gradients by the sums of the values and of the weights, and
`t_mn = sum_d a(u)`, `u = q_md - k_nd`, a pair gives

    dv_n  += Phi_mn g_m
    dq_md += w_mn a'(u)        dk_nd -= w_mn a'(u)        w_mn = W_mn dPhi_mn / dt_mn

and, where Phi has norms, `W_mn` to the gradients by these. The lanes of a vector are neighbouring
dimensions here.
"""

import numpy as np

from ...cpu.compiled import digest, entry, inlined
from ...cpu.exponential import exp
from ...cpu.memory import empty, zeroed
from ...cpu.simd import (
    Constant,
    absolute,
    at,
    heaviside,
    inner,
    load,
    multiply_add,
    put,
    signed,
    smaller,
    splat,
    store,
    value_of,
    zeros,
)
from .cpu_blocks import bring_keys, bring_norms, fill, make_points, make_room, set_limits
from .cpu_forms import add_polynomial_slopes, add_spline_slopes
from .cpu_pairs import (
    ADD_BUMP,
    ADD_LAPLACE,
    ADD_RIESZ,
    GAUSS,
    KEYS,
    LIFTED,
    POLYNOMIAL_EXPONENTIAL,
    QUERIES,
    RIESZ,
    SPLINE,
    add_norm_slopes,
    exponentials,
    finish,
    hide,
    multiply,
    tiles_of,
    total_of,
    transpose,
)

# dimensions that are taken together
DIMS = 16
DIM_LANES = Constant(DIMS)
# tiles of queries whose sums for keys are added up apart: a sum of many more would lose digits
FOLD = 256


@inlined
def _powers(kernel, powers, place):
    """Of exponentials those at this place; all others have none, and leave them out."""
    return load(powers, place, DIM_LANES) if value_of(kernel) == ADD_LAPLACE else zeros(powers, DIM_LANES)


@inlined
def _slope(kernel, query, rising, falling, key, key_rising, key_falling, reach, weight):
    """`weight a'(q - k)`; of `add_bump` and exponentials minus that (over the rate), of `riesz` half of it."""
    distance = query - key
    pull = splat(weight, DIM_LANES)
    if value_of(kernel) in (RIESZ, GAUSS):
        return distance * pull
    if value_of(kernel) == ADD_BUMP:
        pull = heaviside(splat(reach, DIM_LANES) - absolute(distance), pull)
    if value_of(kernel) == ADD_LAPLACE:
        pull = pull * smaller(rising * key_falling, falling * key_rising)
    return signed(distance, pull)


@inlined
def _add_slopes(
    kernel, query, key, of_queries, of_keys, start, stop, first, count, reach, block, by_query, by_block
):  # fmt: skip
    """Add what a tile of queries and a block of keys give each other; the numbers of pairs in the `block` are `w`.

    `by_block (KEYS, D)` is for the keys, which begin with row `first`.
    """
    dims = query.shape[1]
    queries, keys, out = query.reshape(query.size), key.reshape(key.size), by_query.reshape(by_query.size)
    ups, downs = of_queries[0].reshape(-1), of_queries[1].reshape(-1)
    rising, falling = of_keys[0].reshape(-1), of_keys[1].reshape(-1)
    last = stop - 1
    for d in range(0, dims, DIMS):
        place0, place1 = start * dims + d, min(start + 1, last) * dims + d
        place2, place3 = min(start + 2, last) * dims + d, min(start + 3, last) * dims + d
        query0, query1 = load(queries, place0, DIM_LANES), load(queries, place1, DIM_LANES)
        query2, query3 = load(queries, place2, DIM_LANES), load(queries, place3, DIM_LANES)
        up0, up1, up2, up3 = (
            _powers(kernel, ups, place0),
            _powers(kernel, ups, place1),
            _powers(kernel, ups, place2),
            _powers(kernel, ups, place3),
        )
        down0, down1, down2, down3 = (
            _powers(kernel, downs, place0),
            _powers(kernel, downs, place1),
            _powers(kernel, downs, place2),
            _powers(kernel, downs, place3),
        )
        total0 = total1 = total2 = total3 = zeros(block, DIM_LANES)
        for n in range(count):
            spot = (first + n) * dims + d
            some, up, down = load(keys, spot, DIM_LANES), _powers(kernel, rising, spot), _powers(kernel, falling, spot)
            part0 = _slope(kernel, query0, up0, down0, some, up, down, reach, at(block, n))
            part1 = _slope(kernel, query1, up1, down1, some, up, down, reach, at(block, KEYS + n))
            part2 = _slope(kernel, query2, up2, down2, some, up, down, reach, at(block, 2 * KEYS + n))
            part3 = _slope(kernel, query3, up3, down3, some, up, down, reach, at(block, 3 * KEYS + n))
            total0, total1, total2, total3 = total0 + part0, total1 + part1, total2 + part2, total3 + part3
            near = n * dims + d
            store(by_block, near, load(by_block, near, DIM_LANES) - ((part0 + part1) + (part2 + part3)))
        # those that stand in for queries that are missing have added nothing
        store(out, place3, load(out, place3, DIM_LANES) + total3)
        store(out, place2, load(out, place2, DIM_LANES) + total2)
        store(out, place1, load(out, place1, DIM_LANES) + total1)
        store(out, place0, load(out, place0, DIM_LANES) + total0)


@inlined
def _add_exponential_slopes(query, key, apart, start, stop, first, count, rate, block, by_query, by_block):
    """The same in dimensions that are `apart`, with an exponential for every pair."""
    dims = query.shape[1]
    queries, keys, out = query.reshape(query.size), key.reshape(key.size), by_query.reshape(by_query.size)
    for d in range(0, dims, DIMS):
        far = load(apart, d, DIM_LANES)
        if inner(far, far) == 0.0:
            continue
        for i in range(min(QUERIES, stop - start)):
            place = (start + i) * dims + d
            own, total = load(queries, place, DIM_LANES), load(out, place, DIM_LANES)
            for n in range(count):
                near = n * dims + d
                distance = own - load(keys, (first + n) * dims + d, DIM_LANES)
                pull = splat(at(block, i * KEYS + n), DIM_LANES) * exp(absolute(distance) * splat(-rate, DIM_LANES))
                part = signed(distance, pull * far)
                total = total + part
                store(by_block, near, load(by_block, near, DIM_LANES) - part)
            store(out, place, total)


@inlined
def _spread(lanes, block, grad, start, stop, count, by_block):
    """Add the rows of a tile of `grad (M, C)` to those of a block of keys, each times the number of the pair."""
    width, channels = value_of(lanes), grad.shape[1]
    rows = grad.reshape(grad.size)
    last = stop - 1
    for c in range(0, channels, width):
        row0 = load(rows, start * channels + c, lanes)
        row1 = load(rows, min(start + 1, last) * channels + c, lanes)
        row2 = load(rows, min(start + 2, last) * channels + c, lanes)
        row3 = load(rows, min(start + 3, last) * channels + c, lanes)
        for n in range(count):
            spot = n * channels + c
            total = multiply_add(at(block, n), row0, load(by_block, spot, lanes))
            total = multiply_add(at(block, KEYS + n), row1, total)
            total = multiply_add(at(block, 2 * KEYS + n), row2, total)
            store(by_block, spot, multiply_add(at(block, 3 * KEYS + n), row3, total))


@inlined
def _fold(by_block, start, count, out):
    """Add the first rows of a block, flat, to those of `out` from `start` on, and begin it anew."""
    width = out.shape[1]
    for n in range(count):
        for i in range(width):
            out[start + n, i] += at(by_block, n * width + i)
    by_block[:] = 0.0


@inlined
def _weigh(kernel, block, pairs, products, rate):
    """Make the `products` what slopes are multiplied with; `pairs` are the sums of a(u), and the `block` Phi."""
    number = value_of(kernel)
    for place in range(QUERIES * KEYS):
        weight = at(products, place) * -rate
        if number in LIFTED:
            weight *= at(block, place)
        elif number == RIESZ:
            distance = np.sqrt(at(pairs, place))
            weight = weight / distance if distance > 0.0 else block.dtype.type(0.0)
        if number == GAUSS:
            weight *= rate
        put(products, place, weight)


@inlined
def _add_by_norms(products, start, stop, first, count, by_row, by_column):
    """Add the gradients by the norms of queries and keys."""
    for i in range(min(QUERIES, stop - start)):
        by_row[start + i] += total_of(products, i)
        for n in range(count):
            by_column[first + n] += at(products, i * KEYS + n)


@inlined
def _through_quotient(grad, outputs, total):
    """The gradients by sums `(M, C)` and their total `(M,)` from that by `outputs`, the quotient if there is one."""
    # of sums themselves there are no outputs
    by_sums, by_total = grad, zeroed(total.shape[0], total)
    if outputs.shape[0]:
        by_sums = empty(grad.shape, grad)
    for m in range(outputs.shape[0]):
        # as in `normalise.reciprocal`
        vanishes = abs(total[m]) < np.finfo(total.dtype).tiny
        inverse = total.dtype.type(0.0) if vanishes else total.dtype.type(1.0) / total[m]
        product = 0.0
        for c in range(grad.shape[1]):
            product += np.float64(grad[m, c]) * np.float64(outputs[m, c])
        by_total[m] = -product * inverse
        for c in range(grad.shape[1]):
            by_sums[m, c] = grad[m, c] * inverse
    return by_sums, by_total


@inlined
def _differentiate_head(
    kernel, lanes, dims, grad, outputs, total, shift, query, key, value, weight, bandwidth, constant, form, causal,
    each, columns, start, by_query, by_key, by_value,
):  # fmt: skip
    """As `differentiate_heads`, for one head and some keys, which begin with the one at `start` of all `columns`."""
    rows, count_keys, width, channels = query.shape[0], key.shape[0], query.shape[1], value.shape[1]
    # apart: arrays in a tuple are counted at every use
    room = make_room(width, query)
    keys, keys_rising, keys_falling, norms, weights, lines, limits, block = room
    points = make_points(kernel, query, key, 1.0 / bandwidth)
    tiles, rising, falling, of_queries, of_keys, far, apart, row, column = points
    grad, grad_total = _through_quotient(grad, outputs, total)
    # of many pairs, which do not cancel
    by_row, by_column = zeroed(rows, np.float64), zeroed(count_keys, np.float64)
    constant = query.dtype.type(constant)
    reach, rate = query.dtype.type(bandwidth), query.dtype.type(1.0 / bandwidth)
    nothing = query.dtype.type(-np.inf if value_of(kernel) in LIFTED else 0.0)
    values, grads = zeroed(channels * KEYS, query), tiles_of(grad)
    pairs, products = zeroed(QUERIES * KEYS, query), zeroed(QUERIES * KEYS, query)
    by_points, by_rows = zeroed(width * KEYS, query), zeroed(channels * KEYS, query)
    by_query[:] = 0.0
    by_key[:] = 0.0
    by_value[:] = 0.0
    for first in range(0, count_keys, KEYS):
        count = min(KEYS, count_keys - first)
        brought, whole, pending = False, False, 0
        for m in range(0, rows, QUERIES):
            # no query sees beyond the block
            most, fewest = set_limits(m, rows, start + first, columns, causal, each, limits)
            most = min(most, count)
            if most == 0:
                continue
            if not brought:
                brought = True
                whole = bring_keys(key, points, weight, first, count, room)
                transpose(value, first, count, values)
            fill(
                kernel, tiles, rising, falling, far, m * width, keys, keys_rising, keys_falling, dims, reach, rate,
                form, block,
            )  # fmt: skip
            if value_of(kernel) == RIESZ:
                for i in range(block.shape[0]):
                    pairs[i] = block[i]
            bring_norms(row, m, lines)
            finish(kernel, block, rate, constant, lines, norms)
            multiply(grads, m * channels, values, channels, products)
            for i in range(min(QUERIES, rows - m)):
                add = grad_total[m + i]
                for n in range(KEYS):
                    put(products, i * KEYS + n, at(products, i * KEYS + n) + add)
            if not whole or fewest < KEYS:
                hide(block, limits, weights, nothing)
                hide(products, limits, weights, query.dtype.type(0.0))
            if value_of(kernel) in LIFTED:
                for i in range(min(QUERIES, rows - m)):
                    exponentials(block, i, shift[m + i] if shift.shape[0] else query.dtype.type(0.0))
                # of a query that is missing there is nothing
                block[(rows - m) * KEYS :] = 0.0
            if value_of(kernel) in (ADD_RIESZ, RIESZ):
                _add_by_norms(products, m, rows, first, count, by_row, by_column)
            _spread(lanes, block, grad, m, rows, most, by_rows)
            _weigh(kernel, block, pairs, products, rate)
            if value_of(kernel) == SPLINE:
                add_spline_slopes(query, key, m, rows, first, most, reach, form, products, by_query, by_points)
            elif value_of(kernel) == POLYNOMIAL_EXPONENTIAL:
                add_polynomial_slopes(
                    query, key, m, rows, first, most, reach, form, products, by_query, by_points
                )  # fmt: skip
            else:
                _add_slopes(
                    kernel, query, key, of_queries, of_keys, m, rows, first, most, reach, products, by_query, by_points
                )  # fmt: skip
            if value_of(kernel) == ADD_LAPLACE and far.shape[0]:
                _add_exponential_slopes(
                    query, key, apart, m, rows, first, most, rate, products, by_query, by_points
                )  # fmt: skip
            pending += 1
            if pending == FOLD:
                _fold(by_points, first, count, by_key)
                _fold(by_rows, first, count, by_value)
                pending = 0
        _fold(by_points, first, count, by_key)
        _fold(by_rows, first, count, by_value)
    add_norm_slopes(kernel, query, row, by_row, rate, by_query)
    add_norm_slopes(kernel, key, column, by_column, rate, by_key)
    # of a head that is no number its gradients are none either, whatever comparisons have made of them
    for m in range(rows):
        if np.isnan(grad_total[m]):
            by_query[m] = np.nan
            by_key[:] = np.nan
            by_value[:] = np.nan


def _entries(version: str):
    """The function that Python calls, compiled once for a kernel and kept on disk; `version` is part of its key."""

    @entry
    def differentiate_heads(
        kernel, lanes, query, key, value, weight, bandwidth, constant, form, causal, each, dims, grad, outputs, total,
        shift, first, last, start, stop, by_query, by_key, by_value,
    ):  # fmt: skip
        """Fill the gradients of some problems by keys `start ... stop - 1`, and what these give to the queries.

        Arguments are those of `sum_heads`, with points filled up by zeros to a multiple of `DIMS` dimensions, of which
        `dims` count; `grad (P, M, C)` is the gradient by the `outputs`, which have no rows if they are the sums, and
        `total (P, M)` what these were divided by.
        """
        version  # noqa: B018
        for p in range(first, last):
            _differentiate_head(
                kernel, lanes, dims, grad[p], outputs[p], total[p], shift[p], query[p], key[p, start:stop],
                value[p, start:stop], weight[p, start:stop], bandwidth[p], constant, form, causal, each, key.shape[1],
                start, by_query[p], by_key[p, start:stop], by_value[p, start:stop],
            )  # fmt: skip

    return differentiate_heads


differentiate_heads = _entries(digest(__file__, "cpu_blocks", "cpu_forms", "cpu_pairs"))
