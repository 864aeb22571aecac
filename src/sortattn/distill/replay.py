"""Steps as CUDA graphs: launching the thousands of kernels of a step one by one takes longer than the step itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import CommandError

Batch = dict[str, Tensor]


class Recorder:
    """Where batches lie on the device, and functions of them that are recorded once and then replayed.

    A function is called as it is for the first batch of a shape, which warms it up, and recorded with the second. What
    it returns is valid until the next call. All recordings share their memory: one at a time may run.
    """

    def __init__(self, device: torch.device, enabled: bool):
        self.device, self.enabled = device, enabled and device.type == "cuda"
        self._batches: dict[tuple, Batch] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Everything that is recorded has to happen on one stream, which is not the default one."""
        if not self.enabled:
            yield
            return
        own = torch.cuda.Stream(self.device)
        own.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(own):
            yield
        torch.cuda.current_stream(self.device).wait_stream(own)

    def feed(self, batch: Batch) -> Batch:
        """The batch on the device, in the same tensors as all others of its shape if functions are recorded."""
        if not self.enabled:
            return {name: tensor.to(self.device) for name, tensor in batch.items()}
        shape = shape_of(batch)
        if shape not in self._batches:
            self._batches[shape] = {name: torch.empty_like(part, device=self.device) for name, part in batch.items()}
        for name, target in self._batches[shape].items():
            # from pinned memory a copy does not wait for what the device has to do before
            part = batch[name] if batch[name].is_cuda else batch[name].pin_memory()
            target.copy_(part, non_blocking=True)
        return self._batches[shape]

    def record(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function(batch, ...)` for batches of this recorder; other arguments are results of recorded functions."""
        if not self.enabled:
            return function
        recordings: dict[tuple, tuple[torch.cuda.CUDAGraph, Any] | None] = {}

        def call(batch: Batch, *others):
            shape = shape_of(batch)
            if shape not in recordings:
                recordings[shape] = None
                return function(batch, *others)
            if recordings[shape] is None:
                recordings[shape] = self._capture(function, batch, *others)
            graph, result = recordings[shape]
            graph.replay()
            return result

        return call

    def _capture(self, function: Callable[..., Any], *arguments) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        # not `torch.cuda.graph`, which empties torch's cache of memory every time
        graph.capture_begin(pool=self._pool)
        try:
            result = function(*arguments)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CommandError(f"a step cannot be recorded as a CUDA graph ({reason}); use --no-graphs") from error
        finally:
            _end(graph)
        return graph, result


def _end(graph: torch.cuda.CUDAGraph) -> None:
    try:
        graph.capture_end()
    except RuntimeError:
        # what broke the capture has been raised already
        if torch.cuda.is_current_stream_capturing():
            raise


def shape_of(batch: Batch) -> tuple:
    """What two batches have in common that one recording serves."""
    return tuple((name, tuple(part.shape), part.dtype) for name, part in batch.items())
