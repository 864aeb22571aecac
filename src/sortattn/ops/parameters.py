"""The numbers of a kernel where the points are."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..kernels import KERNELS, Kernel
from .direct import plain

# the numbers of kernels on CUDA devices, and of which tensors in which state they are a copy
_copies: WeakKeyDictionary[Kernel, tuple[tuple, Tensor]] = WeakKeyDictionary()


def parameters_at(query: Tensor, kernel: Kernel) -> Tensor | None:
    """The `parameters()` of a kernel on the device of the queries; None for the named ones."""
    if kernel.name in KERNELS:
        return None
    # here and not in an operator: a gradient goes back to where the parameters are only if somebody asks for it; and
    # before a look at the kernel's attributes, which not every compiler can trace
    if not query.is_cuda or not plain(query):
        return _moved(kernel, query)
    tensors = [part for part in vars(kernel).values() if isinstance(part, Tensor)]
    if not plain(*tensors) or any(part.requires_grad or part.is_inference() for part in tensors):
        return _moved(kernel, query)
    # a copy waits for the device, and no graph can hold it: one is made as often as the tensors change
    state = query.device, *((id(part), part._version) for part in tensors)
    found = _copies.get(kernel)
    if found is None or found[0] != state:
        # for calls outside of inference mode too
        with torch.inference_mode(False), torch.no_grad():
            found = _copies[kernel] = state, _moved(kernel, query)
    return found[1]


def _moved(kernel: Kernel, query: Tensor) -> Tensor | None:
    parameters = kernel.parameters()
    return None if parameters is None else parameters.to(query.device)
