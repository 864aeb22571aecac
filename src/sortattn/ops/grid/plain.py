"""The sums of a call that is not causal: keys to nodes, nodes to nodes, nodes to queries."""

import torch
from torch import Tensor

from ...kernels import SidedKernel
from ...validation import Problem
from .surrogate import Surrogate


def sums(problem: Problem, kernel: SidedKernel, query: Tensor, grid: Surrogate) -> Tensor:
    """`(P, M, C + 1)`: the kernel sums of the values, and in the last channel those of the weights."""
    rows = with_weights(problem)
    table = grid.matrix(kernel) @ grid.collect(problem.key, rows)
    found = grid.read(query, table)
    parts = kernel.offsets(query, problem.key, problem.bandwidth)
    if parts is None:
        return found
    row, column = parts
    return found + row[..., None] * rows.sum(1, keepdim=True) + column[:, None] @ rows


def with_weights(problem: Problem) -> Tensor:
    """Values and, in one more channel, weights; masked values are zero already."""
    value = problem.value
    weight = value.new_ones(value.shape[:2]) if problem.weight is None else problem.weight
    return torch.cat([value, weight[..., None]], -1)
