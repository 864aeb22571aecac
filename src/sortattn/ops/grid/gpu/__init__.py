"""The grid in Triton, some steps in CUDA: places between nodes, ramps and hats made in registers, tensor cores."""

import os
import sys
from importlib.util import find_spec

import torch
from torch import Tensor

from ....cuda.support import constant
from ....validation import Problem

# a program sorts the sample of one dimension in its registers: more nodes are left to torch's operations
_MOST = 128
# heads, of which a launch has a program each: CUDA's limit for its second and third dimension
_HEADS = 65_535


def serves(problem: Problem, count: int) -> bool:
    """Whether these kernels serve a call; others are left to torch's operations."""
    if problem.query.dtype == torch.float64 or count > _MOST:
        return False
    if 0 in (*problem.query.shape, *problem.value.shape) or problem.query.shape[0] > _HEADS:
        return False
    return here(problem.query)


def here(tensor: Tensor) -> bool:
    """Whether there are kernels for the device of a tensor: a GPU, or the CPU if Triton's interpreter is asked for."""
    return (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and _available()


@constant
def _available() -> bool:
    return "triton" in sys.modules or find_spec("triton") is not None
