"""Stands in for compiled kernels where Triton interprets: launched by addresses, as those of a recorded call are."""

import contextlib
import ctypes
import importlib
import math
from unittest import mock

import torch

KERNELS = {
    "plan": ("survey_kernel", "nodes_kernel"),
    "locate": ("locate_kernel",),
    "collect": ("collect_kernel", "count_kernel", "weighted_count_kernel"),
    "matrix": ("matrix_kernel",),
    "transform": ("transform_kernel", "riesz_kernel"),
    "read": ("read_kernel",),
    "walk": ("largest_kernel", "bends_kernel", "walk_kernel", "levels_kernel", "riesz_levels_kernel"),
    "near": ("near_kernel",),
    "slopes": ("reference_kernel", "prepare_kernel"),
    "steep": ("steep_kernel", "tilt_kernel"),
}


class Compiled:
    """A kernel with its constants, which takes tensors, or the addresses of such as it was first launched with."""

    # no launcher in C
    run = None
    # names of what was launched by addresses
    launched: list[str]

    def __init__(self, kernel, arguments, constants):
        self._kernel, self._constants = kernel, constants
        self._kinds = [(part.shape, part.dtype) if isinstance(part, torch.Tensor) else None for part in arguments]

    def __getitem__(self, programs):
        def launch(*arguments, stream=None):
            if stream is not None:
                self.launched.append(self._kernel.__name__)
            # the constants come behind
            given = zip(arguments, self._kinds, strict=False)
            self.start(programs, [_at(part, *kind) if kind and stream is not None else part for part, kind in given])

        return launch

    def start(self, programs, arguments):
        if self._kernel.__name__ == "nodes_kernel":
            # in the interpreter torch sorts, which is no part of a recorded call
            line, used = arguments[0], arguments[4]
            line[..., :used] = line[..., :used].sort(-1).values
        self._kernel[programs](*arguments, **self._constants)


def _at(address, shape, dtype):
    memory = (ctypes.c_byte * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Jit:
    """A kernel that is compiled at every launch of its own."""

    def __init__(self, kernel):
        self._kernel = kernel
        self.__name__, self.arg_names = kernel.__name__, kernel.arg_names

    def __getitem__(self, programs):
        def launch(*arguments, **constants):
            made = Compiled(self._kernel, arguments, constants)
            made.start(programs, arguments)
            return made

        return launch


@contextlib.contextmanager
def stand_ins():
    """Within this kernels are compiled; gives the names of those that were launched by addresses."""
    from sortattn.ops.grid.gpu import launch

    Compiled.launched = []
    launch._launches.cache_clear()
    with contextlib.ExitStack() as stack:
        for name, kernels in KERNELS.items():
            module = importlib.import_module(f"sortattn.ops.grid.gpu.{name}")
            for kernel in kernels:
                stack.enter_context(mock.patch.object(module, kernel, Jit(getattr(module, kernel))))
        stack.enter_context(mock.patch.multiple(launch, JITFunction=Jit, CompiledKernel=Compiled))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", create=True, return_value=0))
        yield Compiled.launched
    launch._launches.cache_clear()
