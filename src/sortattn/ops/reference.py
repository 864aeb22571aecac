"""The definition: a dense Gram matrix, any kernel, any dtype. Quadratic in time and memory."""

import torch
from torch import Tensor

from ..kernels import ExponentialKernel, Kernel
from ..normalise import normalise, poisoned
from ..validation import Problem


def why_not(problem: Problem, kernel: Kernel, normalised: bool) -> str | None:
    """The definition serves every call."""
    return None


def attention(problem: Problem, kernel: Kernel) -> Tensor:
    """`y_m = sum_n Phi(q_m, k_n) v_n / sum_n Phi(q_m, k_n)`, `(P, M, C)`."""
    if isinstance(kernel, ExponentialKernel):
        weights = _softmax(kernel.log_gram(*kernel.center(problem.query, problem.key), problem.bandwidth), problem)
        return poisoned(problem, weights @ problem.value)
    gram = _masked(kernel.gram(problem.query, problem.key, problem.bandwidth), problem)
    return normalise(problem, gram @ problem.value, gram.sum(-1), kernel.floor)


def kernel_sum(problem: Problem, kernel: Kernel) -> Tensor:
    """`z_m = sum_n Phi(q_m, k_n) v_n`, `(P, M, C)`."""
    return _masked(kernel.gram(problem.query, problem.key, problem.bandwidth), problem) @ problem.value


def _seen(problem: Problem) -> Tensor | None:
    """True where a query sees a key, broadcastable to `(P, M, N)`; None if all see all."""
    seen = None if problem.weight is None else problem.weight[:, None, :] != 0
    visible = problem.visible(0, problem.query.shape[1])
    if visible is not None:
        causal = torch.arange(problem.key.shape[1], device=problem.key.device) < visible[:, None]
        seen = causal[None] if seen is None else seen & causal
    return seen


def _masked(gram: Tensor, problem: Problem) -> Tensor:
    seen = _seen(problem)
    return gram if seen is None else torch.where(seen, gram, 0.0)


def _softmax(scores: Tensor, problem: Problem) -> Tensor:
    seen = _seen(problem)
    if seen is None:
        return scores.softmax(-1)
    # a row that sees nothing is given finite scores first and zeros afterwards: no NaN, not in the gradient either
    blind = ~seen.any(-1, keepdim=True)
    weights = torch.where(seen | blind, scores, -torch.inf).softmax(-1)
    return torch.where(blind, 0.0, weights)
