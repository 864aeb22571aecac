"""The kernels of the paper's Table 1, and two families to make more: splines and polynomial exponentials.

A kernel is a small declarative object. It knows its formula, its default bandwidth and the columns of Table 1, it can
write down its dense Gram matrix (`gram`, the definition that every backend is tested against), and it offers what the
faster backends read: a logarithm (`softmax`, `gauss`, `laplace`), a feature map (`tri`, `relu`, `elu`, `dpfp`), or a
table of sided terms (`add_riesz`, `add_laplace`, `add_bump`, `Spline`, `PolynomialExponential`).
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor

# added to both Riesz kernels, per dimension for the additive one, so that the normaliser is positive
RIESZ_EPSILON = 1e-3
# below this the normaliser of `tri`, the only kernel that can be negative, is clamped
TRI_FLOOR = 1e-6
# how many products of neighbouring features `dpfp` takes
DPFP_NU = 3

Coefficients = Sequence[float] | Tensor


@dataclass(frozen=True)
class Terms:
    """A univariate kernel `f(u)`, `u = s - t`, as sided terms: all that sorting needs to know of it.

    f(u) = sum_j H(u - x_j) b_j(u - x_j) e^(-rate (u - x_j)) + H(-u - x_j) a_j(-u - x_j) e^(-rate (-u - x_j)),

    with nodes `x_j`, ascending, polynomials `b_j` (`below`, for keys below the query) and `a_j` (`above`) of shape
    `(J, degree + 1)`, lowest coefficient first, and `H(0) = 1/2`. Only a node at zero may have terms above.
    `compact` says that `f` vanishes beyond the last node.

    Where `folded` is not zero the line is folded at zero: only points of one sign see each other, and the kernel is
    `f(|s| - |t|) - f(|s|) + constant`, times the sign of `s` if `folded` is -1 (a derivative), not if it is 1.
    """

    nodes: Tensor
    below: Tensor
    above: Tensor
    rate: float
    compact: bool
    folded: int = 0
    constant: float = 0.0


class Kernel:
    """`Phi(q, k)`, with the columns of the paper's Table 1 as attributes.

    `dimension` is the dimension of the feature space in units of `D` (infinite where there is no finite feature map).
    `floor` is the least value of the normaliser; zero means that it is not clamped.
    """

    name: ClassVar[str]
    formula: ClassVar[str]
    dimension: ClassVar[float] = math.inf
    stationary: ClassVar[str] = "yes"
    additive: ClassVar[bool] = True
    capacity: ClassVar[str] = "inf"
    complexity: ClassVar[str] = "quasi linear"
    bandwidth: ClassVar[float | str] = 1.0
    floor: ClassVar[float] = 0.0

    def default_bandwidth(self, head_dim: int) -> float:
        """The paper's tau for heads of dimension `head_dim`."""
        return head_dim**0.25 if self.bandwidth == "D^(1/4)" else float(self.bandwidth)

    def gram(self, query: Tensor, key: Tensor, bandwidth: float | Tensor) -> Tensor:
        """The dense matrix `Phi(q_m / tau, k_n / tau)`, shape `(..., M, N)`: the definition."""
        raise NotImplementedError

    def center(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys moved to where rounding costs least, such that the kernel attention stays the same."""
        if self.stationary != "yes" or key.shape[-2] == 0:
            return query, key
        origin = key.detach().mean(-2, keepdim=True)
        return query - origin, key - origin

    def parameters(self) -> Tensor | None:
        """The numbers that define a kernel made by the user, in one tensor; None for the named ones."""
        return None

    def __repr__(self) -> str:
        return f"<sortattn kernel {self.name}: {self.formula}>"


def scaled(points: Tensor, bandwidth: float | Tensor) -> Tensor:
    """`points / bandwidth`; the bandwidth's gradient is the same for any number of threads."""
    if isinstance(bandwidth, Tensor) and bandwidth.dim():
        # summed column by column first: torch cuts only a sum with a single result between its threads
        bandwidth = bandwidth.expand(*bandwidth.shape[:-1], points.shape[-1])
    return points / bandwidth


def widened(points: Tensor) -> Tensor:
    """Points on the CPU with a multiple of eight columns, zeros where there were none, for products of matrices.

    With other widths what they round to may depend on the number of threads, in the library that torch calls for them.
    """
    spare = -points.shape[-1] % 8
    return points if points.is_cuda or not spare else torch.nn.functional.pad(points, (0, spare))


def _differences(query: Tensor, key: Tensor, dim: int) -> Tensor:
    return query[..., :, None, dim] - key[..., None, :, dim]


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
            total = total - scaled(_differences(query, key, dim), bandwidth).square() / 2
        return total


class Laplace(ExponentialKernel):
    name = "laplace"
    formula = "exp(-|q - k|_1)"
    complexity = "quasi linear"
    bandwidth = 6.0

    def log_gram(self, query, key, bandwidth):
        total = 0.0
        for dim in range(query.shape[-1]):
            total = total - scaled(_differences(query, key, dim), bandwidth).abs()
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
            squares = squares + _differences(query, key, dim).square()
        # the root has no derivative at zero; there the gradient is zero, the mean over all directions
        distance = torch.where(squares == 0, 0.0, torch.where(squares == 0, 1.0, squares).sqrt())
        norms = _norm(query)[..., :, None] + _norm(key)[..., None, :]
        return scaled(norms - distance, bandwidth) + RIESZ_EPSILON


def _norm(points: Tensor) -> Tensor:
    squares = points.square().sum(-1)
    return torch.where(squares == 0, 0.0, torch.where(squares == 0, 1.0, squares).sqrt())


# additive kernels that sorting sums


class SidedKernel(Kernel):
    """`Phi(q, k) = sum_d phi(q_d, k_d)` with `phi(s, t) = f(s - t)`, up to terms of `s` alone and of `t` alone.

    The sum splits into a sided part, which has the table `terms()`, and a separable part `row(q_m) + column(k_n)`.
    """

    def univariate(self, difference: Tensor) -> Tensor:
        """`f(u)` at `u = s - t`, with the mean of the one-sided derivatives at every kink."""
        raise NotImplementedError

    def terms(self) -> Terms:
        """The sided part of `f`."""
        raise NotImplementedError

    def parts(self) -> tuple["SidedKernel", ...]:
        """Kernels that add up to this one and are summed one by one: where that keeps digits it is more than itself."""
        return (self,)

    def separable(self, query: Tensor, key: Tensor, bandwidth: float | Tensor) -> tuple[Tensor, Tensor] | None:
        """The separable part: `(row (..., M), column (..., N))`, or None if there is none."""
        return None

    def offsets(self, query: Tensor, key: Tensor, bandwidth: float | Tensor) -> tuple[Tensor, Tensor] | None:
        """What `gram` adds to the sums of `univariate`: `(row (..., M), column (..., N))`, or None for nothing."""
        return None

    def gram(self, query, key, bandwidth):
        total = 0.0
        for dim in range(query.shape[-1]):
            total = total + self.univariate(scaled(_differences(query, key, dim), bandwidth))
        return total


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
        terms = _spline_terms([0.0], torch.tensor([[0.0, -2.0]], dtype=torch.float64, device="cpu"), compact=False)
        return replace(terms, folded=1, constant=RIESZ_EPSILON)


class PolynomialExponential(SidedKernel):
    """`f(u) = p(|u|) e^(-|u|)` with `p(x) = sum_i coefficients[i] x^i`; Matern kernels are among them.

    Matern 3/2 is `[1, 1]`, Matern 5/2 is `[1, 1, 1/3]` (with the length scale in the bandwidth). The coefficients may
    be a tensor that requires a gradient, or a parameter; another one is copied.

    >>> matern = PolynomialExponential([1.0, 1.0])
    >>> matern.univariate(torch.tensor([0.0, -1.0]))
    tensor([1.0000, 0.7358])
    """

    name = "polynomial_exponential"
    formula = "p(|s - t|) exp(-|s - t|)"

    def __init__(self, coefficients: Coefficients, *, bandwidth: float = 1.0):
        self.coefficients = _own(_vector("coefficients", coefficients))
        self.bandwidth = positive(bandwidth)
        if not len(self.coefficients):
            raise ValueError("coefficients must hold at least one number, got none")

    def univariate(self, difference):
        # beyond, e^-x is zero in every type, and a power of a larger distance might be infinite: their product NaN
        distance = difference.abs().clamp(max=1000.0)
        polynomial = torch.zeros_like(distance)
        for coefficient in reversed(self.coefficients.to(distance).unbind()):
            polynomial = polynomial * distance + coefficient
        return polynomial * (-distance).exp()

    def terms(self):
        side = self.coefficients.to("cpu", torch.float64)[None]
        return Terms(side.new_zeros(1), side, side, rate=1.0, compact=False)

    def parameters(self):
        return self.coefficients


class AddLaplace(PolynomialExponential):
    name = "add_laplace"
    formula = "exp(-|s - t|)"

    def __init__(self):
        super().__init__([1.0], bandwidth=0.5)

    def univariate(self, difference):
        return (-difference.abs()).exp()

    def parameters(self):
        return None


class Spline(SidedKernel):
    """Any piecewise linear `f(s - t)` with finitely many nodes, continuous or with jumps.

    `nodes` are the J points, ascending, where the slope or the value changes; `slopes` the J + 1 slopes left of the
    first node, between the nodes, and right of the last; `offset` the value just left of the first node; `jumps` the J
    changes of the value at the nodes (none by default). At a jump the value is the mean of the two sides. `slopes`,
    `offset` and `jumps` may be tensors that require a gradient, or parameters; others are copied.

    >>> hat = Spline(nodes=[-1.0, 0.0, 1.0], slopes=[0.0, 1.0, -1.0, 0.0])
    >>> hat.univariate(torch.tensor([-2.0, 0.0, 0.25]))
    tensor([0.0000, 1.0000, 0.7500])
    """

    name = "spline"
    formula = "piecewise linear f(s - t)"

    def __init__(
        self,
        nodes: Coefficients,
        slopes: Coefficients,
        *,
        offset: float | Tensor = 0.0,
        jumps: Coefficients | None = None,
        bandwidth: float = 1.0,
    ):
        self.nodes = _vector("nodes", nodes).detach()
        self.slopes = _vector("slopes", slopes)
        count = len(self.nodes)
        self.jumps = _vector("jumps", [0.0] * count if jumps is None else jumps)
        if not (isinstance(offset, Tensor) and offset.dim() == 0) and not isinstance(offset, Real):
            raise TypeError(f"offset must be a number or a tensor of one, of shape (), got {offset!r}")
        self.offset = offset if isinstance(offset, Tensor) else _vector("offset", [float(offset)])[0]
        self.bandwidth = positive(bandwidth)
        if count == 0:
            raise ValueError("nodes must hold at least one number, got none")
        if not bool((self.nodes.diff() > 0).all() and self.nodes.isfinite().all()):
            raise ValueError(f"nodes must be finite and strictly ascending, got {self.nodes.tolist()}")
        if len(self.slopes) != count + 1:
            raise ValueError(f"slopes must have one entry more than nodes ({count + 1}), got {len(self.slopes)}")
        if len(self.jumps) != count:
            raise ValueError(f"jumps must have one entry per node ({count}), got {len(self.jumps)}")
        # known here, since a tensor's numbers cannot be looked at where a compiler traces: those that cannot change
        self.nodes, self.slopes, self.jumps, self.offset = map(_own, (self.nodes, self.slopes, self.jumps, self.offset))
        self._smooth = not _learned(self.jumps) and not bool(self.jumps.any())
        self._levels = self._outside()
        self._vanishes = self._levels == (0.0, 0.0)
        self._steps = self._levels is not None and not self._vanishes and bool(self.slopes.any())

    @property
    def continuous(self) -> bool:
        """Whether there are no jumps, and will be none."""
        return self._smooth and not _learned(self.jumps)

    @property
    def _compact(self) -> bool:
        return self._vanishes and not _learned(self.slopes, self.jumps, self.offset)

    def _outside(self) -> tuple[float, float] | None:
        """The values left and right of all nodes, if they are constants."""
        if _learned(self.slopes, self.jumps, self.offset):
            return None
        _, _, values, slopes = self.pieces(self._numbers())
        return None if bool(slopes[0] != 0) or bool(slopes[-1] != 0) else (values[0].item(), values[-1].item())

    def parts(self):
        if not self._steps or _learned(self.slopes, self.jumps, self.offset):
            return (self,)
        # a step, and the rest, which vanishes outside: slopes that cancel far away would leave what rounding makes of
        # them, times the distance
        numbers = self._numbers()
        nodes, slopes, jumps, offset = self._split(numbers)
        rise = self.pieces(numbers)[2][-1:] - offset
        step, rest = copy(self), copy(self)
        step.nodes, step.slopes, step.jumps, step.offset = nodes[-1:], torch.zeros_like(slopes[:2]), rise, offset[0]
        rest.slopes, rest.jumps = slopes, torch.cat([jumps[:-1], jumps[-1:] - rise])
        rest.offset, rest._vanishes = torch.zeros_like(offset[0]), True
        return step, rest

    def univariate(self, difference):
        pieces = self.pieces(self._numbers())
        nodes, anchors, values, slopes = (part.to(difference) for part in pieces)

        def piece(index):
            return values[index] + slopes[index] * (difference - anchors[index])

        at, past = (torch.bucketize(difference.detach(), nodes, right=side) for side in (False, True))
        return (piece(at) + piece(past)) / 2

    def terms(self):
        nodes, slopes, jumps = (part.to("cpu", torch.float64) for part in (self.nodes, self.slopes, self.jumps))
        return _spline_terms(nodes, torch.stack([jumps, slopes.diff()], 1), compact=self._compact)

    def separable(self, query, key, bandwidth):
        if self._compact:
            return None
        # offset + slope (u - x_1), left of all nodes; the keys' mean as origin keeps an offset of the inputs harmless
        scale = bandwidth[..., 0] if isinstance(bandwidth, Tensor) else bandwidth
        slope, offset = self.slopes[0].to(query), self.offset.to(query)
        origin = key.detach().mean(-2, keepdim=True) if key.shape[-2] else 0.0
        constant = (offset - slope * self.nodes[0].to(query)) * query.shape[-1]
        return constant + slope * (query - origin).sum(-1) / scale, -slope * (key - origin).sum(-1) / scale

    def parameters(self):
        return self._numbers()

    def _numbers(self) -> Tensor:
        parts = (self.nodes, self.slopes, self.jumps, self.offset[None])
        return torch.cat([part.to("cpu", torch.float64) for part in parts])

    @classmethod
    def from_parameters(cls, parameters: Tensor) -> "Spline":
        """The kernel whose `parameters()` these are."""
        nodes, slopes, jumps, offset = cls._split(parameters)
        return cls(nodes, slopes, jumps=jumps, offset=offset[0])

    @staticmethod
    def _split(parameters: Tensor) -> tuple[Tensor, ...]:
        count = (len(parameters) - 2) // 3
        return parameters.split([count, count + 1, count, 1])

    @classmethod
    def pieces(cls, parameters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the kernel with these `parameters()`: the J nodes, and anchor, value there and slope of the J + 1 pieces.

        Piece i lies right of node i - 1 and is anchored there, the leftmost at the first node.
        """
        nodes, slopes, jumps, offset = cls._split(parameters)
        rises = torch.cat([jumps[:1], slopes[1:-1] * nodes.diff() + jumps[1:]])
        # not `cumsum`, which is not deterministic on CUDA devices
        climbed = (torch.ones(len(rises), len(rises), dtype=rises.dtype, device=rises.device).tril() * rises).sum(1)
        return nodes, torch.cat([nodes[:1], nodes]), torch.cat([offset, offset + climbed]), slopes

    @classmethod
    def piece_gradients(cls, parameters: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
        """The gradient by `parameters` from those by the values and slopes of the `pieces`; nodes have none."""
        nodes, *_ = cls._split(parameters)
        count = len(nodes)
        later = (torch.ones(count, count, dtype=values.dtype, device=values.device).triu() * values[1:]).sum(1)
        lift = torch.nn.functional.pad(later[1:] * nodes.diff().to(later), (1, 1))
        return torch.cat([torch.zeros_like(later), slopes + lift, later, values.sum()[None]])


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


def _spline_terms(nodes: Coefficients, below: Tensor, compact: bool) -> Terms:
    nodes = torch.as_tensor(nodes, dtype=torch.float64, device="cpu")
    return Terms(nodes, below, torch.zeros_like(below), 0.0, compact)


def _learned(*parts: Tensor) -> bool:
    """Whether some of these may change: by gradients, or as a module's parameter with its `state_dict`."""
    return any(part.requires_grad or isinstance(part, torch.nn.Parameter) for part in parts)


def _own(part: Tensor) -> Tensor:
    """A copy of what is not learned; one that may be saved for gradients, also if it is made in inference mode."""
    if _learned(part):
        return part
    with torch.inference_mode(False):
        return part.clone()


def _vector(name: str, given: Coefficients) -> Tensor:
    expected = f"{name} must be a sequence of numbers or a 1-D float tensor"
    vector = given
    if not isinstance(given, Tensor):
        try:
            vector = torch.tensor(list(given), dtype=torch.float64, device="cpu")
        except (TypeError, ValueError):
            raise TypeError(f"{expected}, got {given!r}") from None
    if vector.dim() != 1:
        raise ValueError(f"{expected}, got shape {tuple(vector.shape)}")
    if not vector.is_floating_point():
        raise TypeError(f"{expected}, got {vector.dtype}")
    return vector


def positive(bandwidth: float, expected: str = "a number") -> float:
    """The bandwidth, if it is one that a kernel can have."""
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, (int, float, Real)):
        raise TypeError(f"bandwidth must be {expected}, got {type(bandwidth).__name__}")
    if not bandwidth > 0:
        raise ValueError(f"bandwidth must be positive, got {bandwidth}")
    if bandwidth == math.inf:
        raise ValueError("bandwidth must be finite, got inf")
    return float(bandwidth)


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


def resolve(kernel: str | Kernel) -> Kernel:
    """The kernel of that name, or the kernel itself."""
    if isinstance(kernel, Kernel):
        return kernel
    if not isinstance(kernel, str):
        raise TypeError(f"kernel must be a name or a Kernel, got {type(kernel).__name__}")
    if kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}, expected one of {', '.join(KERNELS)} or a Kernel object")
    return KERNELS[kernel]


def rebuild(name: str, parameters: Tensor | None) -> Kernel:
    """The kernel with this name and these `parameters()`: operators carry kernels as a string and a tensor."""
    if parameters is None:
        return KERNELS[name]
    return Spline.from_parameters(parameters) if name == Spline.name else PolynomialExponential(parameters)
