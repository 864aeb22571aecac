"""What a benchmark measures: the settings of a run, and its cases."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ..attention import kernel_attention

FORWARD = "forward"
BOTH = "forward+backward"

# torch's own scaled_dot_product_attention, which every kernel is compared with
SOFTMAX = ("softmax", "sdpa")
# the ways torch has to compute it, by the names of `torch.nn.attention.SDPBackend`; `sdpa` is torch's own choice
SDPA_BACKENDS = {"sdpa": None, "mem_eff": "EFFICIENT_ATTENTION", "flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


@dataclass(frozen=True)
class Settings:
    """What all rows of one file have in common, besides the machine."""

    batch: int = 1
    heads: int = 8
    head_dim: int = 64
    value_dim: int = 64
    causal: bool = False
    device: str = "cpu"
    threads: int = 1


@dataclass(frozen=True)
class Case:
    """One row to be: a kernel through a backend, in one type, one pass and one size."""

    kernel: str
    backend: str
    dtype: str
    passes: str
    n: int

    @property
    def is_softmax(self) -> bool:
        return (self.kernel, self.backend) == SOFTMAX

    def at(self, n: int) -> "Case":
        """The same case with another size."""
        return Case(**{**asdict(self), "n": n})


@dataclass(frozen=True)
class Group:
    """The cases that are measured in turn, round by round, softmax first: those of one type, pass and size."""

    cases: tuple[Case, ...]

    @property
    def label(self) -> str:
        first = self.cases[0]
        return f"{first.passes} {first.dtype} N={first.n:,}"


def make_groups(
    kernels: list[str], backends: list[str], dtypes: list[str], sizes: list[int], *, backward: bool = False
) -> list[Group]:
    """All groups of a run, small sizes first; `backward` adds the forward and backward pass to the forward one.

    A backend of `SDPA_BACKENDS` is one of softmax, whatever the kernels are.
    """
    others = [("softmax", backend) for backend in backends if backend in SDPA_BACKENDS]
    own = [(kernel, backend) for kernel in kernels for backend in backends if backend not in SDPA_BACKENDS]
    contenders = [SOFTMAX, *others, *own]
    return [
        Group(tuple(Case(kernel, backend, dtype, passes, n) for kernel, backend in dict.fromkeys(contenders)))
        for dtype in dict.fromkeys(dtypes)
        for passes in ((FORWARD, BOTH) if backward else (FORWARD,))
        for n in sorted(set(sizes))
    ]


def make_inputs(case: Case, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of a case: unit normal, the same numbers for every kernel."""
    generator = torch.Generator(settings.device).manual_seed(0)
    dims = (settings.head_dim, settings.head_dim, settings.value_dim)
    return tuple(
        torch.randn(settings.batch, settings.heads, case.n, dim, generator=generator, device=settings.device)
        .to(getattr(torch, case.dtype))
        .requires_grad_(case.passes == BOTH)
        for dim in dims
    )


def make_call(case: Case, settings: Settings, inputs: tuple[Tensor, Tensor, Tensor]) -> Callable[[], None]:
    """What is timed: one forward pass, or one forward and one backward pass with all three gradients."""

    def forward() -> Tensor:
        if case.kernel == SOFTMAX[0] and case.backend in SDPA_BACKENDS:
            with _only(case.backend):
                return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=settings.causal)
        return kernel_attention(*inputs, case.kernel, is_causal=settings.causal, backend=case.backend)

    if case.passes == FORWARD:
        return lambda: _discard(forward())
    size = (settings.batch, settings.heads, case.n, settings.value_dim)
    cotangent = torch.ones(size, device=settings.device, dtype=getattr(torch, case.dtype))
    return lambda: _discard(torch.autograd.grad(forward(), inputs, cotangent))


def _only(backend: str):
    """A context in which SDPA takes this backend or raises."""
    name = SDPA_BACKENDS[backend]
    if name is None:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, name))


def _discard(result: object) -> None:
    # the result is freed here, inside what is timed, for every contender alike
    del result


def input_bytes(case: Case, settings: Settings) -> int:
    """The size of query, key and value together."""
    numbers = settings.batch * settings.heads * case.n * (2 * settings.head_dim + settings.value_dim)
    return numbers * getattr(torch, case.dtype).itemsize
