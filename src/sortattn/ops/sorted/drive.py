"""Compiled loops over the dimensions of one head: sort them, or walk along them."""

import numpy as np

from .compiled import compiled, digest, entry
from .events import make_events
from .moments import make_sums
from .plan import Decays, Plan, fill_decays, plan_groups, plan_tiles
from .simd import SPARE, aligned, value_of
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
        column, line = columns[d - first], lines[d - first]
        if unsorted:
            sort_column(column, pairs, spare, order[d], line)
        else:
            for i in range(order.shape[1]):
                line[i] = column[order[d, i]]


@compiled
def _load_line(line, order, mirrored, points, sorted_order):
    """The sorted coordinates of one dimension and their order; `mirrored` negates the line."""
    count = order.shape[0]
    if mirrored:
        for i in range(count):
            points[i] = -line[count - 1 - i]
            sorted_order[i] = order[count - 1 - i]
    else:
        points[:count] = line[:count]
        sorted_order[:count] = order


def _entries(version: str):
    """The functions that Python calls, compiled once and kept on disk.

    Numba recompiles a kept function when its own file changes, not when one does that it calls into; but what a
    function closes over is part of its key, and `version` is a digest of all of them.
    """

    @entry
    def sort_head(points, start, stop, order):
        """Write the argsort of dimensions `start ... stop - 1` of `points (N, D)` to `order (D, N)`; float32."""
        version  # noqa: B018
        count = points.shape[0]
        # the padding keeps columns of a power of two from falling into the same cache sets
        columns = np.empty((COLUMNS, count + COLUMNS), points.dtype)
        line = np.empty(count, points.dtype)
        pairs, spare = np.empty((2, count), np.uint64)
        for first in range(start, stop, COLUMNS):
            width = min(stop - first, COLUMNS)
            transpose_columns(points, first, width, columns)
            for d in range(width):
                sort_column(columns[d], pairs, spare, order[first + d], line)

    @entry
    def walk_head(
        lanes, depth, terms, source_points, source_order, target_points, target_order, start, stop, mirrored, unsorted,
        rows, extra, profile, out, out_extra, products,
    ):  # fmt: skip
        """Walk along dimensions `start ... stop - 1` of one head, for one block of channels.

        `source_points (N, D)` with their argsort `source_order (D, N)`, targets alike; `mirrored` negates all
        coordinates, which is how a kernel sum is transposed; `unsorted` has the argsorts written, not read. `rows`,
        `extra`, `out` and `out_extra` are as in `walk`; `products`, if not None, is `(stop - start, M)`.
        """
        version  # noqa: B018
        count, number = source_points.shape[0], target_points.shape[0]
        powers, number_of_sums = value_of(depth), value_of(terms)
        columns = np.empty((COLUMNS, max(count, number) + COLUMNS), rows.dtype)
        source_lines = np.empty((COLUMNS, count + COLUMNS), rows.dtype)
        target_lines = np.empty((COLUMNS, number + COLUMNS), rows.dtype)
        sources = Sources(
            rows, extra, np.full(count + SPARE, np.inf, rows.dtype), np.zeros(count + SPARE, np.int32), count
        )
        targets = Targets(np.zeros(number + SPARE, rows.dtype), np.empty(number, np.int32), number)
        pairs, spare = np.empty((2, max(count, number) if unsorted else 0), np.uint64)
        decays = Decays(
            np.ones(count + SPARE, rows.dtype),
            np.ones(count + SPARE, rows.dtype),
            np.ones(number + SPARE, rows.dtype),
            np.ones(number + SPARE, rows.dtype),
        )
        tiles, groups = np.empty(number + 1, np.int32), np.empty(number + 1, np.int32)
        families = profile.nodes.shape[0]
        starts, nears = np.empty((2, 0), np.int32)
        near_stops, far_stops = np.empty((2, 0), np.int32)
        top, top_extra = np.empty(0, rows.dtype), np.empty(0, rows.dtype)
        sums = make_sums(lanes, number_of_sums, rows)
        events = make_events(number_of_sums, ROOM, rows)
        ties = aligned(value_of(lanes), rows)
        for first in range(start, stop, COLUMNS):
            width = min(stop - first, COLUMNS)
            last = first + width
            _sorted_columns(source_points, source_order, first, last, unsorted, columns, pairs, spare, source_lines)
            _sorted_columns(target_points, target_order, first, last, unsorted, columns, pairs, spare, target_lines)
            for d in range(width):
                _load_line(source_lines[d], source_order[first + d], mirrored, sources.points, sources.order)
                _load_line(target_lines[d], target_order[first + d], mirrored, targets.points, targets.order)
                tile_number = plan_tiles(targets.points, number, sources.points, count, profile.span, tiles, groups)
                needed = groups[tile_number]
                if needed > near_stops.shape[0]:
                    starts, nears = np.empty((2, needed * families), np.int32)
                    near_stops, far_stops = np.empty((2, needed), np.int32)
                if number_of_sums > powers and tile_number * powers > top_extra.shape[0]:
                    top = np.empty(tile_number * powers * value_of(lanes), rows.dtype)
                    top_extra = np.empty(tile_number * powers, rows.dtype)
                room = plan_groups(
                    sources.points, targets.points, profile.nodes, tiles, groups, tile_number, starts, nears
                )
                if room + SPARE > events.stride:
                    events = make_events(number_of_sums, room, rows)
                if profile.rate != 0.0:
                    fill_decays(
                        sources.points, targets.points, profile.rate, tiles, tile_number, decays.source_low,
                        decays.source_high, decays.target_low, decays.target_high,
                    )  # fmt: skip
                plan = Plan(tiles, groups, tile_number, starts, nears, near_stops, far_stops, top, top_extra)
                product = None if products is None else products[first - start + d]
                walk(
                    lanes, depth, terms, sources, targets, profile, decays, plan, events, sums, ties, out, out_extra,
                    product,
                )  # fmt: skip

    return sort_head, walk_head


sort_head, walk_head = _entries(digest())
