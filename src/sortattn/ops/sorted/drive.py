"""Compiled loops over the dimensions of one head: sort them, or walk along them."""

import numpy as np

from ...cpu.compiled import compiled, digest, entry
from ...cpu.memory import empty, ones, zeroed
from ...cpu.simd import SPARE, at, put, value_of
from .events import make_events
from .halves import begin_half, make_halves, sum_positive, sum_rows, zeros_of
from .moments import make_sums
from .plan import Decays, Plan, fill_decays, make_plan, plan_groups, plan_tiles
from .sort import sort_column, transpose_columns
from .walk import Sources, Targets, walk

# columns that are transposed together: one cache line of float32
COLUMNS = 16
# events that a tile is expected to have, at most
ROOM = 512


@compiled
def _sorted_columns(points, order, first, stop, unsorted, columns, pairs, spare, lines):
    """Sorted coordinates of dimensions `first ... stop - 1` in `lines`; where they are `unsorted`, `order` is found."""
    transpose_columns(points, first, stop - first, columns)
    for d in range(first, stop):
        column, line, places = columns[d - first], lines[d - first], order[d % order.shape[0]]
        if unsorted:
            sort_column(column, pairs, spare, places, line)
        else:
            for i in range(places.shape[0]):
                line[i] = column[places[i]]


@compiled
def _load_line(line, order, start, stop, negated, points, sorted_order):
    """Coordinates `start ... stop - 1` of a sorted line and their order, from the last to the first if `negated`.

    Behind them stand SPARE infinities, and zeros. Returns how many they are.
    """
    count = stop - start
    if negated:
        for i in range(count):
            put(points, i, -at(line, stop - 1 - i))
            put(sorted_order, i, at(order, stop - 1 - i))
    else:
        for i in range(count):
            put(points, i, at(line, start + i))
            put(sorted_order, i, at(order, start + i))
    points[count : count + SPARE] = np.inf
    sorted_order[count : count + SPARE] = 0
    return count


@compiled
def _walk_line(
    lanes, depth, terms, sources, targets, profile, decays, plan, events, sums, halves, ties, out, out_extra, products
):  # fmt: skip
    """Plan one line and walk along it; returns the events, for which there may be more room now."""
    tiles, groups, starts, nears = plan.tiles, plan.groups, plan.starts, plan.nears
    points, spots = sources.points, targets.points
    folded = profile.folded != 0
    number = plan_tiles(spots, targets.count, points, sources.count, profile.span, folded, tiles, groups)
    room = plan_groups(points, spots, profile.nodes, tiles, groups, number, starts, nears)
    if room + SPARE > events.stride:
        events = make_events(value_of(terms), room, sources.rows)
    if profile.rate != 0.0:
        fill_decays(
            points, spots, profile.rate, tiles, number, decays.source_low, decays.source_high, decays.target_low,
            decays.target_high,
        )  # fmt: skip
    planned = Plan(tiles, groups, number, starts, nears, plan.near_stops, plan.far_stops, plan.top, plan.top_extra)
    walk(
        lanes, depth, terms, sources, targets, profile, decays, planned, events, sums, halves.initial,
        halves.initial_extra, ties, out, out_extra, products,
    )  # fmt: skip
    return events


def _entries(version: str):
    """The functions that Python calls, compiled once and kept on disk; `version` is part of their key there."""

    @entry
    def sort_head(points, start, stop, order):
        """Write the argsort of dimensions `start ... stop - 1` of `points (N, D)` to `order (D, N)`; float32."""
        version  # noqa: B018
        count = points.shape[0]
        # the padding keeps columns of a power of two from falling into the same cache sets
        columns = empty((COLUMNS, count + COLUMNS), points)
        line = empty(count, points)
        pairs, spare = empty(count, np.uint64), empty(count, np.uint64)
        for first in range(start, stop, COLUMNS):
            width = min(stop - first, COLUMNS)
            transpose_columns(points, first, width, columns)
            for d in range(width):
                sort_column(columns[d], pairs, spare, order[first + d], line)

    @entry
    def walk_head(
        lanes, depth, terms, source_points, source_order, target_points, target_order, start, stop, mirrored, unsorted,
        rows, extra, profile, opposite, out, out_extra, products,
    ):  # fmt: skip
        """Walk along dimensions `start ... stop - 1` of one head, for one block of channels.

        `source_points (N, D)` with their argsort `source_order (D, N)`, targets alike; `mirrored` negates all
        coordinates, which is how a kernel sum is transposed; `unsorted` has the argsorts written, not read; without
        rows they are not kept. `rows`, `extra`, `out` and `out_extra` are as in `walk`; `products`, if not None, is
        `(stop - start, M)`. `opposite` is the profile of the negative half of a folded line.
        """
        version  # noqa: B018
        count, number = source_points.shape[0], target_points.shape[0]
        if unsorted and source_order.shape[0] == 0:
            source_order, target_order = empty((COLUMNS, count), np.int32), empty((COLUMNS, number), np.int32)
        powers, number_of_sums = value_of(depth), value_of(terms)
        columns = empty((COLUMNS, max(count, number) + COLUMNS), rows)
        source_lines = empty((COLUMNS, count + COLUMNS), rows)
        target_lines = empty((COLUMNS, number + COLUMNS), rows)
        points, order = empty(count + SPARE, rows), zeroed(count + SPARE, np.int32)
        points[:] = np.inf
        spots, order_here = zeroed(number + SPARE, rows), zeroed(number + SPARE, np.int32)
        room = max(count, number) if unsorted else 0
        pairs, spare = empty(room, np.uint64), empty(room, np.uint64)
        decays = Decays(
            ones(count + SPARE, rows),
            ones(count + SPARE, rows),
            ones(number + SPARE, rows),
            ones(number + SPARE, rows),
        )
        # as many as there can be; what is not needed is never touched
        plan = make_plan(number, profile.nodes.shape[0], powers, number_of_sums > powers, value_of(lanes), rows)
        sums = make_sums(lanes, number_of_sums, rows)
        events = make_events(number_of_sums, ROOM, rows)
        halves = make_halves(lanes, depth, COLUMNS, rows)
        ties = zeroed(value_of(lanes), rows)
        folded = profile.folded != 0
        if folded:
            for n in range(count):
                order[n] = np.int32(n)
            sum_rows(lanes, rows, extra, order, 0, count, halves.total, halves.total_extra)
        for first in range(start, stop, COLUMNS):
            width = min(stop - first, COLUMNS)
            last = first + width
            _sorted_columns(source_points, source_order, first, last, unsorted, columns, pairs, spare, source_lines)
            if folded:
                sum_positive(lanes, columns, width, count, rows, extra, halves)
            _sorted_columns(target_points, target_order, first, last, unsorted, columns, pairs, spare, target_lines)
            for d in range(width):
                line, places = source_lines[d], source_order[(first + d) % source_order.shape[0]]
                target_line, target_places = target_lines[d], target_order[(first + d) % target_order.shape[0]]
                product = None if products is None else products[first - start + d]
                here, negated = profile, mirrored
                begin, end, target_begin, target_end = 0, count, 0, number
                if folded:
                    zero, beyond = zeros_of(line, count)
                    target_zero, target_beyond = zeros_of(target_line, number)
                for half in range(2 if folded else 1):
                    if folded:
                        negated = half == 1
                        here = opposite if negated != mirrored else profile
                        begin_half(lanes, depth, rows, extra, places, zero, beyond, d, negated, here, halves)
                        begin, end = (0, zero) if negated else (beyond, count)
                        # a target at zero is on both sides of an odd kernel, and on one of an even one
                        lowest = target_beyond if profile.folded < 0 else target_zero
                        target_begin, target_end = (0, lowest) if negated else (target_zero, number)
                    loaded = _load_line(line, places, begin, end, negated, points, order)
                    reached = _load_line(
                        target_line, target_places, target_begin, target_end, negated, spots, order_here
                    )
                    events = _walk_line(
                        lanes, depth, terms, Sources(rows, extra, points, order, loaded),
                        Targets(spots, order_here, reached), here, decays, plan, events, sums, halves, ties, out,
                        out_extra, product,
                    )  # fmt: skip

    return sort_head, walk_head


sort_head, walk_head = _entries(digest(__file__, "events", "halves", "moments", "plan", "sort", "sweep", "walk"))
