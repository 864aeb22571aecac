"""The sweep from the top: what the sources above the first target of a tile give to the tile."""

import numpy as np

from ...cpu.compiled import inlined
from ...cpu.simd import load, store, value_of
from .moments import absorb, fold, shift
from .plan import first_beyond


@inlined
def sweep_from_top(lanes, depth, sources, targets, profile, decays, plan, events, sums):
    """`plan.top[tile]`: the sums of all sources that are not below a tile, by powers of the distance to its end."""
    width, powers = value_of(lanes), value_of(depth)
    rows, scalars, points, order, count = sources
    _, _, indices, far, own, stride = events
    moments, extras, local, local_extra, base, base_extra = sums
    tiles, groups, starts, nears = plan.tiles, plan.groups, plan.starts, plan.nears
    top, top_extra, spots, decay = plan.top, plan.top_extra, targets.points, decays.source_high
    shares, rate, pascal = profile.shares_above, profile.rate, profile.pascal
    n = count
    previous = 0.0
    for tile in range(plan.number - 1, -1, -1):
        end = np.float64(spots[tiles[tile + 1] - 1])
        if tile < plan.number - 1:
            shift(lanes, depth, moments, extras, previous - end, rate, pascal)
        previous = end
        first = np.int64(starts[groups[tile]])
        # there is one node; sources in the tile have their exponentials, those above it have not
        inside = min(first_beyond(points, np.int64(nears[groups[tile + 1] - 1]), end), n)
        absorb(
            lanes, depth, rows, scalars, points, order, inside, n, end, True, rate, shares, 0, None, indices, far, own,
            stride, moments, extras, local, local_extra, base, base_extra,
        )  # fmt: skip
        absorb(
            lanes, depth, rows, scalars, points, order, first, inside, end, True, rate, shares, 0, decay, indices, far,
            own, stride, moments, extras, local, local_extra, base, base_extra,
        )  # fmt: skip
        fold(lanes, powers, moments, extras, local, local_extra, base, base_extra)
        n = first
        for power in range(powers):
            place = tile * powers + power
            store(top, place * width, load(base, power * width, lanes))
            top_extra[place] = base_extra[power]
