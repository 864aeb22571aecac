"""Sorted calls on the CPU that take the way of CUDA devices, with emulated kernels."""

import contextlib

import torch

import sortattn
from sortattn.cuda import launch
from sortattn.ops import repeated
from sortattn.ops.sorted import api, backend, cuda, cuda_coil, cuda_reel, room, sign

from ..cases import BOX, CASES
from .emulator import EmulatedKernel

KERNELS = {
    "add_riesz": sortattn.KERNELS["add_riesz"],
    "add_laplace": sortattn.KERNELS["add_laplace"],
    "add_bump": sortattn.KERNELS["add_bump"],
    "matern32": CASES["matern32"].kernel,
    "box": BOX.kernel,
}


def emulate(monkeypatch):
    """Sorted calls go as on a device, a small one; its walker."""
    monkeypatch.setattr(launch, "Kernel", EmulatedKernel)
    monkeypatch.setattr(room, "device", lambda device: room.Device(1, 50 << 20, 227 << 10))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    # what a test leaves behind would have its kernels
    monkeypatch.setattr(repeated, "_known", repeated._Known())
    monkeypatch.setattr(repeated, "stream_on", lambda device: 0)
    for user in (api, backend, sign):
        monkeypatch.setattr(user, "walker", lambda device: cuda)
    return cuda


def wind(monkeypatch, slopes=(False, True)):
    """The same with lines that are wound however short they are; the cells of those of passes with such `slopes`."""
    emulate(monkeypatch)
    monkeypatch.setattr(cuda_coil, "_LEAST", 1)
    monkeypatch.setattr(cuda_reel, "_LEAST", 1)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    cells, wound = [], cuda_coil.wind

    def noted(*arguments, **options):
        windings = wound(*arguments, **options)
        if options.get("slopes", False) in slopes:
            cells.extend(windings.view(torch.int32)[..., 3].flatten().tolist())
        return windings

    monkeypatch.setattr(cuda_coil, "wind", noted)
    return cells


def points(kind, heads, rows, columns, dims, channels):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(heads, n, c, generator=generator) for n, c in ((rows, dims), (columns, dims), (columns, channels))
    )
    if kind == "ties":
        query, key = (query * 2).round() / 2, (key * 2).round() / 2
    if kind == "few ties":
        # at all nodes, as the bandwidth is among these numbers
        query, key = (query * 2048).round() / 2048, (key * 2048).round() / 2048
    if kind == "nearly ties":
        # at a node, but for rounding, by which no side of it may be chosen
        query[:, : min(rows, columns)] = key[:, : min(rows, columns)] + 1.3
    if kind == "same":
        query[:, : min(rows, columns)] = key[:, : min(rows, columns)]
    if kind == "shifted":
        query, key = query + 100, key + 100
    if kind == "far":
        key[:, 3], key[:, 5], query[:, 1], query[:, 4] = 1e30, -1e30, 2e30, -5e29
    return query, key, value


def outcome(kernel, points, backend, dtype, bandwidth=1.25):
    """The output, and the gradients of everything; by the definition in float64, a sum's gradient is its own."""
    inputs = [part.to(dtype).requires_grad_() for part in points]
    rows = sortattn.kernel_sum(*inputs, kernel, bandwidth=bandwidth, backend=backend)
    weights = torch.linspace(-1, 1, rows.numel(), dtype=torch.float64).reshape(rows.shape).sin().to(dtype)
    return [rows.detach(), *torch.autograd.grad((rows * weights).sum(), inputs)]
