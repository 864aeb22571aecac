"""Sorting one dimension: the paper's argsort sigma."""

import math

import numpy as np

from ...cpu.compiled import compiled
from ...cpu.memory import seen_as, zeroed
from ...cpu.simd import at, float_from_bits, put

# the radix sort: four passes over few bins cost less than three over many, which do not stay in the first-level cache
_BITS = 8
_PASSES = 4
_BINS = 1 << _BITS
_MASK = np.uint64(_BINS - 1)
_LOW = np.uint64(0xFFFFFFFF)
_TOP = np.uint32(0x80000000)

# the lattice sort: cells, as two digits, and what is left of 32 bits beside one of them for an index
_DIGIT = 10
_DIGITS = 1 << _DIGIT
_REST = 32 - _DIGIT
# so few points are sorted by insertion alone
_FEW = 48
# points that are moved, for each one there is, before the lattice is given up
_PATIENCE = 2


@compiled
def transpose_columns(points, first, columns, out):
    """`out[d, n] = points[n, first + d]` for `columns` columns.

    -0.0 becomes 0.0, so that the two tie; so does what is no finite number, which a walk would not come to the end of.
    """
    zero = points.dtype.type(0.0)
    for n in range(points.shape[0]):
        for d in range(columns):
            point = points[n, first + d]
            out[d, n] = point + zero if point - point == zero else zero


@compiled
def sort_column(values, pairs, spare, order, ordered):
    """Write the stable argsort of the float32 `values` to `order`, and them in that order to `ordered`.

    `pairs` and `spare` are work space of the same length.
    """
    count = order.shape[0]
    if count <= _FEW:
        for n in range(count):
            order[n] = np.int32(n)
        _insertion_sort(values, order, ordered, count * count)
    elif not _lattice_sort(values, seen_as(pairs, np.uint32), seen_as(spare, np.uint32), order, ordered):
        _radix_sort(values, pairs, spare, order, ordered)


@compiled
def _lattice_sort(values, cells, half, order, ordered):
    """Sort by the cells of an even lattice, in two passes, and mend by insertion what shares a cell.

    Gives up, and returns False, where points crowd in few cells.
    """
    count = order.shape[0]
    least, most = _extremes(values, count)
    scale = np.float32(_DIGITS * _DIGITS - 1) / (most - least)
    if not (0.0 < scale < math.inf and count <= 1 << _REST):
        return False
    for n in range(count):
        cells[n] = np.uint32(np.int32((values[n] - least) * scale))
    low, high = zeroed(_DIGITS, np.uint32), zeroed(_DIGITS, np.uint32)
    for n in range(count):
        low[cells[n] & np.uint32(_DIGITS - 1)] += np.uint32(1)
        high[cells[n] >> np.uint32(_DIGIT)] += np.uint32(1)
    _first_places(low)
    _first_places(high)
    for n in range(count):
        digit = cells[n] & np.uint32(_DIGITS - 1)
        place = low[digit]
        low[digit] = place + np.uint32(1)
        half[place] = cells[n] >> np.uint32(_DIGIT) << np.uint32(_REST) | np.uint32(n)
    for n in range(count):
        digit = half[n] >> np.uint32(_REST)
        place = high[digit]
        high[digit] = place + np.uint32(1)
        order[place] = np.int32(half[n] & np.uint32((1 << _REST) - 1))
    return _insertion_sort(values, order, ordered, _PATIENCE * count)


@compiled
def _insertion_sort(values, order, ordered, patience):
    """Sort values that are nearly in `order`; gives up, and returns False, when more than `patience` are moved."""
    last = np.float32(-math.inf)
    moved = 0
    for n in range(order.shape[0]):
        index = at(order, n)
        value = at(values, np.int64(index))
        put(ordered, n, value)
        if value >= last:
            last = value
            continue
        place = n
        while place > 0 and ordered[place - 1] > value:
            ordered[place], order[place] = ordered[place - 1], order[place - 1]
            place -= 1
        ordered[place], order[place] = value, index
        moved += n - place
        if moved > patience:
            return False
    return True


@compiled
def _extremes(values, count):
    """The smallest and the largest value, found among integers: for those the compiler makes vectors of the loop."""
    bits = seen_as(values, np.int32)
    least, most = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for n in range(count):
        key = np.int32(bits[n] ^ ((bits[n] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        least, most = min(least, key), max(most, key)
    return _float_of(least), _float_of(most)


@compiled
def _float_of(key):
    return float_from_bits(np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@compiled
def _first_places(counts):
    """Turn how many there are of each digit into where the first of them goes."""
    total = np.uint32(0)
    for digit in range(counts.shape[0]):
        here = counts[digit]
        counts[digit] = total
        total += here


@compiled
def _radix_sort(values, pairs, spare, order, ordered):
    """Sort any values: least significant digit first, on 32-bit patterns with the index packed beside them.

    Patterns are taken relative to the smallest, so points that share an exponent need fewer passes.
    """
    count = order.shape[0]
    bits = seen_as(values, np.uint32)
    smallest = np.uint32(0xFFFFFFFF)
    for n in range(count):
        # a float's bits sort as an unsigned integer once negative ones are flipped whole and others in the sign
        pattern = bits[n] ^ (np.uint32(np.int32(bits[n]) >> 31) | _TOP)
        pairs[n] = np.uint64(pattern)
        smallest = min(smallest, pattern)
    histogram = zeroed((_PASSES, _BINS), np.uint32)
    for n in range(count):
        key = pairs[n] - np.uint64(smallest)
        pairs[n] = (key << np.uint64(32)) | np.uint64(n)
        for digit in range(_PASSES):
            histogram[digit, (key >> np.uint64(digit * _BITS)) & _MASK] += np.uint32(1)
    for digit in range(_PASSES):
        start = histogram[digit]
        if start[0] == count:
            continue
        _first_places(start)
        shift = np.uint64(32 + digit * _BITS)
        for n in range(count):
            pair = pairs[n]
            b = (pair >> shift) & _MASK
            place = start[b]
            spare[place] = pair
            start[b] = place + np.uint32(1)
        pairs, spare = spare, pairs
    for n in range(count):
        index = np.int32(pairs[n] & _LOW)
        order[n] = index
        ordered[n] = values[index]
