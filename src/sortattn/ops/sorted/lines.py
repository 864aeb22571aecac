"""What the walkers of all devices have in common: points with their order, and where to find the walker."""

from types import ModuleType
from typing import NamedTuple

from torch import Tensor


class Points(NamedTuple):
    """Points `(P, N, D)` and their argsort `(P, D, N)` along every dimension."""

    points: Tensor
    order: Tensor


def walker(device: str) -> ModuleType:
    """The module that sorts and walks on this type of device; imported on first use, as it brings its compiler."""
    if device == "cuda":
        from . import cuda

        return cuda
    from . import cpu

    return cpu
