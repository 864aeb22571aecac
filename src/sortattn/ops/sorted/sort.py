"""Sorting one dimension: the paper's argsort sigma."""

import numpy as np

from .compiled import compiled

_BITS = 11
_PASSES = 3
_BINS = 1 << _BITS
_MASK = np.uint64(_BINS - 1)
_LOW = np.uint64(0xFFFFFFFF)
_TOP = np.uint32(0x80000000)


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
def radix_sort(values, pairs, spare, order):
    """Write the stable argsort of the float32 `values` to `order`; `pairs` and `spare` are work space of its length.

    Least significant digit first, on 32-bit patterns with the index packed beside them. Patterns are taken relative
    to the smallest, so points that share an exponent (an offset of 100, say) need fewer passes.
    """
    count = order.shape[0]
    bits = values.view(np.uint32)
    smallest = np.uint32(0xFFFFFFFF)
    for n in range(count):
        # a float's bits sort as an unsigned integer once negative ones are flipped whole and others in the sign
        pattern = bits[n] ^ (np.uint32(np.int32(bits[n]) >> 31) | _TOP)
        pairs[n] = np.uint64(pattern)
        smallest = min(smallest, pattern)
    histogram = np.zeros((_PASSES, _BINS), np.uint32)
    for n in range(count):
        key = pairs[n] - np.uint64(smallest)
        pairs[n] = (key << np.uint64(32)) | np.uint64(n)
        for digit in range(_PASSES):
            histogram[digit, (key >> np.uint64(digit * _BITS)) & _MASK] += np.uint32(1)
    for digit in range(_PASSES):
        start = histogram[digit]
        if start[0] == count:
            continue
        total = np.uint32(0)
        for b in range(_BINS):
            here = start[b]
            start[b] = total
            total += here
        shift = np.uint64(32 + digit * _BITS)
        for n in range(count):
            pair = pairs[n]
            b = (pair >> shift) & _MASK
            place = start[b]
            spare[place] = pair
            start[b] = place + np.uint32(1)
        pairs, spare = spare, pairs
    for n in range(count):
        order[n] = np.int32(pairs[n] & _LOW)
