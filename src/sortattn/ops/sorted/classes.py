"""Attention of 16-bit inputs by classes of equal coordinates: the operator, and which calls it serves.

`y_m` is a sum over dimensions of what depends on `q_md` alone, and of 16 bits few coordinates differ: some 3,000 of
16,384 in bfloat16, half of them in float16. It is summed once for each.
"""

import torch
from torch import Tensor

from ...kernels import SidedKernel, Terms
from ...validation import Problem
from ..direct import plain, shortcut
from .tracks import tracks_of

_TYPES = (torch.float16, torch.bfloat16)


def here(query: Tensor) -> bool:
    """Whether there is such a way for these points."""
    return query.is_cuda and query.dtype in _TYPES


def serves(problem: Problem, kernel: SidedKernel) -> bool:
    """Whether it serves this call: without gradients, and a kernel without jumps, far from zero none or constant."""
    given = (problem.query, problem.key, problem.value)
    # the order of equal keys is not fixed
    if not here(problem.query) or torch.are_deterministic_algorithms_enabled() or not all(x.numel() for x in given):
        return False
    if not (plain(*given) or torch.compiler.is_compiling()) or len(kernel.parts()) > 1:
        return False
    terms = kernel.terms()
    learned = (*given, problem.bandwidth, terms.below)
    if torch.is_grad_enabled() and any(part.requires_grad for part in learned if isinstance(part, Tensor)):
        return False
    from .cuda_classes import plan

    known = terms.compact or terms.folded == 1 or (terms.rate > 0 and torch.equal(terms.below, terms.above))
    return known and not tracks_of(terms, False).halves and plan(problem.query, problem.value) is not None


def attention(problem: Problem, kernel: SidedKernel) -> Tensor:
    """Normalised kernel sums, `(P, M, C)`, of a call that it serves."""
    bandwidth, tau = None, problem.bandwidth
    if isinstance(tau, Tensor):
        bandwidth, tau = tau.to(torch.float64).reshape(-1), 0.0
    terms = kernel.terms()
    return _directly(
        problem.query, problem.key, problem.value, problem.weight, bandwidth, terms.nodes, terms.below, tau, terms.rate,
        terms.compact, terms.folded, terms.constant, problem.group, kernel.floor,
    )  # fmt: skip


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bandwidth: Tensor | None,
    nodes: Tensor,
    below: Tensor,
    tau: float,
    rate: float,
    compact: bool,
    folded: int,
    constant: float,
    group: int,
    floor: float,
) -> Tensor:
    """The rows `(P, M, C)`; without `weight (P, N)` all are one, without `bandwidth (P,)` it is `tau` for all."""
    from . import cuda_classes

    terms = Terms(nodes, below, below, rate, compact, folded, constant)
    spread = tau if bandwidth is None else bandwidth
    return cuda_classes.attention(query, key, value, weight, terms, spread, group, floor)


class_attention = torch.library.custom_op("sortattn::class_attention", _attend, mutates_args=())
_directly = shortcut(class_attention, _attend)


@class_attention.register_fake
def _(query, key, value, *_):
    return query.new_empty(*query.shape[:2], value.shape[2])
