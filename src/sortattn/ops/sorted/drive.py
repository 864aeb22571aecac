"""Compiled loops over the dimensions of one head: sort them, or walk along them."""

import numpy as np

from .compiled import compiled, digest, entry
from .plan import Decays, Plan, fill_decays, plan_groups, plan_tiles
from .simd import SCAN, value_of
from .sort import radix_sort, transpose_columns
from .walk import Sources, Targets, walk

# columns that are transposed together: one cache line of float32
COLUMNS = 16


@compiled
def _take(column, order, mirrored, points, sorted_order):
    """Sorted coordinates, and the order they are in; `mirrored` negates the line."""
    count = order.shape[0]
    if mirrored:
        for i in range(count):
            index = order[count - 1 - i]
            sorted_order[i] = index
            points[i] = -column[index]
    else:
        for i in range(count):
            index = order[i]
            sorted_order[i] = index
            points[i] = column[index]


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
        pairs = np.empty(count, np.uint64)
        spare = np.empty(count, np.uint64)
        for first in range(start, stop, COLUMNS):
            width = min(stop - first, COLUMNS)
            transpose_columns(points, first, width, columns)
            for d in range(width):
                radix_sort(columns[d], pairs, spare, order[first + d])

    @entry
    def walk_head(
        lanes, depth, source_points, source_order, target_points, target_order, start, stop, mirrored, rows, extra,
        profile, out, out_extra, products,
    ):  # fmt: skip
        """Walk along dimensions `start ... stop - 1` of one head, for one block of channels.

        `source_points (N, D)` with their argsort `source_order (D, N)`, targets alike; `mirrored` negates all
        coordinates, which is how a kernel sum is transposed. `rows`, `extra`, `out` and `out_extra` are as in `walk`;
        `products`, if not None, is `(stop - start, M)`.
        """
        version  # noqa: B018
        count, number = source_points.shape[0], target_points.shape[0]
        powers = value_of(depth)
        source_columns = np.empty((COLUMNS, count + COLUMNS), rows.dtype)
        target_columns = np.empty((COLUMNS, number + COLUMNS), rows.dtype)
        sources = Sources(rows, extra, np.full(count + SCAN, np.inf, rows.dtype), np.empty(count, np.int32), count)
        targets = Targets(np.empty(number, rows.dtype), np.empty(number, np.int32), number)
        decays = Decays(
            np.ones(count, rows.dtype),
            np.ones(count, rows.dtype),
            np.ones(number, rows.dtype),
            np.ones(number, rows.dtype),
        )
        tiles, groups = np.empty(number + 1, np.int32), np.empty(number + 1, np.int32)
        families = profile.nodes.shape[0]
        starts, nears = np.empty((families, 0), np.int32), np.empty((families, 0), np.int32)
        above = np.empty(0, np.int32)
        top = np.empty(0, rows.dtype)
        top_extra = np.empty(0, rows.dtype)
        for first in range(start, stop, COLUMNS):
            width = min(stop - first, COLUMNS)
            transpose_columns(source_points, first, width, source_columns)
            transpose_columns(target_points, first, width, target_columns)
            for d in range(width):
                _take(source_columns[d], source_order[first + d], mirrored, sources.points, sources.order)
                _take(target_columns[d], target_order[first + d], mirrored, targets.points, targets.order)
                tile_number = plan_tiles(targets.points, sources.points, profile.span, tiles, groups)
                needed = groups[tile_number]
                if needed > above.shape[0]:
                    above = np.empty(needed, np.int32)
                    starts, nears = np.empty((families, needed), np.int32), np.empty((families, needed), np.int32)
                    if profile.two_sided:
                        top = np.empty(needed * powers * value_of(lanes), rows.dtype)
                        top_extra = np.empty(needed * powers, rows.dtype)
                plan_groups(
                    sources.points, targets.points, profile.nodes, tiles, groups, tile_number, starts, nears, above
                )
                if profile.rate != 0.0:
                    fill_decays(
                        sources.points, targets.points, profile.rate, tiles, tile_number, decays.source_low,
                        decays.source_high, decays.target_low, decays.target_high,
                    )  # fmt: skip
                plan = Plan(tiles, groups, tile_number, starts, nears, above, top, top_extra)
                if products is None:
                    walk(lanes, depth, sources, targets, profile, decays, plan, out, out_extra, None)
                else:
                    walk(
                        lanes,
                        depth,
                        sources,
                        targets,
                        profile,
                        decays,
                        plan,
                        out,
                        out_extra,
                        products[first - start + d],
                    )

    return sort_head, walk_head


sort_head, walk_head = _entries(digest())
