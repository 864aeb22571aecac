"""The sweep from the top: what the sources above give to every group of targets."""

import numpy as np

from .compiled import compiled
from .moments import FOLD, absorb, absorb_local, combine, fold, shift
from .simd import load, multiply_add, store, value_of


@compiled
def sweep_from_top(lanes, depth, sources, targets, profile, decays, plan, weights):
    """`plan.top[group]`: what the sources above a group give, by powers of the distance to its tile's end."""
    width, powers = value_of(lanes), value_of(depth)
    rows, scalars, points, order, count = sources
    real = rows.dtype.type
    moments = np.zeros(powers * width)
    extras = np.zeros(powers)
    local = np.zeros(powers * width, rows.dtype)
    local_extra = np.zeros(powers, rows.dtype)
    base = np.zeros(powers * width, rows.dtype)
    base_extra = np.zeros(powers, rows.dtype)
    above, top, top_extra, tiles = plan.above, plan.top, plan.top_extra, plan.tiles
    spread, pascal, decay = profile.spread_above, profile.pascal, decays.source_high
    spots = targets.points
    group = np.int64(plan.groups[plan.number])
    n = count
    previous = 0.0
    for tile in range(plan.number - 1, -1, -1):
        start, stop = np.int64(tiles[tile]), np.int64(tiles[tile + 1])
        end = np.float64(spots[stop - 1])
        if tile < plan.number - 1:
            shift(lanes, depth, moments, extras, 0, previous - end, profile.rate, pascal)
        previous = end
        first = np.int64(above[group - 1])
        absorb(
            lanes, depth, rows, scalars, points, order, first, n, end, -1.0, profile.rate, weights, moments, extras, 0
        )
        combine(lanes, depth, moments, extras, spread, base, base_extra, 0)
        n = first
        pending = 0
        for _ in range(start, stop, 4):
            group -= 1
            first = np.int64(above[group])
            absorb_local(lanes, depth, rows, scalars, points, order, first, n, end, -1.0, decay, local, local_extra, 0)
            pending += n - first
            n = first
            if pending > FOLD:
                fold(lanes, depth, local, local_extra, moments, extras)
                combine(lanes, depth, moments, extras, spread, base, base_extra, 0)
                pending = 0
            for power in range(powers):
                total = load(base, power * width, lanes)
                extra = base_extra[power]
                for i in range(power, powers):
                    factor = real(spread[0, power, i])
                    total = multiply_add(factor, load(local, (i - power) * width, lanes), total)
                    extra += factor * local_extra[i - power]
                store(top, (group * powers + power) * width, total)
                top_extra[group * powers + power] = extra
        fold(lanes, depth, local, local_extra, moments, extras)
