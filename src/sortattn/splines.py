"""Two families of kernels that sorting sums, for users to make their own: polynomial exponentials and splines."""

from collections.abc import Sequence
from copy import copy
from numbers import Real

import torch
from torch import Tensor

from .kernel_base import SidedKernel, Terms, positive

Coefficients = Sequence[float] | Tensor


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

        at, past = (torch.bucketize(difference.detach().contiguous(), nodes, right=side) for side in (False, True))
        return (piece(at) + piece(past)) / 2

    def terms(self):
        nodes, slopes, jumps = (part.to("cpu", torch.float64) for part in (self.nodes, self.slopes, self.jumps))
        return spline_terms(nodes, torch.stack([jumps, slopes.diff()], 1), compact=self._compact)

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


def spline_terms(nodes: Coefficients, below: Tensor, compact: bool) -> Terms:
    """Terms below their nodes alone, without exponentials."""
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
        # of a tensor that may be learned, or is on a GPU, no number is looked at
        if not vector.isfinite().all():
            raise ValueError(f"{name} must be finite, got {vector.tolist()}")
    if vector.dim() != 1:
        raise ValueError(f"{expected}, got shape {tuple(vector.shape)}")
    if not vector.is_floating_point():
        raise TypeError(f"{expected}, got {vector.dtype}")
    return vector
