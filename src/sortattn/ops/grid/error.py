"""The grid's estimate of its own error: some of the queries once more, exactly."""

from dataclasses import replace

import torch
from torch import Tensor

from ...kernels import SidedKernel
from ...normalise import normalise
from ...validation import Problem
from .. import tiled
from . import gpu, options
from .causal import causal_sums
from .plain import sums, with_weights
from .surrogate import surrogate

# queries of every head that are compared
_ROWS = 64
# numbers in a block of the dense matrix
_BLOCK = 1 << 22
# random columns in place of values that were not given
PROBES = 32


def probes(key: Tensor) -> Tensor:
    """Unit normal values `(N, PROBES)` for keys `(..., N, D)`, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(key.shape[-2], PROBES, generator=generator).to(key)


@torch.no_grad()
def estimate(problem: Problem, kernel: SidedKernel, setting: str) -> Tensor:
    """The relative Frobenius error of the attention on some of the queries, a number on the problem's device."""
    wrong, size = (part.sum() for part in _squares(problem, kernel, setting))
    return torch.where(size > 0, (wrong / size).sqrt(), 0.0)


@torch.no_grad()
def worst(problem: Problem, kernel: SidedKernel, setting: str) -> Tensor:
    """The largest of such errors of single heads: large values of one of them do not hide another."""
    wrong, size = _squares(problem, kernel, setting)
    return torch.where(size > 0, (wrong / size).sqrt(), 0.0).amax()


def _squares(problem: Problem, kernel: SidedKernel, setting: str) -> tuple[Tensor, Tensor]:
    """By head, the squared norms of the error and of the output, on some of the queries."""
    query = problem.query.nan_to_num(0.0, 0.0, 0.0) if problem.group > 1 else problem.query
    count = options.count(setting, kernel, query.shape[2])
    places = _places(problem)
    chosen = replace(problem, query=problem.query[:, places], group=1)

    def output(found: Tensor) -> Tensor:
        return normalise(chosen, found[..., :-1], found[..., -1], kernel.floor).double()

    if gpu.serves(problem, count):
        from .gpu import api

        approximate = api.attention(problem.as_given(), kernel, count)[:, places].double()
    elif problem.causal:
        grid = surrogate(problem, kernel, query, count)
        approximate = output(causal_sums(problem, kernel, query, grid)[:, places])
    else:
        approximate = output(sums(problem, kernel, query[:, places], surrogate(problem, kernel, query, count)))
    if query.is_cuda and not problem.causal:
        exact = tiled.attention(chosen, kernel).double()
    else:
        exact = output(_exact(problem, kernel, query[:, places], places))
    return (approximate - exact).square().sum((1, 2)), exact.square().sum((1, 2))


def _places(problem: Problem) -> Tensor:
    """Queries spread over the rows of every head of a group."""
    rows, group = problem.rows, problem.group
    count = min(_ROWS, rows)
    each = torch.arange(count, device=problem.query.device) * rows // max(count, 1) + rows // (2 * max(count, 1))
    heads = torch.arange(group, device=problem.query.device)[:, None] * rows
    return (heads + each).flatten()


def _exact(problem: Problem, kernel: SidedKernel, query: Tensor, places: Tensor) -> Tensor:
    rows = with_weights(problem)
    problems, columns = rows.shape[:2]
    visible = problem.visible(0, problem.query.shape[1])
    found = rows.new_zeros(problems, query.shape[1], rows.shape[2])
    step = max(1, _BLOCK // max(1, problems * query.shape[1]))
    for n in range(0, columns, step):
        some = slice(n, n + step)
        gram = kernel.gram(query, problem.key[:, some], problem.bandwidth)
        if visible is not None:
            index = torch.arange(n, min(n + step, columns), device=gram.device)
            gram = torch.where(index < visible[places][:, None], gram, 0.0)
        found += gram @ rows[:, some]
    return found
