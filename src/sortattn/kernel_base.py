"""What a kernel is, and what backends ask of one: those with a name are in `kernels`, two families in `splines`."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor


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
            total = total + self.univariate(scaled(differences(query, key, dim), bandwidth))
        return total


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


def differences(query: Tensor, key: Tensor, dim: int) -> Tensor:
    """`q_md - k_nd` of one dimension, `(..., M, N)`."""
    return query[..., :, None, dim] - key[..., None, :, dim]


def positive(bandwidth: float, expected: str = "a number") -> float:
    """The bandwidth, if it is one that a kernel can have."""
    if isinstance(bandwidth, bool) or not isinstance(bandwidth, (int, float, Real)):
        raise TypeError(f"bandwidth must be {expected}, got {type(bandwidth).__name__}")
    if not bandwidth > 0:
        raise ValueError(f"bandwidth must be positive, got {bandwidth}")
    if bandwidth == math.inf:
        raise ValueError("bandwidth must be finite, got inf")
    return float(bandwidth)
