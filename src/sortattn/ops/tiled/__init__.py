"""Exact and quadratic, but never an M x N matrix: blocks of queries against blocks of keys, forward and backward.

`softmax`, and on GPUs `gauss`, are torch's own attention where it can serve them. All else is summed by kernels of our
own, on CUDA devices and on the CPU, where there is one, and else block by block through the dense formula.
"""

from torch import Tensor

from ...kernels import ExponentialKernel, Kernel, known
from ...normalise import poisoned
from ...validation import Problem
from ..parameters import parameters_at
from . import cpu, cuda, sdpa
from .api import tiled_sum_directly


def why_not(problem: Problem, kernel: Kernel, normalised: bool) -> str | None:
    """Why this cannot serve the call, or None if it can."""
    if not known(kernel):
        return f"tiled sums kernels by name, Spline and PolynomialExponential, not {kernel.name}; 'reference' sums any"
    return None


def attention(problem: Problem, kernel: Kernel) -> Tensor:
    """`y_m = sum_n Phi(q_m, k_n) v_n / sum_n Phi(q_m, k_n)`, `(P, M, C)`."""
    if sdpa.serves(problem, kernel):
        return poisoned(problem, sdpa.attention(problem, kernel))
    problem = problem.widened()
    if cuda.serves(problem.query, problem.value, kernel.name) or cpu.serves(problem.query, kernel.name):
        # which looks for what is no number by itself
        return _sum(problem, kernel, problem.query, problem.key, normalised=True)
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
        query, key, problem.value, problem.weight, None if fixed else problem.bandwidth, parameters_at(query, kernel),
        problem.bandwidth if fixed else 0.0, kernel.name, problem.causal, problem.group, normalised,
        problem.dtype.itemsize == 2,
    )  # fmt: skip
    return rows
