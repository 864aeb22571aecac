"""What a GPU has, and how many heads there is room for at a time."""

import functools
import math
from typing import NamedTuple

import torch

from ...cuda.launch import place_of

# bytes of work space that is always to be had: heads of a few thousand points fill a GPU only if there are many of them
WORKSPACE = 512 << 20


class Device(NamedTuple):
    """The number of multiprocessors, and the bytes of the second-level cache and of the shared memory of a block.

    `early` is whether a launch may begin before the one before it ends.
    """

    processors: int
    cache: int
    shared: int
    early: bool = False


def device(device: torch.device) -> Device:
    """Of the GPU that these tensors are on, or meant for."""
    return _device(place_of(device))


@functools.lru_cache
def _device(device: torch.device) -> Device:
    properties = torch.cuda.get_device_properties(device)
    return Device(
        properties.multi_processor_count, properties.L2_cache_size, properties.shared_memory_per_block_optin,
        properties.major >= 9,
    )  # fmt: skip


def groups(problems: int, size: int, room: int) -> list[slice]:
    """As many heads at a time as there is room for, of `size` bytes each, and at least one."""
    together = max(1, room // max(size, 1))
    # all alike, as a small one would leave the GPU half empty
    together = math.ceil(problems / math.ceil(problems / together)) if problems else 1
    return [slice(first, min(first + together, problems)) for first in range(0, max(problems, 1), together)]
