"""Finite feature maps: `sum_n <f(q_m), f(k_n)> v_n = f(q_m) (sum_n f(k_n) v_n^T)`, in linear time.

Causal sums go chunk by chunk: what earlier chunks hold is one matrix, what the own chunk holds a small dense product.
"""

import torch
from torch import Tensor

from ..kernels import FeatureKernel, Kernel, scaled, widened
from ..normalise import normalise
from ..validation import Problem

_CHUNK = 128
# points of a product, at most: of longer ones some libraries have threads sum parts, whose number the bits then show
_BLOCK = 512


def why_not(problem: Problem, kernel: Kernel, normalised: bool) -> str | None:
    """Why this backend cannot serve the call, or None if it can."""
    if not isinstance(kernel, FeatureKernel):
        return f"it needs a finite feature map (tri, relu, elu, dpfp), which {kernel.name} does not have"
    return None


def attention(problem: Problem, kernel: FeatureKernel) -> Tensor:
    """Normalised kernel sums, `(P, M, C)`."""
    return normalise(problem, *_sums(problem, kernel), kernel.floor)


def kernel_sum(problem: Problem, kernel: FeatureKernel) -> Tensor:
    """Kernel sums, `(P, M, C)`."""
    return _sums(problem, kernel)[0]


def _sums(problem: Problem, kernel: FeatureKernel) -> tuple[Tensor, Tensor]:
    query, key = kernel.center(problem.query, problem.key)
    query, key = (widened(kernel.features(scaled(points, problem.bandwidth))) for points in (query, key))
    value = problem.value
    if problem.weight is not None:
        key = key * problem.weight[..., None]
    ones = value.new_ones(*value.shape[:2], 1)
    channels, value = value.shape[-1], widened(torch.cat([value, ones], -1))
    sums = _causal(problem, query, key, value) if problem.causal else _read(query, _collect(key, value))
    return sums[..., :channels], sums[..., channels]


def _collect(key: Tensor, value: Tensor) -> Tensor:
    """`sum_n f(k_n) v_n^T`, `(P, F, C)`, block by block."""
    (blocks, rest), (rows, others) = _cut(key), _cut(value)
    return (blocks.transpose(-1, -2) @ rows).sum(1) + rest.transpose(1, 2) @ others


def _read(query: Tensor, state: Tensor) -> Tensor:
    """`f(q_m) state`, `(P, M, C)`; by blocks, so that its derivative by the state is too."""
    blocks, rest = _cut(query)
    return torch.cat([(blocks @ state[:, None]).flatten(1, 2), rest @ state], 1)


def _cut(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Whole blocks of `rows (P, N, ...)`, and what is behind them."""
    number = rows.shape[1] // _BLOCK
    return rows[:, : number * _BLOCK].unflatten(1, (number, _BLOCK)), rows[:, number * _BLOCK :]


def _causal(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Query m sees the keys `n <= m + N - M`."""
    problems, columns = key.shape[:2]
    rows = problem.rows
    query = query.reshape(problems, problem.group, rows, query.shape[2])
    # the first N - M keys are seen by all, the first M - N queries see none; no max, as a compiler's sizes are symbols
    early = columns - rows if columns > rows else 0
    blind = rows - columns if rows > columns else 0
    state = _collect(key[:, :early], value[:, :early])
    sums = _square(query[:, :, blind:], key[:, early:], value[:, early:], state)
    sums = torch.nn.functional.pad(sums, (0, 0, blind, 0))
    return sums.reshape(problems, problem.group * rows, value.shape[2])


def _square(query: Tensor, key: Tensor, value: Tensor, state: Tensor) -> Tensor:
    """As many queries `(P, group, L, F)` as keys `(P, L, F)`; `state (P, F, C)` is seen by all."""
    problems, length = key.shape[:2]
    chunks = (length + _CHUNK - 1) // _CHUNK
    rest = chunks * _CHUNK - length

    def cut(rows: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(rows, (0, 0, 0, rest))
        return padded.reshape(*rows.shape[:-2], chunks, _CHUNK, rows.shape[-1])

    query, key, value = cut(query), cut(key), cut(value)
    own = key.transpose(-1, -2) @ value
    before = state[:, None] + own.cumsum(1) - own
    near = (query @ key.transpose(-1, -2)[:, None]).tril() @ value[:, None]
    sums = query @ before[:, None] + near
    return sums.reshape(problems, query.shape[1], chunks * _CHUNK, value.shape[-1])[:, :, :length]
