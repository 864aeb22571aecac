"""Attention of a call like one before on the same thread: its checks are known, and those of `tiled` also its launches,
so that what is left is to allocate the output and to launch. The checks of a short call take the host longer than the
GPU takes for its sums."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from ..cuda.launch import stream_on
from ..kernels import KERNELS, Kernel
from ..precision import get_precision
from .direct import eager

# of a stream and three contiguous tensors like those of a call before: the rows, or None if it needs a look
Again = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]
# calls that a thread remembers
_MOST = 256


class _Known(threading.local):
    """The launches of a thread, by what its calls look like: the arguments of one are written before it is launched."""

    def __init__(self):
        self.launches = {}


_known = _Known()


def _look(query, key, value, kernel, bandwidth, is_causal, backend) -> tuple:
    """All that is the same in calls that are served alike, but where the tensors lie and what torch is about to do."""
    learning = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    named = KERNELS[kernel] if type(kernel) is str else kernel
    # the kernel's own bandwidth, which may be changed, where none is given
    tau = named.bandwidth if bandwidth is None else bandwidth
    return (
        named, tau, type(bandwidth), type(is_causal), is_causal, backend, get_precision(), learning, type(query),
        type(key), type(value), query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, query.device,
        key.device, value.device,
    )  # fmt: skip


def attention(
    query: object, key: object, value: object, kernel: object, bandwidth: object, is_causal: object, backend: object
) -> Tensor | None:
    """`y_m = sum_n Phi(q_m, k_n) v_n / sum_n Phi(q_m, k_n)`, if there was such a call; None says nothing about it."""
    try:
        launch = _known.launches.get(_look(query, key, value, kernel, bandwidth, is_causal, backend))
    except (AttributeError, KeyError, TypeError):
        # the checks say what is wrong with it
        return None
    if launch is None or not eager() or torch.is_autocast_enabled("cuda"):
        return None
    if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
        return None
    stream = stream_on(query.get_device())
    return None if stream is None else launch(stream, query, key, value)


def remember(
    query: Tensor, key: Tensor, value: Tensor, kernel: str | Kernel, bandwidth: float | None, is_causal: bool,
    backend: str, again: Callable[[], Again | None],
) -> None:  # fmt: skip
    """Keep what `again` makes for calls like this one, if it may come again."""
    named = KERNELS.get(kernel) if type(kernel) is str else kernel
    # a kernel that only has the name of another may be changed, and need not have a hash
    if named is not KERNELS.get(getattr(named, "name", None)):
        return
    if not (query.is_contiguous() and key.is_contiguous() and value.is_contiguous()):
        return
    launches, look = _known.launches, _look(query, key, value, kernel, bandwidth, is_causal, backend)
    if look in launches or stream_on(query.get_device()) is None:
        return
    if len(launches) >= _MOST:
        launches.clear()
    # None for a call that has to be looked at every time
    launches[look] = again()
