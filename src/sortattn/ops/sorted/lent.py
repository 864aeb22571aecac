"""Memory for large tensors on the CPU, lent to them and kept for the next call when they are gone.

malloc gets blocks of 32 MB and more from the system at every call, which hands out page after page and clears each: of
230 ms that `add_riesz` takes for 16,384 points and 8 heads, 10 to 14. Smaller ones malloc keeps itself.

Such a tensor is over memory that torch did not allocate, and torch resizes no such storage: a result of 32 MB or more
has to be cloned for that. From Python no storage can be had that torch resizes and that tells when its last user goes.
"""

import math
import weakref

import torch
from torch import Tensor

# bytes from which on malloc keeps nothing: glibc's limit adapts to what is freed, up to this
LARGE = 32 << 20
# bytes that are kept, at most: the tensors of a forward and a backward pass of the call above
KEPT = 256 << 20
# a block serves what takes at least this part of it
_PART = 0.75

# those that nobody has, the longest unused first; entries come and go one at a time, which needs no lock
_free: dict[int, Tensor] = {}


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`torch.empty(shape, dtype=dtype)` on the CPU."""
    size = math.prod(shape) * dtype.itemsize
    # in its deterministic mode torch has something to say about what is in there
    if size < LARGE or torch.are_deterministic_algorithms_enabled():
        return torch.empty(shape, dtype=dtype, device="cpu")
    block = _take(size)
    # the memory of the tensor is this very array: when it goes, the last view of the tensor has gone
    room = block[:size].numpy()
    weakref.finalize(room, _give_back, block).atexit = False
    return torch.from_numpy(room).view(dtype).view(shape)


def empty_like(tensor: Tensor) -> Tensor:
    """`torch.empty_like(tensor)`, contiguous, on the CPU out of this memory."""
    return empty(tensor.shape, tensor.dtype) if tensor.device.type == "cpu" else tensor.new_empty(tensor.shape)


def _take(size: int) -> Tensor:
    """A block of at least so many bytes."""
    for place in list(_free):
        block = _free.get(place)
        # another thread may have been faster
        if block is not None and _PART * block.nbytes <= size <= block.nbytes and _free.pop(place, None) is not None:
            return block
    return torch.empty(size, dtype=torch.uint8, device="cpu")


def _give_back(block: Tensor) -> None:
    _free[id(block)] = block
    for oldest in list(_free):
        if sum(other.nbytes for other in list(_free.values())) <= KEPT:
            break
        _free.pop(oldest, None)
