"""Compiled loops over the rows of one head."""

import numpy as np
from numba import njit

# sums over channels may be taken in any order, which is then the same for every row and every number of threads
_entry = njit(nogil=True, error_model="numpy", cache=True, fastmath={"reassoc", "contract"})


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
