"""The numbers of a kernel where the points are."""

import operator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..cuda.constants import Constant, capturing
from ..kernels import KERNELS, Kernel
from .direct import plain


class _Copy(NamedTuple):
    """The numbers of a kernel on a device, and the tensors they are a copy of, with their versions."""

    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    numbers: Constant[Tensor]

    def holds(self, tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> bool:
        return versions == self.versions and all(map(operator.is_, tensors, self.tensors))


# by kernel and CUDA device
_copies: WeakKeyDictionary[Kernel, dict[torch.device, _Copy]] = WeakKeyDictionary()


def parameters_at(query: Tensor, kernel: Kernel) -> Tensor | None:
    """The `parameters()` of a kernel on the device of the queries; None for the named ones."""
    if kernel.name in KERNELS:
        return None
    # here and not in an operator: a gradient goes back to where the parameters are only if somebody asks for it; and
    # before a look at the kernel's attributes, which not every compiler can trace
    if not query.is_cuda or not plain(query):
        return _moved(kernel, query)
    tensors = tuple(part for part in vars(kernel).values() if isinstance(part, Tensor))
    if not plain(*tensors) or any(part.requires_grad or part.is_inference() or part.is_cuda for part in tensors):
        return _moved(kernel, query)
    # a copy waits for the device, and no graph can hold it: one is made as often as the tensors change
    versions = tuple(part._version for part in tensors)
    copies = _copies.setdefault(kernel, {})
    found = copies.get(query.device)
    if found is None or not found.holds(tensors, versions):
        numbers = Constant(lambda: _moved(kernel, query), lambda made: [made])
        if found is not None and not capturing() and found.numbers.read().shape == numbers.read().shape:
            # graphs that were captured with it see the change
            with torch.inference_mode(False), torch.no_grad():
                found.numbers.read().copy_(numbers.read())
            numbers = found.numbers
        found = copies[query.device] = _Copy(tensors, versions, numbers)
    return found.numbers.read()


def _moved(kernel: Kernel, query: Tensor) -> Tensor | None:
    parameters = kernel.parameters()
    return None if parameters is None else parameters.to(query.device)
