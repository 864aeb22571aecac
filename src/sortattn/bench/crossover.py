"""From which N on a kernel is faster than softmax."""

import math
from collections.abc import Mapping


def crossover(softmax: Mapping[int, float], kernel: Mapping[int, float]) -> float | None:
    """The N from which on `kernel` is faster, given the times of both by N; interpolated in the log-log plot.

    Zero if it is faster at every size, None if it is still slower at the largest.

    >>> crossover({512: 1.0, 1024: 4.0}, {512: 2.0, 1024: 4.0})
    1024.0
    >>> crossover({512: 1.0, 2048: 16.0}, {512: 2.0, 2048: 8.0})
    1024.0
    """
    sizes = sorted(softmax.keys() & kernel.keys())
    # above zero where the kernel is slower
    lags = [math.log(kernel[n] / softmax[n]) for n in sizes]
    slower = [index for index, lag in enumerate(lags) if lag > 0]
    if not sizes or (slower and slower[-1] == len(sizes) - 1):
        return None
    if not slower:
        return 0.0
    last = slower[-1]
    share = lags[last] / (lags[last] - lags[last + 1])
    return round(sizes[last] * (sizes[last + 1] / sizes[last]) ** share, 6)


def describe(softmax: Mapping[int, float], kernel: Mapping[int, float]) -> str:
    """The crossover in words.

    >>> describe({512: 1.0}, {512: 0.5})
    'faster at every N measured, from 512'
    """
    sizes = sorted(softmax.keys() & kernel.keys())
    point = crossover(softmax, kernel)
    if not sizes:
        return "not measured"
    if point is None:
        return f"slower up to N = {sizes[-1]:,}, the largest measured"
    return f"faster from N = {point:,.0f}" if point else f"faster at every N measured, from {sizes[0]:,}"
