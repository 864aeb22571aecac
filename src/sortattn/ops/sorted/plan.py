"""How a line is cut: tiles of targets that share an origin, groups of four, and the sources each group lies among."""

import math
from collections import namedtuple

import numpy as np

from .compiled import compiled
from .exponential import exp
from .simd import SCAN, at, count_below, count_up_to

# targets of a tile
TILE = 64
# sources in it: over more of them, sums in the working precision would lose digits
CROWD = 256
# a tile spans at most this many e-folds, so e^(rate * span) stays far from overflow
MAX_EXPONENT = 8.0

# tiles: first target and first group of each, and their number; groups of four: how many sources lie below the first of
# them and below the last, at every node, and how many not above the last; `top` and `top_extra` are work space
Plan = namedtuple("Plan", "tiles groups number starts nears above top top_extra")
# by source: e^(-rate z) relative to the first and to the last target of its tile; by target: the counterparts
Decays = namedtuple("Decays", "source_low source_high target_low target_high")


@compiled
def first_from(points, n, place):
    """The first of the sorted points from `n` on that is not below `place`."""
    # sixteen at a time and without a branch for each: how many lie between two targets cannot be predicted
    while True:
        passed = count_below(points, n, place)
        n += passed
        if passed < SCAN:
            return n


@compiled
def first_beyond(points, n, place):
    """The first of the sorted points from `n` on that lies beyond `place`."""
    while True:
        passed = count_up_to(points, n, place)
        n += passed
        if passed < SCAN:
            return n


@compiled
def plan_tiles(points, sources, span, tiles, groups):
    """Cut sorted targets into tiles of about TILE that span at most `span`, and those into groups of four.

    Where sources are much denser than targets a tile has fewer, such that it holds about CROWD sources.

    Returns the number of tiles; `tiles[i]` is the first target of tile i and `groups[i]` its first group. Behind the
    last tile stand the number of targets and the number of groups.
    """
    number = start = group = n = 0
    while start < points.shape[0]:
        tiles[number], groups[number] = start, group
        number += 1
        first = points[start]
        stop = min(start + TILE, points.shape[0])
        while stop > start + 1 and not points[stop - 1] - first <= span:
            stop -= 1
        n = first_from(sources, n, np.float64(first))
        while stop > start + 1 and first_from(sources, n, np.float64(points[stop - 1])) - n > CROWD:
            stop = start + (stop - start) // 2
        # equal targets stay together: a source that ties with them is in one tile, and has one pair of decays
        while stop < points.shape[0] and points[stop] == points[stop - 1]:
            stop += 1
        group += (stop - start + 3) // 4
        start = stop
    tiles[number], groups[number] = points.shape[0], group
    return number


@compiled
def plan_groups(sources, targets, nodes, tiles, groups, number, starts, nears, above):
    """Find the sources that each group of targets lies among, see Plan."""
    families = nodes.shape[0]
    for j in range(families):
        starts[j, 0] = 0
    for tile in range(number):
        stop = np.int64(tiles[tile + 1])
        group = np.int64(groups[tile])
        for m in range(tiles[tile], stop, 4):
            first, last = np.float64(at(targets, m)), np.float64(at(targets, min(m + 3, stop - 1)))
            # all nodes together: each waits for its own last step only
            for j in range(families):
                n = first_from(sources, np.int64(starts[j, max(group - 1, 0)]), first - nodes[j])
                starts[j, group] = n
                nears[j, group] = first_from(sources, n, last - nodes[j])
            above[group] = first_beyond(sources, np.int64(nears[0, group]), last)
            group += 1


@compiled
def _fill_exponentials(points, start, stop, origin, end, rate, falling, low, high):
    """`e^(-rate (x - origin))` and `e^(-rate (end - x))` for targets (`falling`), their inverses for sources."""
    real = low.dtype.type
    whole = math.exp(-rate * (end - origin))
    if falling:
        for i in range(start, stop):
            low[i] = exp(real(-rate * (np.float64(points[i]) - origin)))
    else:
        whole = 1.0 / whole
        for i in range(start, stop):
            low[i] = exp(real(rate * (np.float64(points[i]) - origin)))
    # the two multiply to the same number everywhere in the tile: a division is cheaper than an exponential
    product = real(whole)
    for i in range(start, stop):
        high[i] = product / low[i]


@compiled
def fill_decays(points, targets, rate, tiles, number, source_low, source_high, target_low, target_high):
    """Exponentials of all sources and targets relative to the two ends of the tile they are in, see Decays.

    Sources between two tiles have none: they are absorbed with weights of their own.
    """
    n = 0
    for tile in range(number):
        start, stop = np.int64(tiles[tile]), np.int64(tiles[tile + 1])
        origin, end = np.float64(targets[start]), np.float64(targets[stop - 1])
        _fill_exponentials(targets, start, stop, origin, end, rate, True, target_low, target_high)
        first = first_from(points, n, origin)
        n = first_beyond(points, first, end)
        _fill_exponentials(points, first, n, origin, end, rate, False, source_low, source_high)
