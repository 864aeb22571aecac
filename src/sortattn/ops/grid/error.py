"""The grid's error, estimated: some of the queries once more, exactly."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels import SidedKernel
from ...validation import Problem
from .. import tiled
from . import Grid

# queries of every head that are compared; of causal calls stretches of neighbours, each of which is a call
_ROWS, _STRETCH = 64, 16
# random columns in place of values that were not given
PROBES = 32


def probes(key: Tensor) -> Tensor:
    """Unit normal values `(N, PROBES)` for keys `(..., N, D)`, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(key.shape[-2], PROBES, generator=generator).to(key)


@torch.no_grad()
def estimate(problem: Problem, kernel: SidedKernel, grid: Grid) -> Tensor:
    """The relative Frobenius error of the attention on some of the queries, a number on the problem's device."""
    parts = _squares(problem, kernel, grid.attention(problem, kernel), normalised=True)
    return _relative(*(part.sum() for part in parts))


@torch.no_grad()
def by_head(problem: Problem, kernel: SidedKernel, rows: Tensor, normalised: bool) -> Tensor:
    """Such errors of the heads one by one, `(P,)`, of what a grid gave, `rows (P, M, C)`."""
    return _relative(*_squares(problem, kernel, rows, normalised))


def _relative(wrong: Tensor, size: Tensor) -> Tensor:
    return torch.where(size > 0, (wrong / size).sqrt(), 0.0)


def _squares(problem: Problem, kernel: SidedKernel, rows: Tensor, normalised: bool) -> tuple[Tensor, Tensor]:
    """By head, the squared norms of the error and of the exact result, on some of the queries."""
    exactly = tiled.attention if normalised else tiled.kernel_sum
    wrong, size = torch.zeros(2, rows.shape[0], dtype=torch.float64, device=rows.device).unbind()
    for part, places in _samples(problem):
        exact = exactly(part, kernel).double()
        wrong += (rows[:, places].double() - exact).square().sum((1, 2))
        size += exact.square().sum((1, 2))
    return wrong, size


def _samples(problem: Problem) -> Iterator[tuple[Problem, Tensor]]:
    """Calls for some of the queries of every head, spread over all of them, and the places of these."""
    problem = problem.widened()
    rows, columns, device = problem.rows, problem.key.shape[1], problem.query.device
    count = min(_ROWS, rows)
    if not count:
        return
    heads = torch.arange(problem.group, device=device)[:, None] * rows
    if not problem.causal:
        places = (heads + (2 * torch.arange(count, device=device) + 1) * rows // (2 * count)).flatten()
        yield replace(problem, query=problem.query[:, places]), places
        return
    size, stretches = min(_STRETCH, count), -(-count // _STRETCH)
    for i in range(stretches):
        start = (2 * i + 1) * (rows - size) // (2 * stretches)
        places = (heads + torch.arange(start, start + size, device=device)).flatten()
        # the last of these queries sees all of these keys
        seen = max(columns - rows + start + size, 0)
        key, value, weight = (
            None if part is None else part[:, :seen] for part in (problem.key, problem.value, problem.weight)
        )
        yield replace(problem, query=problem.query[:, places], key=key, value=value, weight=weight), places
