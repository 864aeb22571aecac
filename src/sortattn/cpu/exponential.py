"""e^x in the working precision, of a number or of a vector of them."""

import math

import numpy as np
from numba import types
from numba.extending import overload

from .compiled import inlined
from .simd import FOUR, Vector, each_exp, floor, lane, larger, positive, power_of_two, smaller, splat, spread

_LOG2E = np.float32(1.4426950408889634)
# the logarithm of two in two parts, the first short enough that a multiple of it is exact
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_FARTHEST = np.float32(87.0)


@inlined
def _exp32(x):
    """e^x of a float32 vector to about one unit in the last place; zero below e^-87, and where x is no number."""
    bounded = smaller(larger(x, spread(-_FARTHEST, x)), spread(_FARTHEST, x))
    power = floor(bounded * spread(_LOG2E, x) + spread(np.float32(0.5), x))
    r = bounded - power * spread(_LN2_HIGH, x) - power * spread(_LN2_LOW, x)
    p = spread(np.float32(1.9875691500e-4), x)
    p = p * r + spread(np.float32(1.3981999507e-3), x)
    p = p * r + spread(np.float32(8.3334519073e-3), x)
    p = p * r + spread(np.float32(4.1665795894e-2), x)
    p = p * r + spread(np.float32(1.6666665459e-1), x)
    p = p * r + spread(np.float32(5.0000001201e-1), x)
    p = p * r * r + r + spread(np.float32(1.0), x)
    return positive(x + spread(_FARTHEST, x), p * power_of_two(power), spread(np.float32(0.0), x))


def exp(x):
    """e^x in the type of `x`."""
    return math.exp(x)


@overload(exp)
def _exp_compiled(x):
    if isinstance(x, Vector):
        return (lambda x: _exp32(x)) if x.scalar == types.float32 else (lambda x: each_exp(x))
    if x == types.float32:
        return lambda x: lane(_exp32(splat(x, FOUR)), 0)
    return lambda x: math.exp(x)
