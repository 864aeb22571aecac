"""e^x in the walker's working precision."""

import math

import numpy as np
from numba import types
from numba.extending import overload

from .compiled import compiled
from .simd import float_from_bits

_LOG2E = np.float32(1.4426950408889634)
# the logarithm of two in two parts, the first short enough that a multiple of it is exact
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)


@compiled
def _exp32(x):
    """e^x in float32 to about one unit in the last place, written so that LLVM vectorises it; zero below e^-87."""
    bounded = min(max(x, np.float32(-87.0)), np.float32(87.0))
    power = np.floor(bounded * _LOG2E + np.float32(0.5))
    r = bounded - power * _LN2_HIGH - power * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    scale = float_from_bits(np.int32((np.int32(power) + np.int32(127)) << np.int32(23)))
    return p * scale if x > np.float32(-87.0) else np.float32(0.0)


def exp(x):
    """e^x in the type of `x`."""
    return math.exp(x)


@overload(exp)
def _exp_compiled(x):
    if x == types.float32:
        return lambda x: _exp32(x)
    return lambda x: math.exp(x)
