"""A kernel as numbers on the device."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels import KERNELS, AddRiesz, SidedKernel
from ..surrogate import reproduces_exponentials, slope_jumps


@dataclass(frozen=True)
class Formula:
    """A kernel as numbers on the device, see `matrix`."""

    numbers: Tensor
    count: int
    kinks: Tensor
    jumps: int
    decays: bool
    exponential: bool
    riesz: bool
    beside: bool
    # what `near_kernel` calls it
    kind: str


def formula(kernel: SidedKernel, device: torch.device) -> Formula:
    """The formula of a kernel; those of named kernels are kept."""
    return _named_formula(kernel.name, device) if kernel.parameters() is None else _formula(kernel, device)


@functools.lru_cache(maxsize=64)
def _named_formula(name: str, device: torch.device) -> Formula:
    return _formula(KERNELS[name], device)


@torch.no_grad()
def _formula(kernel: SidedKernel, device: torch.device) -> Formula:
    terms = kernel.terms()
    kinks, jumps = slope_jumps(kernel)
    if terms.rate:
        numbers, count = terms.below[0].flip(0), terms.below.shape[1]
    else:
        count = len(kinks)
        levels = kernel.univariate(kinks).double()
        before = levels[:1] - kernel.univariate(kinks[:1] - 1).double()
        slopes = before + jumps.cumsum(0)
        # sums that should vanish, do
        slopes = torch.where(slopes.abs() < 1e-12 * jumps.abs().amax(), 0.0, slopes)
        numbers = torch.cat([before, kinks, levels, slopes])
    return Formula(
        numbers.to(device, torch.float32),
        count,
        torch.cat([kinks, jumps]).to(device, torch.float32),
        len(kinks),
        bool(terms.rate),
        reproduces_exponentials(kernel),
        isinstance(kernel, AddRiesz),
        bool(((kinks != 0) & (jumps != 0)).any()),
        _kind(kernel),
    )


def _kind(kernel: SidedKernel) -> str:
    known = {"add_riesz": "riesz", "add_bump": "bump", "add_laplace": "laplace"}
    return known.get(kernel.name, "exponential" if kernel.terms().rate else "spline")
