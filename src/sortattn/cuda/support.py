"""Whether kernels can be compiled and launched on a device."""

import functools
import importlib.util

import torch

# what the kernels are written for: asynchronous copies and 64 KiB of shared memory for a block
_LEAST = (8, 0)


@torch.compiler.assume_constant_result
def trouble(device: int) -> str | None:
    """Why not, or None if they can."""
    # by way of another function: a compiler looks through a cache into what it cannot follow
    return _trouble(device)


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
