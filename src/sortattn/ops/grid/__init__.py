"""The grid backend: additive kernels in linear time by way of nodes on every dimension, with a small known error.

A point is shared between the two nodes of its cell such that the kernel stays exact for all points outside of the
cell. Then a kernel sum is three products, keys to nodes, nodes to nodes, nodes to queries. See docs/grid.md.
"""

from dataclasses import dataclass

from torch import Tensor

from ...kernels import Kernel, SidedKernel, Spline
from ...normalise import normalise
from ...validation import Problem
from ..direct import refuse_transforms
from . import gpu, options
from .causal import causal_sums
from .plain import sums
from .surrogate import surrogate


@dataclass(frozen=True)
class Grid:
    """The backend with a `setting`, the part behind the colon of `"grid:64"`; empty for the default."""

    setting: str = ""

    def why_not(self, problem: Problem, kernel: Kernel, normalised: bool) -> str | None:
        """Why this backend cannot serve the call, or None if it can."""
        if not isinstance(kernel, SidedKernel):
            return f"a grid sums additive kernels such as add_laplace, add_riesz and add_bump, not {kernel.name}"
        if isinstance(kernel, Spline) and not kernel.continuous:
            return "a grid would smear the jumps of this spline over its cells; use backend='sorted' or 'auto'"
        return None

    def attention(self, problem: Problem, kernel: SidedKernel) -> Tensor:
        """Normalised kernel sums, `(P, M, C)`."""
        count = options.count(self.setting, kernel, problem.query.shape[2])
        if gpu.serves(problem, count):
            from .gpu import api

            return api.attention(problem.as_given(), kernel, count)
        problem = problem.widened()
        found = self._sums(problem, kernel)
        return normalise(problem, found[..., :-1], found[..., -1], kernel.floor)

    def kernel_sum(self, problem: Problem, kernel: SidedKernel) -> Tensor:
        """Kernel sums, `(P, M, C)`."""
        count = options.count(self.setting, kernel, problem.query.shape[2])
        if gpu.serves(problem, count):
            from .gpu import api

            return api.kernel_sum(problem.as_given(), kernel, count)
        return self._sums(problem.widened(), kernel)[..., :-1]

    def _sums(self, problem: Problem, kernel: SidedKernel) -> Tensor:
        query = problem.query
        refuse_transforms(query, problem.key, problem.value)
        if problem.group > 1:
            # heads of a group share their nodes: what is no number in one of them must not reach the others
            query = query.nan_to_num(0.0, 0.0, 0.0)
        grid = surrogate(problem, kernel, query, options.count(self.setting, kernel, query.shape[2]))
        way = causal_sums if problem.causal else sums
        return way(problem, kernel, query, grid)
