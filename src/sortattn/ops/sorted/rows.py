"""Compiled loops over the rows of one head."""

import numpy as np
from numba import njit

# sums over channels may be taken in any order, which is then the same for every row and every number of threads
_RULES = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract"}}
_entry = njit(cache=True, **_RULES)


@_entry
def collect_rows(factors, rows, out):
    """`out (K, C)`: the rows `(N, C)`, multiplied with factors `(K, N)` and added up."""
    count, channels = rows.shape
    for k in range(factors.shape[0]):
        total = np.zeros(channels)
        for n in range(count):
            factor = np.float64(factors[k, n])
            for c in range(channels):
                total[c] += factor * np.float64(rows[n, c])
        out[k] = total


@_entry
def project_rows(vectors, rows, out):
    """`out (K, N)`: inner products of the vectors `(K, C)` with the rows `(N, C)`."""
    count, channels = rows.shape
    for k in range(vectors.shape[0]):
        for n in range(count):
            total = 0.0
            for c in range(channels):
                total += np.float64(vectors[k, c]) * np.float64(rows[n, c])
            out[k, n] = total


@_entry
def spread_rows(factors, vectors, start, out):
    """`out (N, C)`: the rows `start (N, C)`, to each of which a combination of the vectors `(K, C)` is added."""
    count, channels = start.shape
    total = np.empty(channels)
    for n in range(count):
        for c in range(channels):
            total[c] = start[n, c]
        for k in range(vectors.shape[0]):
            factor = np.float64(factors[k, n])
            for c in range(channels):
                total[c] += factor * np.float64(vectors[k, c])
        for c in range(channels):
            out[n, c] = total[c]


@_entry
def all_finite(bits, exponent):
    """Whether none of the numbers with these bits is infinite or NaN, whose exponents have all bits set."""
    largest = exponent & ~exponent
    # among integers: for those the compiler makes vectors of the loop
    for n in range(bits.shape[0]):
        largest = max(largest, bits[n] & exponent)
    return largest < exponent


@njit(**_RULES)
def _inverse(total, unfit, floor, tiny):
    """One over a total, as in `normalise.reciprocal`; NaN in an unfit head."""
    if unfit:
        return total * np.nan
    if floor > 0.0:
        return 1.0 / (floor if total < floor else total)
    return 0.0 if abs(total) < tiny else 1.0 / total


@_entry
def divide_rows(sums, totals, unfit, floor, tiny, out):
    """`out (M, C)`: the sums of every row divided by its total, see `quotient`."""
    number, channels = sums.shape
    real = sums.dtype.type
    for m in range(number):
        factor = real(_inverse(totals[m], unfit, floor, tiny))
        for c in range(channels):
            out[m, c] = sums[m, c] * factor


@_entry
def divide_rows_backward(grads, sums, totals, unfit, floor, tiny, by_sums, by_totals):
    """The gradients of the sums `(M, C)` and of their totals `(M,)` from those of the quotients."""
    number, channels = sums.shape
    real = sums.dtype.type
    for m in range(number):
        factor = real(_inverse(totals[m], unfit, floor, tiny))
        product = 0.0
        for c in range(channels):
            product += np.float64(grads[m, c]) * np.float64(sums[m, c] * factor)
            by_sums[m, c] = grads[m, c] * factor
        by_totals[m] = 0.0 if floor > 0.0 and totals[m] < floor else -product * np.float64(factor)
