"""Exact and quadratic, but never an M x N matrix: blocks of queries against blocks of keys, forward and backward.

`softmax` and `gauss` are torch's own attention where it can serve them. All else is summed on CUDA devices by a kernel
of our own, where there is one, and else block by block through the dense formula.
"""

from weakref import WeakKeyDictionary

from torch import Tensor

from ...kernels import KERNELS, ExponentialKernel, Kernel
from ...normalise import poisoned
from ...validation import Problem
from ..direct import plain
from . import cuda, sdpa
from .api import tiled_sum_directly

# the numbers of kernels on CUDA devices, and of which tensors in which state they are a copy
_copies: WeakKeyDictionary[Kernel, tuple[tuple, Tensor]] = WeakKeyDictionary()


def why_not(problem: Problem, kernel: Kernel, normalised: bool) -> str | None:
    """Blocks serve every call."""
    return None


def attention(problem: Problem, kernel: Kernel) -> Tensor:
    """`y_m = sum_n Phi(q_m, k_n) v_n / sum_n Phi(q_m, k_n)`, `(P, M, C)`."""
    if sdpa.serves(problem, kernel):
        return poisoned(problem, sdpa.attention(problem, kernel))
    problem = problem.widened()
    if cuda.serves(problem.query, problem.value, kernel.name):
        # which looks for what is no number by itself
        rows = _sum(problem, kernel, problem.query, problem.key, normalised=True)
        # the backward pass needs them as they are, and the output may be changed in place
        return rows.clone() if rows.requires_grad else rows
    points = problem.query, problem.key
    if isinstance(kernel, ExponentialKernel):
        points = kernel.center(*points)
    return poisoned(problem, _sum(problem, kernel, *points, normalised=True))


def kernel_sum(problem: Problem, kernel: Kernel) -> Tensor:
    """`z_m = sum_n Phi(q_m, k_n) v_n`, `(P, M, C)`."""
    return _sum(problem, kernel, problem.query, problem.key, normalised=False)


def _sum(problem: Problem, kernel: Kernel, query: Tensor, key: Tensor, normalised: bool) -> Tensor:
    fixed = isinstance(problem.bandwidth, float)
    rows, _, _ = tiled_sum_directly(
        query, key, problem.value, problem.weight, None if fixed else problem.bandwidth, _parameters(kernel, query),
        problem.bandwidth if fixed else 0.0, kernel.name, problem.causal, problem.group, normalised,
        problem.dtype.itemsize == 2,
    )  # fmt: skip
    return rows


def _parameters(kernel: Kernel, query: Tensor) -> Tensor | None:
    """The numbers of a kernel where the queries are."""
    if kernel.name in KERNELS:
        return None
    tensors = [part for part in vars(kernel).values() if isinstance(part, Tensor)]
    # here and not in the operator: a gradient goes back to where the parameters are only if somebody asks for it
    if not query.is_cuda or not plain(query, *tensors) or any(part.requires_grad for part in tensors):
        parameters = kernel.parameters()
        return None if parameters is None else parameters.to(query.device)
    # a copy waits for the device, and no graph can hold it: one is made as often as the tensors change
    state = query.device, *((id(part), part._version) for part in tensors)
    found = _copies.get(kernel)
    if found is None or found[0] != state:
        parameters = kernel.parameters()
        found = _copies[kernel] = state, None if parameters is None else parameters.to(query.device)
    return found[1]
