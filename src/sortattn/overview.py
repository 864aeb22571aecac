"""`sortattn kernels`: the paper's Table 1, read off the kernels themselves."""

import math

from .kernels import KERNELS, Kernel
from .table import render

COLUMNS = ("name", "formula", "dim", "stationary", "additive", "capacity", "complexity", "bandwidth")


def kernel_table(style: str = "text") -> str:
    """Table 1 with the default bandwidths, in one of `sortattn.table.STYLES`."""
    rows = [_row(kernel) for kernel in KERNELS.values()]
    if style == "markdown":
        # as code, or <q, k> would be taken for a tag
        rows = [[name, f"`{formula}`", *rest] for name, formula, *rest in rows]
    return render(COLUMNS, rows, style, left=len(COLUMNS))


def _row(kernel: Kernel) -> list[str]:
    return [
        kernel.name,
        kernel.formula,
        _dimension(kernel.dimension),
        kernel.stationary,
        "yes" if kernel.additive else "no",
        kernel.capacity,
        kernel.complexity,
        str(kernel.bandwidth),
    ]


def _dimension(multiple: float) -> str:
    """The dimension of the feature space, given in units of `D`."""
    if math.isinf(multiple):
        return "inf"
    return "D" if multiple == 1 else f"{multiple:g}D"
