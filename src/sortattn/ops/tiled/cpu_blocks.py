"""What compiled loops over blocks of keys hold: a tile of queries, a block of keys, the numbers of their pairs."""

from collections import namedtuple

import numpy as np

from ...cpu.compiled import inlined
from ...cpu.memory import empty, zeroed
from ...cpu.simd import put, value_of
from .cpu_forms import add_up_polynomial, add_up_spline
from .cpu_pairs import (
    ADD_LAPLACE,
    KEYS,
    POLYNOMIAL_EXPONENTIAL,
    QUERIES,
    REACH,
    SPLINE,
    add_up,
    add_up_exponentials,
    add_up_powers,
    extremes,
    norms_of,
    powers,
    tiles_of,
    transpose,
)

# Of a block of keys the coordinates `(D, KEYS)`, flat, or their two powers, and `(KEYS,)` columns and weights; of a
# tile of queries the rows, and how many keys of the block each sees; the numbers of their pairs.
Room = namedtuple("Room", "keys rising falling columns weights rows limits block")
# The points of a head: tiles of queries, or of their two powers; the powers of queries `(2, M, D)` and of keys
# `(2, N, D)`, none but for exponentials; the dimensions in which products of powers would overflow, and ones for these
# among zeros; the norms of queries and of keys, if any.
Points = namedtuple("Points", "tiles rising falling of_queries of_keys far apart row column")


@inlined
def make_room(dims, like):
    """Room for one block and one tile, of the type of `like`."""
    return Room(
        zeroed(dims * KEYS, like),
        zeroed(dims * KEYS, like),
        zeroed(dims * KEYS, like),
        zeroed(KEYS, like),
        zeroed(KEYS, like),
        zeroed(QUERIES, like),
        zeroed(QUERIES, np.int64),
        zeroed(QUERIES * KEYS, like),
    )


@inlined
def make_points(kernel, query, key, rate):
    """What is made of `query (M, D)` and `key (N, D)` once for all blocks; the rate is one over the bandwidth."""
    dims = query.shape[1]
    exponential = value_of(kernel) == ADD_LAPLACE
    low, high = empty(dims, query), empty(dims, query)
    low[:] = np.inf
    high[:] = -np.inf
    if exponential:
        extremes(query, low, high)
        extremes(key, low, high)
    middle, apart, far, number = empty(dims, np.float64), zeroed(dims, query), empty(dims, np.int64), 0
    for d in range(dims):
        least, most = np.float64(low[d]), np.float64(high[d])
        middle[d] = (least + most) * 0.5
        # so, too, of infinities, and where the rate is one
        if exponential and not (most - least) * rate <= REACH:
            apart[d] = 1.0
            far[number] = d
            number += 1
    far = far[:number]
    of_queries = powers(query if exponential else query[:0], middle, rate, apart)
    of_keys = powers(key if exponential else key[:0], middle, rate, apart)
    tiles = tiles_of(query[:0] if exponential and far.shape[0] == 0 else query)
    rising, falling = tiles_of(of_queries[0]), tiles_of(of_queries[1])
    norms = norms_of(kernel, query), norms_of(kernel, key)
    return Points(tiles, rising, falling, of_queries, of_keys, far, apart, *norms)


@inlined
def bring_keys(key, points, weight, start, count, room):
    """Make a block of the keys from `start` on, which are `count`; returns whether all queries may see all of them."""
    if points.of_keys.shape[1]:
        transpose(points.of_keys[0], start, count, room.rising)
        transpose(points.of_keys[1], start, count, room.falling)
    if points.tiles.shape[0]:
        transpose(key, start, count, room.keys)
    whole = True
    for n in range(KEYS):
        if points.column.shape[0]:
            put(room.columns, n, points.column[start + n] if n < count else key.dtype.type(0.0))
        seen = n < count and (weight.shape[0] == 0 or weight[start + n] != 0.0)
        put(room.weights, n, key.dtype.type(1.0 if seen else 0.0))
        whole = whole and seen
    return whole


@inlined
def fill(
    kernel, tiles, rising, falling, far, place, keys, keys_rising, keys_falling, dims, reach, rate, form,
    block,
):  # fmt: skip
    """The sums of a(u) of the tile at this place and a block of keys."""
    if value_of(kernel) == SPLINE:
        add_up_spline(tiles, place, keys, dims, reach, form, block)
        return
    if value_of(kernel) == POLYNOMIAL_EXPONENTIAL:
        add_up_polynomial(tiles, place, keys, dims, reach, form, block)
        return
    if value_of(kernel) != ADD_LAPLACE:
        add_up(kernel, tiles, place, keys, dims, reach, block)
        return
    add_up_powers(rising, falling, place, keys_rising, keys_falling, dims, block)
    if far.shape[0]:
        # of dimensions that there are, not of those that fill up a vector, in which all points are zero
        add_up_exponentials(tiles, place, keys, far, rate, block)


@inlined
def bring_norms(row, start, rows):
    """Those of a tile's queries, if the kernel has them."""
    if row.shape[0]:
        for i in range(QUERIES):
            put(rows, i, row[min(start + i, row.shape[0] - 1)])


@inlined
def set_limits(start, stop, first, columns, causal, each, limits):
    """How many keys of the block from `first` on the queries of a tile see; returns the most and the fewest.

    There are `columns` of them in all, and `each` is the number of queries of one head.
    """
    most, fewest = 0, KEYS
    for i in range(QUERIES):
        m = start + i
        sees = columns
        if causal:
            sees = min(sees, m % each + 1 + columns - each)
        limits[i] = min(max(sees - first, 0), KEYS) if m < stop else 0
        most, fewest = max(most, limits[i]), min(fewest, limits[i])
    return most, fewest
