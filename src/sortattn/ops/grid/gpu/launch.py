"""Launches that take less time on the host.

Triton looks at every argument of every launch to find the program compiled for it. In calls of one kind, with inputs of
the same shapes, types and alignment, that is the same program every time: it is kept with the constants it was given. A
call that is nothing but such launches is recorded, see `record`.
"""

import functools
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from ....cuda.launch import Kernel
from ....cuda.support import trouble
from . import record


class Known:
    """What is known of calls of one kind: programs by kernel, and the whole call once it is recorded.

    Of a tensor that is given twice, as query and as key say, a recorded call does not tell which of the two a kernel
    reads: calls are recorded by which of their inputs are the same.
    """

    def __init__(self):
        self.programs: dict[tuple, tuple] = {}
        self._recorded: dict[tuple[int, ...], record.Recorded | None] = {}
        self._calls: Counter[tuple[int, ...]] = Counter()

    def play(self, inputs: list[Tensor], call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The outputs of a call with these inputs: of the third of its kind as the second was recorded."""
        places = [part.data_ptr() for part in inputs]
        same = tuple(map(places.index, places))
        recorded = self._recorded.get(same)
        if recorded is not None:
            return recorded.play(inputs)
        self._calls[same] += 1
        if self._calls[same] != 2:
            return call()
        with record.Recorder() as recorder:
            outs = call()
            self._recorded[same] = recorder.recorded(inputs, outs)
        return outs


def launches(*inputs) -> Known:
    """What is known of calls with such inputs: nothing at first."""
    return _launches(*(_kind(part) if isinstance(part, Tensor) else part for part in inputs))


@functools.lru_cache(maxsize=256)
def _launches(*kind) -> Known:
    return Known()


def _kind(part: Tensor) -> tuple:
    # Triton loads more at a time from addresses that 16 divides
    return part.shape, part.dtype, part.get_device(), part.data_ptr() % 16


def quick(kernel: JITFunction, known: Known | None, *which):
    """The kernel, for a launch as `kernel[programs](...)`; `which` of several that a call makes."""
    if known is None or not isinstance(kernel, JITFunction):
        record.missed()
        return kernel
    return _Quick(kernel, known.programs, (kernel.__name__, *which))


class _Quick:
    def __init__(self, kernel: JITFunction, known: dict, key: tuple):
        self._kernel, self._known, self._key = kernel, known, key

    def __getitem__(self, programs: tuple[int, ...]):
        found = self._known.get(self._key)
        if found is None:
            return lambda *arguments, **constants: self._first(programs, arguments, constants)
        return lambda *arguments, **constants: self._again(*found, arguments)

    def _first(self, programs: tuple[int, ...], arguments: tuple, constants: dict) -> None:
        record.missed()
        compiled = self._kernel[programs](*arguments, **constants)
        if isinstance(compiled, CompiledKernel):
            programs = (*programs, 1, 1)[:3]
            rest = tuple(constants[name] for name in self._kernel.arg_names[len(arguments) :])
            self._known[self._key] = compiled, programs, compiled[programs], rest

    @staticmethod
    def _again(compiled, programs: tuple[int, int, int], run, rest: tuple, arguments: tuple) -> None:
        run(*arguments, *rest)
        record.launched(compiled, programs, (*arguments, *rest))


@functools.cache
def compiles(device: torch.device) -> bool:
    """Whether there can be kernels that are not Triton's on a device."""
    return device.type == "cuda" and trouble(device.index) is None


def direct(kernel: Kernel, known: Known | None) -> Callable:
    """A kernel that is not Triton's, called as it is, so that the launch is part of a recorded call."""

    def launch(programs: tuple[int, ...], block: int, *arguments, **options) -> None:
        kernel(programs, block, *arguments, **options)
        if known is None:
            record.missed()
        record.launched(_Direct(kernel, block, options), programs, arguments)

    return launch


class _Direct:
    """In place of a compiled kernel of Triton, see `record.straight`."""

    run = None

    def __init__(self, kernel: Kernel, block: int, options: dict):
        self._kernel, self._block, self._options = kernel, block, options

    def __getitem__(self, programs: tuple[int, ...]):
        # on the current stream, which is that of the others
        return lambda *arguments, stream: self._kernel(programs, self._block, *arguments, **self._options)
