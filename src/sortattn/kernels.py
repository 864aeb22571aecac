"""The kernels of the paper's Table 1.

A kernel is a small declarative object. It knows its formula, its default bandwidth and the columns of Table 1, it can
write down its dense Gram matrix (`gram`, the definition that every backend is tested against), and it offers what the
faster backends read: a logarithm (`softmax`, `gauss`, `laplace`), a feature map (`tri`, `relu`, `elu`, `dpfp`), or a
table of sided terms (`add_riesz`, `add_laplace`, `add_bump`, and the families of `splines`).
"""

import difflib
from dataclasses import replace
from inspect import getattr_static
from types import FunctionType
from typing import ClassVar

import torch
from torch import Tensor

from .kernel_base import Kernel, SidedKernel, differences, scaled, widened
from .kernel_base import Terms as Terms  # for backends, which ask for all that is about kernels here
from .kernel_base import positive as positive
from .splines import PolynomialExponential, Spline, spline_terms

# added to both Riesz kernels, per dimension for the additive one, so that the normaliser is positive
RIESZ_EPSILON = 1e-3
# below this the normaliser of `tri`, the only kernel that can be negative, is clamped
TRI_FLOOR = 1e-6
# how many products of neighbouring features `dpfp` takes
DPFP_NU = 3

# kernels with a logarithm


class ExponentialKernel(Kernel):
    """A kernel that is never zero: attention is a softmax of `log_gram`, and is computed as one."""

    additive = False
    complexity = "quadratic"

    def log_gram(self, query: Tensor, key: Tensor, bandwidth: float | Tensor) -> Tensor:
        """The logarithm of `gram`."""
        raise NotImplementedError

    def gram(self, query, key, bandwidth):
        return self.log_gram(query, key, bandwidth).exp()


class Softmax(ExponentialKernel):
    name = "softmax"
    formula = "exp(<q, k>)"
    stationary = "no"
    bandwidth = "D^(1/4)"

    def log_gram(self, query, key, bandwidth):
        return widened(scaled(query, bandwidth)) @ widened(scaled(key, bandwidth)).transpose(-1, -2)

    def center(self, query, key):
        # a constant added to all keys multiplies a whole row of the Gram matrix, which the normalisation removes
        return query, key - key.detach().mean(-2, keepdim=True) if key.shape[-2] else key


class Gauss(ExponentialKernel):
    name = "gauss"
    formula = "exp(-|q - k|_2^2 / 2)"
    bandwidth = "D^(1/4)"

    def log_gram(self, query, key, bandwidth):
        total = 0.0
        for dim in range(query.shape[-1]):
            total = total - scaled(differences(query, key, dim), bandwidth).square() / 2
        return total


class Laplace(ExponentialKernel):
    name = "laplace"
    formula = "exp(-|q - k|_1)"
    complexity = "quasi linear"
    bandwidth = 6.0

    def log_gram(self, query, key, bandwidth):
        total = 0.0
        for dim in range(query.shape[-1]):
            total = total - scaled(differences(query, key, dim), bandwidth).abs()
        return total


class Riesz(Kernel):
    name = "riesz"
    formula = "|q|_2 + |k|_2 - |q - k|_2 + eps"
    stationary = "partially"
    additive = False
    capacity = "-"
    complexity = "quadratic"

    def gram(self, query, key, bandwidth):
        squares = 0.0
        for dim in range(query.shape[-1]):
            squares = squares + differences(query, key, dim).square()
        # the root has no derivative at zero; there the gradient is zero, the mean over all directions
        distance = torch.where(squares == 0, 0.0, torch.where(squares == 0, 1.0, squares).sqrt())
        norms = _norm(query)[..., :, None] + _norm(key)[..., None, :]
        return scaled(norms - distance, bandwidth) + RIESZ_EPSILON


def _norm(points: Tensor) -> Tensor:
    squares = points.square().sum(-1)
    return torch.where(squares == 0, 0.0, torch.where(squares == 0, 1.0, squares).sqrt())


# additive kernels that sorting sums


class AddRiesz(SidedKernel):
    name = "add_riesz"
    formula = "|s| + |t| - |s - t| + eps"
    stationary = "partially"
    capacity = ">= 2D"

    def univariate(self, difference):
        return -difference.abs()

    def gram(self, query, key, bandwidth):
        norms = query.abs().sum(-1)[..., :, None] + key.abs().sum(-1)[..., None, :]
        return scaled(norms, bandwidth) + super().gram(query, key, bandwidth) + RIESZ_EPSILON * query.shape[-1]

    def offsets(self, query, key, bandwidth):
        scale = bandwidth[..., 0] if isinstance(bandwidth, Tensor) else bandwidth
        return query.abs().sum(-1) / scale + RIESZ_EPSILON * query.shape[-1], key.abs().sum(-1) / scale

    def terms(self):
        # |s| + |t| - |s - t| is twice the smaller of |s| and |t|, or zero if the signs differ; and that smaller one is
        # |s| - max(|s| - |t|, 0)
        terms = spline_terms([0.0], torch.tensor([[0.0, -2.0]], dtype=torch.float64, device="cpu"), compact=False)
        return replace(terms, folded=1, constant=RIESZ_EPSILON)


class AddLaplace(PolynomialExponential):
    name = "add_laplace"
    formula = "exp(-|s - t|)"

    def __init__(self):
        super().__init__([1.0], bandwidth=0.5)

    def univariate(self, difference):
        return (-difference.abs()).exp()

    def parameters(self):
        return None


class AddBump(Spline):
    name = "add_bump"
    formula = "max(0, 1 - |s - t|)"

    def __init__(self):
        super().__init__([-1.0, 0.0, 1.0], [0.0, 1.0, -1.0, 0.0], bandwidth=1.5)

    def univariate(self, difference):
        height = 1 - difference.abs()
        # (h + |h|) / 2 is max(0, h) with the mean of the one-sided derivatives at h = 0
        return (height + height.abs()) / 2

    def parameters(self):
        return None


# finite feature maps


class FeatureKernel(Kernel):
    """`Phi(q, k) = <features(q), features(k)>` with finitely many features, summed in linear time."""

    stationary = "no"
    complexity = "linear"

    def features(self, points: Tensor) -> Tensor:
        """The feature map, `(..., N, D) -> (..., N, L)`."""
        raise NotImplementedError

    def gram(self, query, key, bandwidth):
        query, key = (widened(self.features(scaled(points, bandwidth))) for points in (query, key))
        return query @ key.transpose(-1, -2)


class Tri(FeatureKernel):
    name = "tri"
    formula = "cos(s - t)"
    dimension = 2
    stationary = "yes"
    capacity = "<= 2D"
    bandwidth = "D^(1/4)"
    floor = TRI_FLOOR

    def features(self, points):
        return torch.cat([points.sin(), points.cos()], -1)

    def gram(self, query, key, bandwidth):
        # the argument of a sine has no more digits than its distance from zero leaves it
        return super().gram(*self.center(query, key), bandwidth)


class Relu(FeatureKernel):
    name = "relu"
    formula = "relu(s) relu(t)"
    dimension = 1
    capacity = "<= D"

    def features(self, points):
        return _relu(points)


class Elu(FeatureKernel):
    name = "elu"
    formula = "(elu(s) + 1) (elu(t) + 1)"
    dimension = 1
    capacity = "<= D"

    def features(self, points):
        # torch's own elu subtracts the one again, and rounds by where its threads cut the points
        return points.relu() + points.clamp(max=0).exp()


class Dpfp(FeatureKernel):
    """Deterministic parameter-free projection: products of `relu(x), relu(-x)` with their `nu` next neighbours."""

    name = "dpfp"
    formula = "<f(q), f(k)>, f_(2Dj+i)(x) = r_i(x) r_(i+j)(x), r = (relu(x), relu(-x)), j < 3"
    dimension = 2 * DPFP_NU
    additive = False
    capacity = "<= 6D"
    # the distance of the first neighbour: with 0 the squares are among the products
    first: ClassVar[int] = 0

    def features(self, points):
        halves = torch.cat([_relu(points), _relu(-points)], -1)
        return torch.cat([halves * halves.roll(-shift, -1) for shift in range(self.first, self.first + DPFP_NU)], -1)


def _relu(points: Tensor) -> Tensor:
    # unlike torch's relu, with the mean of the one-sided derivatives at zero
    return (points + points.abs()) / 2


_ALL = (Softmax, Gauss, Laplace, Riesz, AddRiesz, AddLaplace, AddBump, Tri, Relu, Elu, Dpfp)

KERNELS: dict[str, Kernel] = {kind.name: kind() for kind in _ALL}
"""The paper's eleven kernels by name, in the order of its Table 1."""


# those that every backend knows, by the names that operators carry
_KINDS: dict[str, type[Kernel]] = {kind.name: kind for kind in (*_ALL, Spline, PolynomialExponential)}


def known(kernel: Kernel) -> bool:
    """Whether its name says all of it but its `parameters()`; others are what their methods say."""
    return kernel.name in _KINDS


def resolve(kernel: str | Kernel) -> Kernel:
    """The kernel of that name, or the kernel itself."""
    if isinstance(kernel, Kernel):
        return _named(kernel)
    if not isinstance(kernel, str):
        came = f"the class {kernel.__name__} itself" if isinstance(kernel, type) else type(kernel).__name__
        raise TypeError(f"kernel must be a name or a Kernel, such as Spline(nodes, slopes), got {came}")
    if kernel not in KERNELS:
        alike = difflib.get_close_matches(kernel.lower(), KERNELS, 1)
        guess = f"; did you mean {alike[0]!r}?" if alike else ""
        raise ValueError(f"unknown kernel {kernel!r}, expected one of {', '.join(KERNELS)} or a Kernel object{guess}")
    return KERNELS[kernel]


def _named(kernel: Kernel) -> Kernel:
    """The kernel, if it has a name and is what is known by that name."""
    kind, name = type(kernel), getattr(kernel, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"a Kernel must have a name, a string, as an attribute; {kind.__name__} has none")
    known_as = _KINDS.get(name, kind)
    if kind is not known_as and (not isinstance(kernel, known_as) or _changes(kind, known_as)):
        raise TypeError(
            f"{kind.__name__} must have a name of its own, got {name!r}, by which backends know {known_as.__name__}"
        )
    return kernel


def _changes(kind: type[Kernel], parent: type[Kernel]) -> bool:
    """Whether a class has methods of its own in place of its parent's."""
    younger = kind.__mro__[: kind.__mro__.index(parent)]
    names = {name for each in younger for name in vars(each) if not name.startswith("__")}
    return any(isinstance(getattr_static(parent, name, None), (FunctionType, property)) for name in names)


def rebuild(name: str, parameters: Tensor | None) -> Kernel:
    """The kernel with this name and these `parameters()`: operators carry kernels as a string and a tensor."""
    if parameters is None:
        return KERNELS[name]
    return Spline.from_parameters(parameters) if name == Spline.name else PolynomialExponential(parameters)
