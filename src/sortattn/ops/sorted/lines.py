"""Where to find the walker of a device, and what it is given."""

from types import ModuleType

import torch
from torch import Tensor

# one for every problem, `(P,)`, or the same for all
Bandwidth = Tensor | float


def narrow(dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
    """The macros of half.cu, for what has 16 bits and is read as it is."""
    return (("NARROW", 1), ("BFLOAT", int(dtype == torch.bfloat16)), ("LONG", 0)) if dtype.itemsize == 2 else ()


def walker(device: str) -> ModuleType:
    """The module that sorts and walks on this type of device; imported on first use, as it brings its compiler.

    Its `points(points, order)` holds points `(P, N, D)` and their argsort `(P, D, N)` in the form that it walks along.
    Without an argsort, or if it does not keep those of a forward pass (`KEEPS_ORDER`), it sorts. If it has an
    `attention`, that does without gradients what takes several steps else. Bare tensors are meant for a GPU.
    """
    if device in ("cuda", "meta"):
        from . import cuda

        return cuda
    from . import cpu

    return cpu
