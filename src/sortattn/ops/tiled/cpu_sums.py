"""The forward pass on the CPU: every block of keys against all queries, four at a time."""

import numpy as np

from ...cpu.compiled import digest, entry, inlined
from ...cpu.exponential import exp
from ...cpu.simd import at, load, multiply_add, store, value_of, zeros
from .cpu_blocks import bring_keys, bring_norms, fill, make_points, make_room, set_limits
from .cpu_pairs import KEYS, LIFTED, QUERIES, exponentials, finish, hide, total_of


@inlined
def _lift(block, start, stop, shift, total, sums):
    """Exponentials of a tile's numbers, beside the largest that each query has seen so far."""
    for i in range(min(QUERIES, stop - start)):
        m = start + i
        most = shift[m]
        for n in range(KEYS):
            most = max(most, at(block, i * KEYS + n))
        if most > shift[m]:
            # a row that has seen nothing yet has no scale to change
            change = exp(shift[m] - most)
            total[m] *= change
            for c in range(sums.shape[1]):
                sums[m, c] *= change
            shift[m] = most
        exponentials(block, i, most)


@inlined
def _add_rows(lanes, block, count, rows, place, channels, flat, where, stop):
    """Add the first `count` rows of a block to those of a tile, each times the number of the pair.

    Both are flat, of so many channels; the block begins at row `place`, the tile at row `where` and ends before `stop`.
    """
    width = value_of(lanes)
    for first in range(0, channels, width):
        total0 = total1 = total2 = total3 = zeros(block, lanes)
        for n in range(count):
            row = load(rows, (place + n) * channels + first, lanes)
            total0 = multiply_add(at(block, n), row, total0)
            total1 = multiply_add(at(block, KEYS + n), row, total1)
            total2 = multiply_add(at(block, 2 * KEYS + n), row, total2)
            total3 = multiply_add(at(block, 3 * KEYS + n), row, total3)
        spot = where * channels + first
        store(flat, spot, load(flat, spot, lanes) + total0)
        if where + 1 < stop:
            store(flat, spot + channels, load(flat, spot + channels, lanes) + total1)
        if where + 2 < stop:
            store(flat, spot + 2 * channels, load(flat, spot + 2 * channels, lanes) + total2)
        if where + 3 < stop:
            store(flat, spot + 3 * channels, load(flat, spot + 3 * channels, lanes) + total3)


@inlined
def _sum_head(
    kernel, lanes, query, key, value, weight, bandwidth, constant, form, causal, each, start, stop, sums, total,
    shift,
):  # fmt: skip
    columns, dims = key.shape
    # apart: arrays in a tuple are counted at every use
    room = make_room(dims, query)
    keys, keys_rising, keys_falling, norms, weights, rows, limits, block = room
    points = make_points(kernel, query[start:stop], key, 1.0 / bandwidth)
    tiles, rising, falling, _, _, far, _, row, _ = points
    reach, rate = query.dtype.type(bandwidth), query.dtype.type(1.0 / bandwidth)
    constant = query.dtype.type(constant)
    values, out = value.reshape(value.size), sums.reshape(sums.size)
    channels = value.shape[1]
    lifted = shift.shape[0] > 0
    nothing = query.dtype.type(-np.inf if value_of(kernel) in LIFTED else 0.0)
    for first in range(0, columns, KEYS):
        count = min(KEYS, columns - first)
        brought, whole = False, False
        for m in range(start, stop, QUERIES):
            most, fewest = set_limits(m, stop, first, columns, causal, each, limits)
            if most == 0:
                continue
            if not brought:
                brought = True
                whole = bring_keys(key, points, weight, first, count, room)
            place = (m - start) * dims
            fill(
                kernel, tiles, rising, falling, far, place, keys, keys_rising, keys_falling, dims, reach, rate, form,
                block,
            )  # fmt: skip
            bring_norms(row, m - start, rows)
            finish(kernel, block, rate, constant, rows, norms)
            if not whole or fewest < KEYS:
                hide(block, limits, weights, nothing)
            if value_of(kernel) in LIFTED:
                if lifted:
                    _lift(block, m, stop, shift, total, sums)
                else:
                    for i in range(QUERIES):
                        exponentials(block, i, query.dtype.type(0.0))
            for i in range(min(QUERIES, stop - m)):
                total[m + i] += total_of(block, i)
            _add_rows(lanes, block, most, values, first, channels, out, m, stop)


def _entries(version: str):
    """The function that Python calls, compiled once for a kernel and kept on disk; `version` is part of its key."""

    @entry
    def sum_heads(
        kernel, lanes, query, key, value, weight, bandwidth, constant, form, causal, each, first, last, start,
        stop, sums, total, shift,
    ):  # fmt: skip
        """Fill `sums (P, M, C)`, `total (P, M)` and `shift (P, M)` for queries `start ... stop - 1` of some problems.

        These are `first ... last - 1`. `weight (P, N)` and `shift` have no columns where there are none. The channels
        are a multiple of the `lanes`. `form` are the numbers of a kernel made by the user, see cpu_forms.py.
        """
        version  # noqa: B018
        for p in range(first, last):
            sums[p, start:stop] = 0.0
            total[p, start:stop] = 0.0
            if shift.shape[1]:
                shift[p, start:stop] = -np.inf
            _sum_head(
                kernel, lanes, query[p], key[p], value[p], weight[p], bandwidth[p], constant, form, causal,
                each, start, stop, sums[p], total[p], shift[p],
            )  # fmt: skip

    return sum_heads


sum_heads = _entries(digest(__file__, "cpu_blocks", "cpu_forms", "cpu_pairs"))
