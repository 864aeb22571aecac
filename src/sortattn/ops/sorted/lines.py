"""Where to find the walker of a device, and what it is given."""

from types import ModuleType

from torch import Tensor

# one for every problem, `(P,)`, or the same for all
Bandwidth = Tensor | float


def walker(device: str) -> ModuleType:
    """The module that sorts and walks on this type of device; imported on first use, as it brings its compiler.

    Its `points(points, order)` holds points `(P, N, D)` and their argsort `(P, D, N)` in the form that it walks along.
    Without an argsort, or if it does not keep those of a forward pass (`KEEPS_ORDER`), it sorts. Bare tensors are meant
    for a GPU.
    """
    if device in ("cuda", "meta"):
        from . import cuda

        return cuda
    from . import cpu

    return cpu
