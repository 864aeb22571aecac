"""The sorted backend as `attention` sees it."""

from dataclasses import replace

import torch
from torch import Tensor

from ...cuda.support import trouble
from ...kernels import KERNELS, Kernel, SidedKernel, rebuild
from ...validation import Problem, autocasts
from ..direct import plain
from ..recorded import recorded
from ..repeated import Again
from . import classes
from .api import gradients_directly, sided_sum_directly
from .lines import walker
from .quotient import _unfit, quotient_directly, unfit
from .separable import collect, spread


def why_not(problem: Problem, kernel: Kernel, normalised: bool) -> str | None:
    """Why this backend cannot serve the call, or None if it can."""
    if not isinstance(kernel, SidedKernel):
        return f"sorting sums additive kernels such as add_laplace, add_riesz and add_bump, not {kernel.name}"
    if problem.query.device.type not in ("cpu", "cuda"):
        return f"the sorted backend runs on the CPU and on NVIDIA GPUs, got tensors on {problem.query.device}"
    if problem.query.device.type == "cuda":
        return trouble(problem.query.device.index)
    return None


def attention(problem: Problem, kernel: SidedKernel) -> Tensor:
    """Normalised kernel sums, `(P, M, C)`."""
    if classes.simple(problem, kernel):
        terms = classes.terms_of(kernel)
        if classes.serves(problem, terms):
            return classes.attention(problem, terms, kernel.floor)
        walk = walker(problem.query.device.type)
        # kernels with a separable part have none of these
        if hasattr(walk, "attention") and (terms.compact or terms.rate or terms.folded):
            narrow = classes.walks(problem, terms)
            return classes.attention(
                problem.as_given() if narrow else problem.widened(), terms, kernel.floor, walk.attention
            )
    problem = problem.widened()
    rows, total = sums(problem, kernel)
    points = problem.query.detach(), problem.key.detach(), problem.value.detach()
    found = (_unfit if plain(*points) else unfit)(*points, problem.group)
    if isinstance(problem.bandwidth, Tensor):
        found = found | ~problem.bandwidth.detach().isfinite().reshape(-1, 1)
    return quotient_directly(rows, total, found, kernel.floor)


def again(query: Tensor, key: Tensor, value: Tensor, problem: Problem, kernel: SidedKernel) -> Again | None:
    """What serves calls like this one, which is that problem, without a look at them: on a GPU, without gradients."""
    given, walk = (query, key, value), walker(problem.query.device.type)
    if not hasattr(walk, "attention") or not all(part.dtype == torch.float32 for part in given):
        return None
    alike = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    if not alike or isinstance(problem.bandwidth, Tensor) or autocasts(query.device.type):
        return None
    terms = classes.terms_of(kernel)
    if not classes.simple(problem, kernel) or not (terms.compact or terms.rate or terms.folded):
        return None
    options = None, terms, problem.bandwidth, 1, kernel.floor

    def run(stream: int, *given: Tensor) -> Tensor | None:
        if torch.are_deterministic_algorithms_enabled():
            return None
        points = (part.view(-1, *part.shape[-2:]) for part in given)
        return walk.attention(*points, *options).view(*given[0].shape[:-1], given[2].shape[-1])

    return run


def kernel_sum(problem: Problem, kernel: SidedKernel) -> Tensor:
    """Kernel sums, `(P, M, C)`."""
    return sums(problem, kernel)[0]


def sums(problem: Problem, kernel: SidedKernel) -> tuple[Tensor, Tensor]:
    """Kernel sums of values `(P, M, C)` and of weights `(P, M)` in the working type, of all keys whatever is causal."""
    problem = _tame(problem)
    (rows, total), *rest = (_part(problem, part) for part in kernel.parts())
    for more, more_total in rest:
        rows, total = rows + more, total + more_total
    return rows, total


def gradients(
    problem: Problem, name: str, parameters: Tensor | None, learned: bool, grad: Tensor, grad_total: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, bandwidth and parameters from those of both `sums`; None where there is none.

    For a caller that does not record: the kernel is that of this name with these parameters, which may be `learned`.
    """
    problem = _tame(problem)
    bandwidth, tau = _numbers_of(problem)
    if parameters is None:
        # of the sums nothing is needed
        terms = KERNELS[name].terms()
        none = problem.query.new_empty(*problem.query.shape[::2], 0, dtype=torch.int32)
        by_query, by_key, by_value, _, by_bandwidth, *_ = gradients_directly(
            grad, grad_total, *_points(problem), problem.weight, bandwidth, terms.nodes, terms.below, terms.above, none,
            none, tau, terms.rate, terms.compact, terms.folded, terms.constant, True, bandwidth is not None, True,
            False, problem.dtype.itemsize < 4,
        )  # fmt: skip
        by_bandwidth = None if bandwidth is None else by_bandwidth.reshape(problem.bandwidth.shape)
        return by_query, by_key, by_value, by_bandwidth, None

    def again() -> list[Tensor | None]:
        given = problem.query, problem.key, problem.value, problem.bandwidth, parameters
        wanted = (True, True, True, bandwidth is not None, learned)
        leaves = [part.detach().requires_grad_() if asked else part for part, asked in zip(given, wanted, strict=True)]
        made = sums(replace(problem, **dict(zip(_LEARNED, leaves[:-1], strict=True))), rebuild(name, leaves[-1]))
        asked = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        found = iter(torch.autograd.grad(made, asked, (grad, grad_total), materialize_grads=True))
        return [next(found) if want else None for want in wanted]

    return tuple(recorded(again))


_LEARNED = ("query", "key", "value", "bandwidth")


def _tame(problem: Problem) -> Problem:
    if not isinstance(problem.bandwidth, Tensor):
        return problem
    # the head of a NaN or an infinity is found by whoever asks for the sums; here windows and tiles need a number
    return replace(problem, bandwidth=torch.where(problem.bandwidth.isfinite(), problem.bandwidth, 1.0))


def _points(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    # heads of a group are sorted together: what is no number in one of them must not reach the others
    query = problem.query.nan_to_num(0.0, 0.0, 0.0) if problem.group > 1 else problem.query
    return query, problem.key, problem.value


def _numbers_of(problem: Problem) -> tuple[Tensor | None, float]:
    """The bandwidths `(P,)` in float64, or the one of all problems."""
    if isinstance(problem.bandwidth, Tensor):
        return problem.bandwidth.to(torch.float64).reshape(-1), 0.0
    return None, problem.bandwidth


def _part(problem: Problem, kernel: SidedKernel) -> tuple[Tensor, Tensor]:
    query, key, value = _points(problem)
    bandwidth, tau = _numbers_of(problem)
    terms = kernel.terms()
    # it comes first, so that the backward pass comes to it last, when the sorted sums hold no memory
    parts = kernel.separable(query, key, problem.bandwidth)
    if parts is not None:
        row, column = parts
        weight = value.new_ones(value.shape[:2]) if problem.weight is None else problem.weight
        factors = torch.stack([weight, column * weight], 1)
        vectors, counts = collect(factors, value), factors.sum(-1)
    # the argsorts, which only the backward pass needs, are not kept alive by a name here
    rows, total = sided_sum_directly(
        query, key, value, problem.weight, bandwidth, terms.nodes, terms.below, terms.above, tau, terms.rate,
        terms.compact, terms.folded, terms.constant, True, problem.dtype.itemsize < 4,
    )[:2]  # fmt: skip
    if parts is not None:
        rows = spread(rows, torch.stack([row, torch.ones_like(row)], 1), vectors)
        total = total + row * counts[:, :1] + counts[:, 1:]
    return rows, total
