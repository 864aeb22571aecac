"""The paper's weighted sums, for those who want kernel sums and not attention (MMD, KDE, slicing)."""

from dataclasses import replace

import torch
from torch import Tensor

from .attention import kernel_sum
from .kernels import Spline
from .normalise import poisoned
from .ops.direct import refuse_transforms
from .validation import make_problem

_DISTANCE = Spline(nodes=[0.0], slopes=[-1.0, 1.0])


def weighted_abs_sum(query: Tensor, key: Tensor, value: Tensor, *, backend: str = "auto") -> Tensor:
    """`z_m = sum_n |q_m - k_n|_1 v_n`, shape `(..., M, C)`: the paper's Algorithm 1, summed over the dimensions.

    >>> import torch, sortattn
    >>> sortattn.weighted_abs_sum(torch.zeros(1, 1), torch.tensor([[1.0], [-2.0]]), torch.ones(2, 1))
    tensor([[3.]])
    """
    return kernel_sum(query, key, value, _DISTANCE, backend=backend)


def weighted_laplace_sum(query: Tensor, key: Tensor, value: Tensor, *, backend: str = "auto") -> Tensor:
    """`z_m = sum_n sum_d exp(-|q_md - k_nd|) v_n`, shape `(..., M, C)`: the paper's Algorithm 3.

    >>> import torch, sortattn
    >>> sortattn.weighted_laplace_sum(torch.zeros(1, 1), torch.tensor([[1.0], [0.0]]), torch.ones(2, 1))
    tensor([[1.3679]])
    """
    return kernel_sum(query, key, value, "add_laplace", bandwidth=1.0, backend=backend)


def weighted_sign_sum(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """`(m, d) -> sum_n sign(q_md - k_nd) <v_n, weight_m>`, shape `(..., M, D)`, with `sign(0) = 0`.

    It is the derivative of `sum_m <weight_m, z_m>` by the queries, for the `z` of `weighted_abs_sum`. `weight` has the
    shape of that `z`, `(..., M, C)`. Differentiable in `value` and `weight`; in `query` and `key` it is piecewise
    constant, and its gradient is zero. `backend` is `auto`, `sorted`, `tiled` or `reference`.

    >>> import torch, sortattn
    >>> points = torch.tensor([[0.0], [1.0]])
    >>> sortattn.weighted_sign_sum(points, points, torch.ones(2, 1), torch.ones(2, 1))
    tensor([[-1.],
            [ 1.]])
    """
    problem = make_problem(query, key, value, _DISTANCE)
    expected = (*problem.leading, problem.rows, problem.value.shape[2])
    if not isinstance(weight, Tensor) or tuple(weight.shape) != expected:
        came = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"weight must have shape (..., M, C) = {expected}, got {came}")
    if weight.dtype != query.dtype or weight.device != query.device:
        raise TypeError(
            f"weight must be {query.dtype} on {query.device} like query, got {weight.dtype} on {weight.device}"
        )
    factors = weight.to(problem.query.dtype).reshape(problem.query.shape[0], problem.rows, weight.shape[-1])
    if backend in ("auto", "sorted"):
        from .ops.sorted.sign import sign_dot

        refuse_transforms(problem.query, problem.key, problem.value, factors)
        products = sign_dot(problem.query, problem.key, problem.value, factors)
    elif backend in ("tiled", "reference"):
        products = _dense_sign_sum(problem, factors, rows=64 if backend == "tiled" else max(problem.rows, 1))
    else:
        raise ValueError(f"unknown backend {backend!r}, expected one of auto, sorted, tiled, reference")
    # the sign of a NaN is zero: neither it nor an infinity would be seen in the sums; weights are looked at too
    return problem.restore(poisoned(replace(problem, query=factors), poisoned(problem, products)))


def _dense_sign_sum(problem, weight: Tensor, rows: int) -> Tensor:
    """The definition, for `rows` queries at a time."""
    parts = []
    for start in range(0, problem.rows, rows):
        queries = problem.query[:, start : start + rows]
        products = weight[:, start : start + rows] @ problem.value.transpose(1, 2)
        columns = [
            ((queries[..., d, None] - problem.key[:, None, :, d]).sign() * products).sum(-1)
            for d in range(queries.shape[-1])
        ]
        parts.append(torch.stack(columns, -1))
    return torch.cat(parts, 1) if parts else problem.query
