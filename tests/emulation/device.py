"""Calls on the CPU that take the way of CUDA devices, with the kernels of the tiled backend emulated."""

import contextlib

from sortattn.ops.tiled import cuda, short

from .emulator import EmulatedKernel


def emulated(find):
    """The kernels that `find` finds, for the CPU."""

    def found(*key):
        kernel = find(*key)
        return EmulatedKernel(kernel.source, kernel.entry, kernel.defines, "tiled.h")

    return found


def emulate(monkeypatch) -> None:
    """Tiled calls go as on a device, up to the launch."""
    for module, name in ((cuda, "kernel_of"), (cuda, "survey_of"), (short, "kernel_of")):
        monkeypatch.setattr(module, name, emulated(getattr(module, name)))
    for module in (cuda, short):
        monkeypatch.setattr(module, "on", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "serves", lambda query, value, kernel: kernel in cuda.NAMES)
