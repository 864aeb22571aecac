"""The paper's reference for large sizes: KeOps, an optional extra that needs a C++ compiler."""

import importlib.util

import torch
from torch import Tensor

from ..kernels import (
    RIESZ_EPSILON,
    AddBump,
    AddLaplace,
    AddRiesz,
    ExponentialKernel,
    Gauss,
    Kernel,
    Laplace,
    Riesz,
    Softmax,
)  # fmt: skip
from ..normalise import normalise, poisoned
from ..validation import Problem

_SERVED = (Softmax, Gauss, Laplace, Riesz, AddRiesz, AddLaplace, AddBump)


def why_not(problem: Problem, kernel: Kernel, normalised: bool) -> str | None:
    """Why this backend cannot serve the call, or None if it can."""
    if importlib.util.find_spec("pykeops") is None:
        return "pykeops is not installed; pip install 'sortattn[keops]'"
    if not isinstance(kernel, _SERVED):
        return f"it serves {', '.join(kind.name for kind in _SERVED)}, not {kernel.name}"
    if problem.causal:
        return "it has no causal mask; use backend='tiled' or 'auto'"
    return None


def attention(problem: Problem, kernel: Kernel) -> Tensor:
    """Normalised kernel sums, `(P, M, C)`."""
    if isinstance(kernel, ExponentialKernel):
        query, key = kernel.center(problem.query, problem.key)
        scores = _scores(kernel, query, key, problem.bandwidth)
        if problem.weight is not None:
            from pykeops.torch import LazyTensor

            scores = scores + LazyTensor(torch.where(problem.weight == 0, -1e30, 0.0)[:, None, :, None].contiguous())
        out = scores.sumsoftmaxweight(_columns(problem.value), dim=2)
        seen = 1.0 if problem.weight is None else (problem.weight.sum(-1) > 0)[:, None, None]
        return poisoned(problem, out * seen)
    ones = problem.value.new_ones(problem.value.shape[:2]) if problem.weight is None else problem.weight
    sums = _sums(problem, kernel, torch.cat([problem.value, ones[..., None]], -1))
    return normalise(problem, sums[..., :-1], sums[..., -1], kernel.floor)


def kernel_sum(problem: Problem, kernel: Kernel) -> Tensor:
    """Kernel sums, `(P, M, C)`."""
    return _sums(problem, kernel, problem.value)


def _sums(problem: Problem, kernel: Kernel, value: Tensor) -> Tensor:
    scores = _scores(kernel, problem.query, problem.key, problem.bandwidth)
    weights = scores.exp() if isinstance(kernel, ExponentialKernel) else scores
    return (weights * _columns(value)).sum(2)


def _columns(rows: Tensor):
    from pykeops.torch import LazyTensor

    return LazyTensor(rows[:, None].contiguous())


def _scores(kernel: Kernel, query: Tensor, key: Tensor, bandwidth: float | Tensor):
    """The kernel, or its logarithm where it has one, as a symbolic matrix."""
    from pykeops.torch import LazyTensor

    rows = LazyTensor((query / bandwidth)[:, :, None].contiguous())
    columns = LazyTensor((key / bandwidth)[:, None].contiguous())
    if isinstance(kernel, Softmax):
        return (rows * columns).sum(-1)
    if isinstance(kernel, Gauss):
        return -((rows - columns) ** 2).sum(-1) / 2
    if isinstance(kernel, Laplace):
        return -(rows - columns).abs().sum(-1)
    if isinstance(kernel, Riesz):
        distance = ((rows - columns) ** 2).sum(-1).sqrt()
        return (rows**2).sum(-1).sqrt() + (columns**2).sum(-1).sqrt() - distance + RIESZ_EPSILON
    if isinstance(kernel, AddRiesz):
        return (rows.abs() + columns.abs() - (rows - columns).abs()).sum(-1) + RIESZ_EPSILON * query.shape[-1]
    if isinstance(kernel, AddLaplace):
        return (-(rows - columns).abs()).exp().sum(-1)
    return (1 - (rows - columns).abs()).relu().sum(-1)
