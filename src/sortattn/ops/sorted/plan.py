"""How a line is cut: tiles of targets that share an origin, groups of four, and the sources each group lies among."""

import math
from collections import namedtuple

import numpy as np

from ...cpu.compiled import inlined
from ...cpu.exponential import exp
from ...cpu.memory import empty
from ...cpu.simd import BATCH, SCAN, SPARE, at, count_below, count_up_to, load, narrow, put, splat, store, widen

# targets of a tile
TILE = 64
# sources in it: over more of them, sums in the working precision would lose digits
CROWD = 256
# a tile spans at most this many e-folds: what has been summed from above is taken back source by source, which loses
# the digits that e^(2 rate span) has
MAX_EXPONENT = 1.5

# tiles: first target and first group of each, and their number; groups of four: how many sources lie below the first of
# them, `starts[group * nodes + node]`, and below the last, `nears` alike; the rest is work space of `list_tile` and of
# `sweep_from_top`
Plan = namedtuple("Plan", "tiles groups number starts nears near_stops far_stops top top_extra")
# a tile of a folded line reaches at most this many times the distance of its first target from zero further: what the
# sources between the two give is a difference that loses the digits which this factor has
REACH = 3.0
# by source: e^(-rate z) relative to the first and to the last target of its tile; by target: the counterparts
Decays = namedtuple("Decays", "source_low source_high target_low target_high")


@inlined
def make_plan(number, families, powers, two_sided, width, real):
    """Room for the plan of as many targets, in the worst case of as many tiles."""
    rows = number * powers if two_sided else 0
    return Plan(
        empty(number + 1, np.int32),
        empty(number + 1, np.int32),
        0,
        empty(number * families, np.int32),
        empty(number * families, np.int32),
        empty(number + 1, np.int32),
        empty(number + 1, np.int32),
        empty(rows * width, real),
        empty(rows, real),
    )


@inlined
def first_from(points, n, place):
    """The first of the sorted points from `n` on that is not below `place`."""
    # sixteen at a time and without a branch for each: how many lie between two targets cannot be predicted
    while True:
        passed = count_below(points, n, place)
        n += passed
        if passed < SCAN:
            return n


@inlined
def first_beyond(points, n, place):
    """The first of the sorted points from `n` on that lies beyond `place`."""
    while True:
        passed = count_up_to(points, n, place)
        n += passed
        if passed < SCAN:
            return n


@inlined
def plan_tiles(points, number, sources, count, span, folded, tiles, groups):
    """Cut sorted targets into tiles of about TILE that span at most `span`, and those into groups of four.

    On a `folded` line a tile spans at most REACH times the distance of its first target from zero.

    Where sources are much denser than targets a tile has fewer, such that it holds about CROWD sources.

    Returns the number of tiles; `tiles[i]` is the first target of tile i and `groups[i]` its first group. Behind the
    last tile stand the number of targets and the number of groups.
    """
    tile = start = group = n = 0
    while start < number:
        tiles[tile], groups[tile] = start, group
        tile += 1
        first = points[start]
        stop = min(start + TILE, number)
        if folded:
            span = REACH * np.float64(first)
        if not points[stop - 1] - first <= span:
            stop = start + 1
            while stop < number and points[stop] - first <= span:
                stop += 1
        n = first_from(sources, n, np.float64(first))
        while stop > start + 1 and n + CROWD < count and sources[n + CROWD] < points[stop - 1]:
            stop = start + (stop - start) // 2
        # equal targets stay together: a source that ties with them is in one tile, and has one pair of decays
        while stop < number and points[stop] == points[stop - 1]:
            stop += 1
        group += (stop - start + 3) // 4
        start = stop
    tiles[tile], groups[tile] = number, group
    return tile


@inlined
def plan_groups(sources, targets, nodes, tiles, groups, number, starts, nears):
    """Find the sources that each group of targets lies among, see Plan; returns how many a tile has at most."""
    families = nodes.shape[0]
    most = 0
    for tile in range(number):
        stop = np.int64(tiles[tile + 1])
        place = np.int64(groups[tile]) * families
        for m in range(tiles[tile], stop, 4):
            first, last = np.float64(at(targets, m)), np.float64(at(targets, min(m + 3, stop - 1)))
            # all nodes together: each waits for its own last step only
            for j in range(families):
                before = np.int64(at(starts, place - families)) if place >= families else 0
                n = first_from(sources, before, first - at(nodes, j))
                end = first_from(sources, n, last - at(nodes, j))
                put(starts, place, np.int32(n))
                put(nears, place, np.int32(end))
                place += 1
        # both those that are near for some group and those that are passed within the tile lie between its ends
        room = 0
        for j in range(families):
            room += at(nears, place - families + j) - at(starts, np.int64(groups[tile]) * families + j)
        most = max(most, room)
    return most


@inlined
def _fill_exponentials(points, start, stop, origin, rate, product, low, high):
    """`e^(rate (x - origin))` for points `start ... stop - 1`, and some behind them, and `product` divided by it."""
    for first in range(start, stop, SPARE):
        distance = widen(load(points, first, BATCH)) - splat(origin, BATCH)
        decay = exp(narrow(splat(rate, BATCH) * distance, low))
        store(low, first, decay)
        store(high, first, splat(product, BATCH) / decay)


@inlined
def fill_decays(points, targets, rate, tiles, number, source_low, source_high, target_low, target_high):
    """Exponentials of all sources and targets relative to the two ends of the tile they are in, see Decays.

    Sources between two tiles have none: they are absorbed with weights of their own.
    """
    real = source_low.dtype.type
    n = 0
    for tile in range(number):
        start, stop = np.int64(tiles[tile]), np.int64(tiles[tile + 1])
        origin, end = np.float64(targets[start]), np.float64(targets[stop - 1])
        # the two multiply to the same number everywhere in the tile: a division is cheaper than an exponential
        whole = math.exp(rate * (end - origin))
        _fill_exponentials(targets, start, stop, origin, -rate, real(1.0 / whole), target_low, target_high)
        first = first_from(points, n, origin)
        n = first_beyond(points, first, end)
        _fill_exponentials(points, first, n, origin, rate, real(whole), source_low, source_high)
