"""Calls on the CPU that take the way of CUDA devices, with the kernels of the tiled backend emulated."""

import contextlib

import torch

import sortattn
from sortattn.ops import repeated
from sortattn.ops.tiled import cuda, cuda_kernels, short

from ..cases import Shape, draw, leaves
from .emulator import EmulatedKernel


def emulated(find):
    """The kernels that `find` finds, for the CPU."""

    def found(*key):
        kernel = find(*key)
        return EmulatedKernel(kernel.source, kernel.entry, kernel.defines, "tiled.h")

    return found


def emulate(monkeypatch) -> None:
    """Tiled calls go as on a device, up to the launch."""
    for module, name in (
        (cuda_kernels, "kernel_of"),
        (cuda_kernels, "survey_of"),
        (cuda_kernels, "chunks_of"),
        (short, "kernel_of"),
    ):
        monkeypatch.setattr(module, name, emulated(getattr(module, name)))
    for module in (cuda, short):
        monkeypatch.setattr(module, "on", lambda _: contextlib.nullcontext())
    # what a test leaves behind would have its kernels
    monkeypatch.setattr(repeated, "_known", repeated._Known())
    monkeypatch.setattr(repeated, "stream_on", lambda device: 0)
    monkeypatch.setattr(cuda_kernels, "room_of", lambda device: 227 << 10)
    monkeypatch.setattr(cuda_kernels, "processors_of", lambda device: 0)
    monkeypatch.setattr(cuda_kernels, "begins_early", lambda device: False)
    monkeypatch.setattr(cuda_kernels, "walks", lambda device: False)
    monkeypatch.setattr(cuda, "serves", lambda query, value, kernel: kernel in cuda_kernels.NAMES)


def check_sides_of_steps() -> None:
    """Gradients of `add_bump` are those of float64 where a query is at the edge of a key's window but for rounding."""
    _, key, value = draw(Shape((1,), 40, 70, 3, 8), torch.float32)
    # 1.3 is no number of float32
    query = key[:, :40] + 1.3
    gradients = []
    for dtype, backend in ((torch.float32, "tiled"), (torch.float64, "reference")):
        points = leaves(*(part.to(dtype) for part in (query, key, value)))
        output = sortattn.kernel_attention(*points, "add_bump", bandwidth=1.3, backend=backend)
        gradients.append(torch.autograd.grad(output.square().sum(), points))
    for got, wanted in zip(*gradients, strict=True):
        assert (got - wanted).norm() < 1e-5 * wanted.norm()
