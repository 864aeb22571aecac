"""Whether kernels can be compiled and launched on a device."""

import functools
import importlib.util
from collections.abc import Callable

import torch

# what the kernels are written for: asynchronous copies and 64 KiB of shared memory for a block
_LEAST = (8, 0)


def constant(function: Callable) -> Callable:
    """`torch.compiler.assume_constant_result`, which would bring the whole compiler along."""
    function._dynamo_marked_constant = True
    return function


@constant
def trouble(device: int) -> str | None:
    """Why not, or None if they can."""
    # a function of its own: what is kept would hide from torch.compile that this is constant
    return _trouble(device)


@constant
def architecture(device: int) -> str:
    """As NVIDIA's compilers name it, such as `sm_90`."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


@functools.lru_cache
def _trouble(device: int) -> str | None:
    if torch.version.cuda is None:
        return "the kernels are CUDA's, and this torch is not built for it"
    found = torch.cuda.get_device_capability(device)
    if found < _LEAST:
        return f"the kernels need compute capability {_LEAST[0]}.{_LEAST[1]}, cuda:{device} has {found[0]}.{found[1]}"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        return "cuda-core is not installed; pip install 'sortattn[cuda]'"
    return None
