"""Launches that take less time on the host.

Triton looks at every argument of every launch to find the program compiled for it. In calls of one kind, with inputs of
the same shapes, types and alignment, that is the same program every time: it is kept with the constants it was given.
"""

import functools

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction


def launches(*inputs) -> dict:
    """What is known of the launches of calls with such inputs: nothing at first."""
    return _launches(*(_kind(part) if isinstance(part, Tensor) else part for part in inputs))


@functools.lru_cache(maxsize=256)
def _launches(*kind) -> dict:
    return {}


def _kind(part: Tensor) -> tuple:
    # Triton loads more at a time from addresses that 16 divides
    return part.shape, part.dtype, part.get_device(), part.data_ptr() % 16


def quick(kernel: JITFunction, known: dict | None, *which):
    """The kernel, for a launch as `kernel[programs](...)`; `which` of several that a call makes."""
    if known is None or not isinstance(kernel, JITFunction):
        return kernel
    return _Quick(kernel, known, (kernel.__name__, *which))


class _Quick:
    def __init__(self, kernel: JITFunction, known: dict, key: tuple):
        self._kernel, self._known, self._key = kernel, known, key

    def __getitem__(self, programs: tuple[int, ...]):
        found = self._known.get(self._key)
        if found is None:
            return lambda *arguments, **constants: self._first(programs, arguments, constants)
        run, rest = found
        return lambda *arguments, **constants: run(*arguments, *rest)

    def _first(self, programs: tuple[int, ...], arguments: tuple, constants: dict) -> None:
        compiled = self._kernel[programs](*arguments, **constants)
        if isinstance(compiled, CompiledKernel):
            rest = tuple(constants[name] for name in self._kernel.arg_names[len(arguments) :])
            self._known[self._key] = compiled[(*programs, 1, 1)[:3]], rest
