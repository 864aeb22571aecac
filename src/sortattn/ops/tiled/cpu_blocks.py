"""What compiled loops over blocks of keys hold: a tile of queries, a block of keys, the numbers of their pairs."""

from collections import namedtuple

import numpy as np

from ...cpu.compiled import compiled
from ...cpu.simd import aligned, put, value_of
from .cpu_pairs import (
    ADD_LAPLACE,
    KEYS,
    QUERIES,
    REACH,
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
# The points of a head: whether exponentials are products for them; tiles of queries, or of their two powers; the powers
# of queries `(2, M, D)` and keys `(2, N, D)`, none where they are not close; the norms of queries and of keys, if any.
Points = namedtuple("Points", "close tiles rising falling of_queries of_keys row column")


@compiled
def make_room(dims, like):
    """Room for one block and one tile, of the type of `like`."""
    return Room(
        aligned(dims * KEYS, like),
        aligned(dims * KEYS, like),
        aligned(dims * KEYS, like),
        aligned(KEYS, like),
        aligned(KEYS, like),
        aligned(QUERIES, like),
        np.zeros(QUERIES, np.int64),
        aligned(QUERIES * KEYS, like),
    )


@compiled
def make_points(kernel, query, key, rate):
    """What is made of `query (M, D)` and `key (N, D)` once for all blocks; the rate is one over the bandwidth."""
    dims = query.shape[1]
    low, high = np.full(dims, np.inf, query.dtype), np.full(dims, -np.inf, query.dtype)
    close = value_of(kernel) == ADD_LAPLACE
    if close:
        extremes(query, low, high)
        extremes(key, low, high)
        for d in range(dims):
            # not so, too, of what is no number
            close = close and (np.float64(high[d]) - np.float64(low[d])) * rate <= REACH
    rows, columns = (query.shape[0], key.shape[0]) if close else (0, 0)
    of_queries, of_keys = np.empty((2, rows, dims), query.dtype), np.empty((2, columns, dims), key.dtype)
    if close:
        middle = (low.astype(np.float64) + high.astype(np.float64)) * 0.5
        powers(query, middle, rate, of_queries[0], of_queries[1])
        powers(key, middle, rate, of_keys[0], of_keys[1])
    tiles = tiles_of(query[:0] if close else query)
    row, column = norms_of(kernel, query), norms_of(kernel, key)
    return Points(close, tiles, tiles_of(of_queries[0]), tiles_of(of_queries[1]), of_queries, of_keys, row, column)


@compiled
def bring_keys(key, points, weight, start, count, room):
    """Make a block of the keys from `start` on, which are `count`; returns whether all queries may see all of them."""
    if points.close:
        transpose(points.of_keys[0], start, count, room.rising)
        transpose(points.of_keys[1], start, count, room.falling)
    else:
        transpose(key, start, count, room.keys)
    whole = True
    for n in range(KEYS):
        if points.column.shape[0]:
            put(room.columns, n, points.column[start + n] if n < count else key.dtype.type(0.0))
        seen = n < count and (weight.shape[0] == 0 or weight[start + n] != 0.0)
        put(room.weights, n, key.dtype.type(1.0 if seen else 0.0))
        whole = whole and seen
    return whole


@compiled
def fill(
    kernel, close, tiles, rising, falling, place, keys, keys_rising, keys_falling, dims, reach, rate, block
):  # fmt: skip
    """The sums of a(u) of the tile at this place and a block of keys."""
    if close:
        add_up_powers(rising, falling, place, keys_rising, keys_falling, dims, block)
    elif value_of(kernel) == ADD_LAPLACE:
        add_up_exponentials(tiles, place, keys, dims, rate, block)
    else:
        add_up(kernel, tiles, place, keys, dims, reach, block)


@compiled
def bring_norms(row, start, rows):
    """Those of a tile's queries, if the kernel has them."""
    if row.shape[0]:
        for i in range(QUERIES):
            put(rows, i, row[min(start + i, row.shape[0] - 1)])


@compiled
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
