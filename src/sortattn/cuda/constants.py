"""Small tensors on a GPU that many calls read: made once and kept, a bounded number of them.

A CUDA graph holds addresses and is replayed when nobody here remembers the call: what it reads lives as long as the
process. And what is made while one is captured would lie in memory that goes with it, and be written no sooner than it
is replayed, while other calls read it too: so constants are made apart, on a thread of their own.
"""

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

T = TypeVar("T")
# of a function, how many results are kept: those used last
_MOST = 256


class Constant(Generic[T]):
    """What `make` makes on a GPU, apart from any graph; `parts` finds the tensors in it that kernels read."""

    def __init__(self, make: Callable[[], T], parts: Callable[[T], Iterable[Tensor]]):
        self._made = _apart(make, parts)
        self._tensors = [part for part in parts(self._made) if part.is_cuda]
        self._streams: set[int] = set()

    def read(self) -> T:
        """It, for kernels on the current stream: before they have read it, its memory is not used for anything else."""
        if capturing():
            _captured.add(self)
        elif self._tensors:
            device = self._tensors[0].device
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            if stream not in self._streams:
                self._streams.add(stream)
                for part in self._tensors:
                    part.record_stream(torch.cuda.current_stream(device))
        return self._made


# those that graphs read
_captured: set[Constant] = set()
# tensors of `kept`, by their addresses
_places: WeakValueDictionary[int, Constant[Tensor]] = WeakValueDictionary()


def kept(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make`, called once for the same arguments while these are among the last; it copies from the host to the GPU."""

    @functools.lru_cache(maxsize=_MOST)
    def constant(*what) -> Constant[Tensor]:
        found = Constant(lambda: make(*what), lambda made: [made])
        _places[found.read().data_ptr()] = found
        return found

    @functools.wraps(make)
    def read(*what) -> Tensor:
        return constant(*what).read()

    return read


def at(address: int) -> Constant[Tensor] | None:
    """The tensor of `kept` that lies there, if it is still alive."""
    return _places.get(address)


def capturing() -> bool:
    """Whether what the current stream is given becomes part of a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _apart(make: Callable[[], T], parts: Callable[[T], Iterable[Tensor]]) -> T:
    """What `make` returns, written and in no memory that belongs to a graph."""

    def run() -> T:
        # kept, and saved for later gradients, also if the first call is in inference mode
        with torch.inference_mode(False), torch.no_grad():
            return make()

    def run_alone() -> T:
        _allow_while_capturing()
        made = run()
        for device in {part.device for part in parts(made) if part.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return made

    if not torch.cuda.is_initialized():
        return run()
    # pools of memory are a thread's or a stream's, and a new thread is on the default stream
    with ThreadPoolExecutor(1) as thread:
        try:
            made = thread.submit(run_alone)
        except RuntimeError:
            # the interpreter ends, and there are no more threads
            return run()
        return made.result()


def _allow_while_capturing() -> None:
    """Let this thread have memory and copies while another one captures."""
    try:
        from cuda.bindings import driver
    except ImportError:
        # the grid's kernels do without
        return
    driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
