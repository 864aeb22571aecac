"""Exact kernel attention in quasi linear time."""

from ._version import __version__
from .attention import gram, grid_error, kernel_attention, kernel_sum
from .integrations.convert import convert
from .integrations.transformers import register
from .kernels import KERNELS, Kernel, PolynomialExponential, Spline
from .module import KernelAttention
from .precision import get_precision, set_precision
from .sums import weighted_abs_sum, weighted_laplace_sum, weighted_sign_sum

__all__ = [
    "KERNELS",
    "Kernel",
    "KernelAttention",
    "PolynomialExponential",
    "Spline",
    "__version__",
    "convert",
    "get_precision",
    "gram",
    "grid_error",
    "kernel_attention",
    "kernel_sum",
    "register",
    "set_precision",
    "weighted_abs_sum",
    "weighted_laplace_sum",
    "weighted_sign_sum",
]
