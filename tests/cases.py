"""What the tests run over: kernels, shapes, inputs; and how an error is measured."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import sortattn

from . import dense

Inputs = tuple[Tensor, Tensor, Tensor]

_RISING = {"nodes": [-1.0, 0.5, 2.0], "slopes": [-0.25, 0.75, -0.5, 0.125], "offset": 1.0}
_JUMPING = {
    "nodes": [-1.5, -0.5, 0.75], "slopes": [0.0, 0.5, -0.25, 0.0], "offset": 0.25, "jumps": [0.5, 0.25, -0.5],
}  # fmt: skip
_BOX = {"nodes": [-1.0, 1.5], "slopes": [0.0, 0.0, 0.0], "jumps": [1.0, -1.0]}


@dataclass(frozen=True)
class Case:
    """A kernel of the package beside its independent formula."""

    name: str
    kernel: str | sortattn.Kernel
    formula: Callable[[Tensor, Tensor], Tensor]
    floor: float = 0.0

    @property
    def sided(self) -> bool:
        """Whether sorting sums it."""
        return self.name not in _UNSIDED

    @property
    def has_features(self) -> bool:
        """Whether it has a finite feature map."""
        return self.name in FEATURES

    def bandwidth(self, dims: int) -> float:
        """Its default bandwidth."""
        return dense.default_bandwidth(self.name, dims)


FEATURES = ("tri", "relu", "elu", "dpfp")
_UNSIDED = ("softmax", "gauss", "laplace", "riesz", *FEATURES)
STATIONARY = (
    "gauss",
    "laplace",
    "add_laplace",
    "add_bump",
    "tri",
    "spline",
    "spline_jumps",
    "box",
    "matern32",
    "matern52",
)


def _named(name: str) -> Case:
    return Case(name, name, dense.FORMULAS[name], floor=1e-6 if name == "tri" else 0.0)


def _polynomial(name: str, coefficients: list[float]) -> Case:
    kernel = sortattn.PolynomialExponential(coefficients)
    return Case(name, kernel, dense.polynomial_exponential(coefficients))


CASES: dict[str, Case] = {
    **{name: _named(name) for name in dense.FORMULAS},
    # positive everywhere, so that no normaliser comes near zero; neither is symmetric, one grows on both sides
    "spline": Case("spline", sortattn.Spline(**_RISING), dense.spline(**_RISING)),
    "spline_jumps": Case("spline_jumps", sortattn.Spline(**_JUMPING), dense.spline(**_JUMPING)),
    "matern32": _polynomial("matern32", [1.0, 1.0]),
    "matern52": _polynomial("matern52", [1.0, 1.0, 1 / 3]),
}
# compact and with jumps: a window that counts
BOX = Case("box", sortattn.Spline(**_BOX), dense.spline(**_BOX))
SIDED = tuple(name for name, case in CASES.items() if case.sided)
EXACT = ("reference", "tiled", "sorted")
# those that need no extra
PLAIN = ("reference", "tiled", "sorted", "linear")
BACKENDS = (*PLAIN, "keops", "auto")


def refusal(backend: str, case: Case, device: str, *, causal: bool = False) -> str | None:
    """What the error has to say if this backend cannot serve the call; None if it can.

    Written down here, and not asked of the package: a backend that gives up what it could do fails the tests.
    """
    if backend == "sorted" and not case.sided:
        return f"sorting sums additive kernels .*, not {case.name}"
    if backend == "grid":
        if not case.sided:
            return f"a grid sums additive kernels .*, not {case.name}"
        if case.name in ("spline_jumps", "box"):
            return "a grid would smear the jumps of this spline"
    if backend == "linear" and not case.has_features:
        return "needs a finite feature map .* does not have"
    if backend == "keops":
        return _keops_refusal(case, causal)
    return None


def _keops_refusal(case: Case, causal: bool) -> str | None:
    import importlib.util

    if importlib.util.find_spec("pykeops") is None:
        return r"pykeops is not installed; pip install 'sortattn\[keops\]'"
    if case.has_features or case.name not in dense.FORMULAS:
        return "it serves softmax, .*, not"
    return "it has no causal mask" if causal else None


def pairs(backends: tuple[str, ...]) -> list:
    """Parameters for every kernel with each of these backends that serves it."""
    return [
        pytest.param(case, backend, id=f"{name}-{backend}")
        for name, case in CASES.items()
        for backend in backends
        if refusal(backend, case, "cpu") is None
    ]


@dataclass(frozen=True)
class Shape:
    """Leading dimensions, then M, N, D and C."""

    leading: tuple[int, ...] = (2, 3)
    rows: int = 63
    columns: int = 100
    dims: int = 5
    channels: int = 7

    def __str__(self) -> str:
        letters = {0: (), 1: ("H",), 2: ("B", "H")}.get(len(self.leading)) or [
            f"L{i}x" for i in range(len(self.leading))
        ]
        parts = [*zip(letters, self.leading, strict=True), ("M", self.rows), ("N", self.columns)]
        return "-".join(f"{letter}{size}" for letter, size in [*parts, ("D", self.dims), ("C", self.channels)])


def draw(
    shape: Shape, dtype: torch.dtype = torch.float64, device: str = "cpu", *, seed: int = 0, shift: float = 0.0
) -> Inputs:
    """Unit normal query, key and value; query and key moved by `shift`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows, columns):
        return torch.randn(*shape.leading, rows, columns, generator=generator, dtype=torch.float64)

    query, key = normal(shape.rows, shape.dims) + shift, normal(shape.columns, shape.dims) + shift
    value = normal(shape.columns, shape.channels)
    return tuple(part.to(device, dtype) for part in (query, key, value))


def cotangent(shape: Shape, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    """The gradient of some loss by the output."""
    generator = torch.Generator().manual_seed(1)
    size = (*shape.leading, shape.rows, shape.channels)
    return torch.randn(*size, generator=generator, dtype=torch.float64).to(device, dtype)


def leaves(*tensors: Tensor) -> Inputs:
    """Detached copies that require gradients."""
    return tuple(part.detach().clone().requires_grad_() for part in tensors)


def relative_error(actual: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    """The Frobenius norm of the difference over that of `expected`, or over `scale` if that is larger; in float64."""
    difference = (actual.detach().double().cpu() - expected.detach().double().cpu()).norm().item()
    size = max(expected.detach().double().norm().item(), scale)
    return difference if size == 0 else difference / size


def assert_close(actual: Tensor, expected: Tensor, bound: float, scale: float = 0.0, name: str = "output") -> None:
    """Assert that the relative error is at most `bound`; it is not if there is a NaN."""
    # a name of pytest's: the failing line shown is the caller's
    __tracebackhide__ = True
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = relative_error(actual, expected, scale)
    if not error <= bound:
        raise AssertionError(f"{name}: relative error {error:.2e}, expected at most {bound:.2e}")
