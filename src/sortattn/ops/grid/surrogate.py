"""What the grid computes: `f(s - t)` replaced by `sum_ij w_i(s) Phi_ij w_j(t)` on nodes that follow the data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import PolynomialExponential, SidedKernel
from ...validation import Problem
from .api import grid_collect, grid_plan, grid_read


@dataclass(frozen=True)
class Surrogate:
    """The nodes of a call and the kernel between them.

    `nodes (P, D, G)`, `extra (P, D, G, G)` the correction of the kernel between them, `bandwidth (P,)`, `exponential`
    whether the weights are those of exponentials.
    """

    nodes: Tensor
    extra: Tensor
    bandwidth: Tensor
    exponential: bool

    def collect(self, points: Tensor, rows: Tensor) -> Tensor:
        """From keys to nodes, `(P, D, G, C)`."""
        return grid_collect(points, rows, self.nodes, self.bandwidth, self.exponential)

    def read(self, points: Tensor, table: Tensor) -> Tensor:
        """From nodes to queries, `(P, M, C)`."""
        return grid_read(points, table, self.nodes, self.bandwidth, self.exponential)

    def matrix(self, kernel: SidedKernel) -> Tensor:
        """`Phi_gg`, `(P, D, G, G)`."""
        difference = self.nodes[..., :, None] - self.nodes[..., None, :]
        return kernel.univariate(difference / self.bandwidth[:, None, None, None]) + self.extra


def surrogate(problem: Problem, kernel: SidedKernel, query: Tensor, count: int) -> Surrogate:
    """Nodes for the keys of the problem and these queries."""
    bandwidth = torch.as_tensor(problem.bandwidth, dtype=query.dtype, device=query.device)
    bandwidth = bandwidth.reshape(-1).expand(query.shape[0])
    masked = problem.weight is not None
    # not `query.new_ones`, which under vmap would have the mapped dimension
    weight = problem.weight if masked else torch.ones(query.shape[0], 1, dtype=query.dtype, device=query.device)
    exponential = reproduces_exponentials(kernel)
    kinks, jumps = slope_jumps(kernel)
    nodes, extra = grid_plan(query, problem.key, weight, bandwidth, kinks, jumps, exponential, masked, count)
    return Surrogate(nodes, extra, bandwidth, exponential)


def reproduces_exponentials(kernel: SidedKernel) -> bool:
    """Whether the kernel is a pure exponential; hats serve all others, polynomial exponentials of a degree too."""
    return isinstance(kernel, PolynomialExponential) and len(kernel.coefficients) == 1


def slope_jumps(kernel: SidedKernel) -> tuple[Tensor, Tensor]:
    """Where the slope of `f` changes, and by how much; both `(J,)`, on the CPU."""
    terms = kernel.terms()
    both = torch.nn.functional.pad((terms.below + terms.above).detach(), (0, 1))
    # of p(x) e^(-rate x) at zero the slope is p_1 - rate p_0; on the other side x runs backwards
    return terms.nodes, both[:, 1] - terms.rate * both[:, 0]
