"""The definition written down once more, independently of the package: float64, plain, slow.

Every function here takes and returns float64 tensors and never looks into `sortattn`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _half(x: Tensor) -> Tensor:
    """`max(0, x)` with derivative 1/2 at zero."""
    return (x + x.abs()) / 2


def _step(x: Tensor) -> Tensor:
    """The Heaviside function with `H(0) = 1/2`."""
    return (x.sign() + 1) / 2


def _length(x: Tensor) -> Tensor:
    """The Euclidean norm over the last dimension, with gradient zero at the origin."""
    zero = (x == 0).all(-1)
    return torch.where(zero, 0.0, torch.where(zero[..., None], 1.0, x).square().sum(-1).sqrt())


def _additive(phi: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda s, t: phi(s, t).sum(-1)


def _dpfp(x: Tensor) -> Tensor:
    """`f_(2Dj+i)(x) = r_i(x) r_(i+j)(x)` with `r = (relu(x), relu(-x))`, indices modulo 2D, j = 0, 1, 2."""
    r = torch.cat([_half(x), _half(-x)], -1)
    size = r.shape[-1]
    columns = [r[..., i] * r[..., (i + j) % size] for j in range(3) for i in range(size)]
    return torch.stack(columns, -1)


# `s (..., M, 1, D)` and `t (..., 1, N, D)`, both divided by the bandwidth, give `(..., M, N)`
FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda s, t: (s * t).sum(-1).exp(),
    "gauss": lambda s, t: (-(s - t).square().sum(-1) / 2).exp(),
    "laplace": lambda s, t: (-(s - t).abs().sum(-1)).exp(),
    "riesz": lambda s, t: _length(s) + _length(t) - _length(s - t) + 1e-3,
    "add_riesz": _additive(lambda s, t: s.abs() + t.abs() - (s - t).abs() + 1e-3),
    "add_laplace": _additive(lambda s, t: (-(s - t).abs()).exp()),
    "add_bump": _additive(lambda s, t: _half(1 - (s - t).abs())),
    "tri": _additive(lambda s, t: (s - t).cos()),
    "relu": _additive(lambda s, t: _half(s) * _half(t)),
    "elu": _additive(lambda s, t: torch.where(s > 0, s + 1, s.exp()) * torch.where(t > 0, t + 1, t.exp())),
    "dpfp": lambda s, t: (_dpfp(s) * _dpfp(t)).sum(-1),
}


def spline(nodes, slopes, offset=0.0, jumps=None) -> Callable[[Tensor, Tensor], Tensor]:
    """`f(u) = offset + slope_0 (u - x_0) + sum_j (slope_j+1 - slope_j) max(0, u - x_j) + jump_j H(u - x_j)`."""

    def phi(s, t):
        u = s - t
        total = offset + slopes[0] * (u - nodes[0])
        for j, node in enumerate(nodes):
            total = total + (slopes[j + 1] - slopes[j]) * _half(u - node)
            if jumps is not None:
                total = total + jumps[j] * _step(u - node)
        return total

    return _additive(phi)


def polynomial_exponential(coefficients) -> Callable[[Tensor, Tensor], Tensor]:
    """`f(u) = sum_i c_i |u|^i e^-|u|`."""

    def phi(s, t):
        distance = (s - t).abs()
        return sum(c * distance**i for i, c in enumerate(coefficients)) * (-distance).exp()

    return _additive(phi)


def default_bandwidth(name: str, dims: int) -> float:
    """The paper's tau."""
    if name in ("softmax", "gauss", "tri"):
        return math.sqrt(math.sqrt(dims))
    return {"laplace": 6.0, "add_laplace": 0.5, "add_bump": 1.5}.get(name, 1.0)


def visible(rows: int, columns: int) -> Tensor:
    """The causal mask, aligned at the end: the last query sees all keys, the one before all but the last, ..."""
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    for from_end in range(rows):
        seen = max(columns - from_end, 0)
        mask[rows - 1 - from_end, :seen] = True
    return mask


def weights(formula, query: Tensor, key: Tensor, bandwidth, seen: Tensor | None = None) -> Tensor:
    """`Phi(q_m / tau, k_n / tau)`, zero where `seen` (broadcast to `(..., M, N)`) is False."""
    if isinstance(bandwidth, Tensor):
        bandwidth = bandwidth[..., None, None]
    gram = formula((query / bandwidth)[..., :, None, :], (key / bandwidth)[..., None, :, :])
    return gram if seen is None else torch.where(seen, gram, 0.0)


def kernel_sum(formula, query: Tensor, key: Tensor, value: Tensor, bandwidth, seen: Tensor | None = None) -> Tensor:
    """`z_m = sum_n Phi(q_m, k_n) v_n`."""
    return weights(formula, query, key, bandwidth, seen) @ value


def attention(
    formula, query: Tensor, key: Tensor, value: Tensor, bandwidth, seen: Tensor | None = None, floor: float = 0.0
) -> Tensor:
    """`y_m = sum_n Phi(q_m, k_n) v_n / sum_n Phi(q_m, k_n)`; zero for a query that sees no key."""
    gram = weights(formula, query, key, bandwidth, seen)
    total = gram.sum(-1, keepdim=True)
    if floor:
        return (gram @ value) / total.clamp(min=floor)
    return torch.where(total == 0, 0.0, (gram @ value) / torch.where(total == 0, 1.0, total))
