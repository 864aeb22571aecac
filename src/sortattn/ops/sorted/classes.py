"""Attention of 16-bit inputs on a GPU by classes of equal coordinates: which calls go that way.

`y_m` is a sum over dimensions of what depends on `q_md` alone, and of 16 bits few coordinates differ: some 3,000 of
16,384 in bfloat16, half of them in float16. It is summed once for each, see classes.cu. Rows are kept as means in the
same 16 bits on the way, so a result may be off by up to 1.7 times as much as by its own rounding.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels import KERNELS, SidedKernel, Terms
from ...validation import Problem
from ..direct import plain

# queries and keys of a head from which on that is faster on an H200: for walks with tensor cores, and for others
LEAST = {torch.bfloat16: (4096, 16_384), torch.float16: (8192, 32_768)}


# of the coefficients of a polynomial, what the first one has to be
_VANISHING = 1e-3


def terms_of(kernel: SidedKernel) -> Terms:
    """Its terms; those that everybody has are made once, as next to a short call that takes its time."""
    return _terms(kernel.name) if KERNELS.get(kernel.name) is kernel else kernel.terms()


@functools.lru_cache(maxsize=64)
def _terms(name: str) -> Terms:
    return KERNELS[name].terms()


def here(query: Tensor, dtype: torch.dtype) -> bool:
    """Whether there is such a way for these points of a caller's type."""
    return query.is_cuda and dtype in LEAST


def serves(problem: Problem, terms: Terms) -> bool:
    """Whether a simple call goes that way: with a kernel without jumps that is never negative."""
    if not here(problem.query, problem.dtype):
        return False
    length = min(problem.query.shape[1], problem.key.shape[1])
    if length < min(LEAST[problem.dtype]):
        return False
    from .cuda_classes import plan
    from .cuda_spool import pitch_of

    tensor = terms.rate > 0 or pitch_of(problem.value, problem.dtype, terms, problem.bandwidth) > 0
    if length < LEAST[problem.dtype][0 if tensor else 1]:
        return False
    return _is_mean(terms) and plan(problem.query, problem.value, terms) is not None


def walks(problem: Problem, terms: Terms) -> bool:
    """Whether a simple call has its points sorted one by one, and rows of 16 bits walked as they are, see relay.cu."""
    if not here(problem.query, problem.dtype):
        return False
    from . import cuda_relay, cuda_walk, room
    from .tracks import tracks_of

    width = cuda_walk.width_of(problem.value.shape[2], problem.dtype)
    return cuda_relay.takes(tracks_of(terms, False), width, 2, room.device(problem.query.device).shared)


def simple(problem: Problem, kernel: SidedKernel) -> bool:
    """Whether a call is eager and has no gradients, nor results in an order that is fixed, nor kernels in parts."""
    given = (problem.query, problem.key, problem.value)
    if not (plain(*given) and all(part.numel() for part in given)):
        return False
    # the order of equal keys is not fixed
    if torch.are_deterministic_algorithms_enabled() or len(kernel.parts()) > 1:
        return False
    learned = (*given, problem.bandwidth, terms_of(kernel).below)
    return not (torch.is_grad_enabled() and any(part.requires_grad for part in learned if isinstance(part, Tensor)))


def attention(problem: Problem, terms: Terms, floor: float, way: Callable[..., Tensor] | None = None) -> Tensor:
    """Normalised kernel sums, `(P, M, C)`, of a simple call: that goes this way, or another one."""
    if way is None:
        from .cuda_classes import attention as way

        problem = problem.as_given()
        if problem.weight is not None:
            problem = replace(problem, key=_beside_others(problem.key, problem.weight))
    bandwidth = problem.bandwidth
    given = (problem.query, problem.key, problem.value, problem.weight, terms)
    if not isinstance(bandwidth, Tensor):
        return way(*given, bandwidth, problem.group, floor)
    # the head of a NaN or an infinity is NaN, and a walk needs a number
    bandwidth = bandwidth.to(torch.float64).reshape(-1)
    finite = bandwidth.isfinite()
    rows = way(*given, torch.where(finite, bandwidth, 1.0), problem.group, floor)
    return torch.where(finite[:, None, None], rows, torch.nan)


def _beside_others(key: Tensor, weight: Tensor) -> Tensor:
    """Keys that do not count, where one stands that does: weights of 16 bits are made for the nearest key."""
    some = weight.argmax(-1)[:, None, None].expand(-1, 1, key.shape[2])
    return torch.where(weight[..., None] != 0, key, key.gather(1, some))


def _is_mean(terms: Terms) -> bool:
    """Whether sums by this kernel, divided by those of its weights, are means, so that they fit into 16 bits.

    So have to do the weights themselves, of which one may be small close to where an exponential's polynomial vanishes.
    """
    if terms.folded:
        return True
    below = terms.below.tolist()
    if terms.rate:
        return min(below[0]) >= 0 and below[0][0] > _VANISHING * sum(below[0])
    nodes = terms.nodes.tolist()

    def value(at: float) -> float:
        return sum(slope * (at - node) for node, (_, slope) in zip(nodes, below, strict=True) if node < at)

    return terms.compact and not any(jump for jump, _ in below) and min(map(value, nodes)) > -1e-9
