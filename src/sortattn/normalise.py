"""From kernel sums to attention, and what becomes of heads that hold no numbers."""

import torch
from torch import Tensor

from .validation import Problem


def normalise(problem: Problem, sums: Tensor, total: Tensor, floor: float) -> Tensor:
    """`sums (P, M, C) / total (P, M)`, zero where no key is seen; a positive `floor` clamps the total."""
    if floor:
        weight = 1.0 / total.clamp(min=floor)
    else:
        # a query without any weight has no gradient either; below `tiny` a reciprocal is infinite
        empty = total.abs() < torch.finfo(total.dtype).tiny
        total = torch.where(empty, 1.0, total)
        # by way of a number close to one: the derivative of a reciprocal is its square, which overflows from 1e-19 on
        scale = 1.0 / total.detach()
        weight = torch.where(empty, 0.0, scale / (total * scale))
    # times the reciprocal: the derivative of a quotient would make several more tensors of the size of the sums
    return sums * (poison(problem) * weight)[..., None]


def reciprocal(total: Tensor, floor: float = 0.0) -> Tensor:
    """One over the total as in `normalise`, for those who know the derivative by themselves."""
    if floor:
        return 1.0 / total.clamp(min=floor)
    # below `tiny` a reciprocal is infinite
    empty = total.abs() < torch.finfo(total.dtype).tiny
    return torch.where(empty, 0.0, 1.0 / torch.where(empty, 1.0, total))


def through_quotient(grad: Tensor, rows: Tensor, total: Tensor, floor: float = 0.0) -> tuple[Tensor, Tensor]:
    """The gradients by the sums `(P, M, C)` and by the total `(P, M)` from that by `rows`, which is their quotient."""
    inverse = reciprocal(total, floor)
    grad_total = -(grad * rows).sum(-1) * inverse
    if floor:
        grad_total = torch.where(total < floor, 0.0, grad_total)
    return grad * inverse[..., None], grad_total


def poisoned(problem: Problem, rows: Tensor) -> Tensor:
    """The rows `(P, M, C)`, NaN in every head that holds a NaN or an infinity."""
    return rows * poison(problem)[..., None]


def poison(problem: Problem) -> Tensor:
    """`(P, 1)`, or `(P, M)` for grouped heads: one, or NaN for the rows of a head whose inputs, its bandwidth among
    them, are not all finite."""
    return poison_of(problem.query, problem.key, problem.value, problem.bandwidth, problem.group)


def poison_of(query: Tensor, key: Tensor, value: Tensor, bandwidth: float | Tensor | None, group: int) -> Tensor:
    """The same from tensors `(P, ...)`."""
    problems, rows = query.shape[0], query.shape[1] // group
    # query heads of a group are told apart, what they share counts for all of them
    queries = query.detach().reshape(problems, group, rows * query.shape[2])
    shared = (part.detach().flatten(1)[:, None] for part in (key, value))
    parts = [part for part in (queries, *shared) if part.numel()]
    ones = query.new_ones(problems, group)
    if parts:
        # a NaN makes both extremes NaN, an infinity one of them: no mask of the size of the input is made; and two
        # reductions are six times as fast as one `aminmax`, which is not vectorised and does not survive a fork
        extremes = [extreme(2).expand(problems, group) for part in parts for extreme in (part.amin, part.amax)]
        if isinstance(bandwidth, Tensor):
            extremes.append(bandwidth.detach().reshape(problems, 1).expand(problems, group))
        ones = torch.where(torch.stack(extremes).isfinite().all(0), ones, torch.nan)
    return ones if group == 1 else ones.repeat_interleave(rows, 1)
