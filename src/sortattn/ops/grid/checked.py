"""The grid for calls that may be rounded: its result where that is near enough, otherwise an exact one."""

from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from ...kernels import SidedKernel
from ...validation import Problem
from . import Grid
from .error import by_head


@dataclass(frozen=True)
class Checked:
    """A `grid`, and the backend `exact` where the estimated error of some head is not below the `tolerance`.

    Large values of one head do not hide the error of another. What comes of it is read: on a GPU such a call waits.
    """

    grid: Grid
    exact: ModuleType
    tolerance: float

    def attention(self, problem: Problem, kernel: SidedKernel) -> Tensor:
        """Normalised kernel sums, `(P, M, C)`."""
        rows = self.grid.attention(problem, kernel)
        return rows if self._near(problem, kernel, rows, True) else self.exact.attention(problem, kernel)

    def kernel_sum(self, problem: Problem, kernel: SidedKernel) -> Tensor:
        """Kernel sums, `(P, M, C)`."""
        rows = self.grid.kernel_sum(problem, kernel)
        return rows if self._near(problem, kernel, rows, False) else self.exact.kernel_sum(problem, kernel)

    def _near(self, problem: Problem, kernel: SidedKernel, rows: Tensor, normalised: bool) -> bool:
        return bool((by_head(problem, kernel, rows, normalised) < self.tolerance).all())
