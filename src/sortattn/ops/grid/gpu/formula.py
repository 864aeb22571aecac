"""A kernel as numbers on the device."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ....cuda.constants import Constant, capturing
from ....kernels import KERNELS, AddRiesz, SidedKernel, rebuild
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

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """What kernels read."""
        return self.numbers, self.kinks

    @property
    def constants(self) -> tuple:
        """What kernels are compiled for."""
        return self.count, self.jumps, self.decays, self.exponential, self.riesz, self.beside, self.kind


# of parameters on the device: their version, and the kernel and its formula
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def known(name: str, parameters: Tensor) -> tuple[SidedKernel, Formula]:
    """The kernel with this name and these parameters, if there are any, and its formula on their device.

    Both are kept, as they are made on the host, which has to wait for the parameters.
    """
    device = parameters.device
    if not parameters.numel():
        return KERNELS[name], _named_formula(name, device).read()
    # tensors of inference mode do not count their changes, nor do fused optimizers those of what they learn
    uncounted = parameters.is_inference() or parameters.requires_grad
    version = None if uncounted else parameters._version
    found = _known.get(parameters)
    if found is None or version is None or found[0] != version:
        if capturing():
            raise RuntimeError(
                "the grid reads a kernel's coefficients on the host, which no CUDA graph can hold; call it once with "
                "this kernel before the graph is captured, with coefficients on the CPU that require no gradient"
            )
        numbers = parameters.detach().cpu()
        found = _known[parameters] = version, Constant(lambda: _made(name, numbers.to(device)), _tensors)
    return found[1].read()


def _made(name: str, parameters: Tensor) -> tuple[SidedKernel, Formula]:
    kernel = rebuild(name, parameters)
    return kernel, formula(kernel, parameters.device)


def _tensors(made: tuple[SidedKernel, Formula]) -> list[Tensor]:
    kernel, numbers = made
    return [*numbers.tensors, *(part for part in vars(kernel).values() if isinstance(part, Tensor))]


@functools.lru_cache(maxsize=64)
def _named_formula(name: str, device: torch.device) -> Constant[Formula]:
    return Constant(lambda: formula(KERNELS[name], device), lambda made: made.tensors)


@torch.inference_mode(False)
@torch.no_grad()
def formula(kernel: SidedKernel, device: torch.device) -> Formula:
    """The formula of a kernel, made on the host."""
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
