"""The trainer for GPUs: fused steps, most of them replayed as CUDA graphs, on a stream of its own."""

import torch
from torch import Tensor

from .adam import adam_for
from .fused import FusedStep
from .training import TRAINED, Batch, note

# steps in one graph
GRAPH_STEPS = 20


class GpuTrainer:
    """Takes steps on the state of a batch, in place, beside those of other batches."""

    def __init__(self, batch: Batch, state: dict[str, Tensor]):
        self.state = state
        lengths = [size for size, _ in batch.runs]
        self._fused = FusedStep(TRAINED[batch.kernel], lengths, state, adam_for(batch.kernel, batch.adam))
        self._stream = torch.cuda.Stream(batch.device)
        # the state and the buffers have been made on another
        self._stream.wait_stream(torch.cuda.current_stream(batch.device))
        self._graph: torch.cuda.CUDAGraph | None = None

    def advance(self, steps: int) -> None:
        """Takes so many steps with the runs that are active; returns before the GPU has done so."""
        with torch.cuda.stream(self._stream):
            if steps >= GRAPH_STEPS and self._graph is None:
                self._graph = self._capture()
            for _ in range(steps // GRAPH_STEPS):
                self._graph.replay()
            for _ in range(steps % GRAPH_STEPS):
                self._fused.take()

    def wait(self) -> None:
        """Returns when the steps have been taken."""
        self._stream.synchronize()

    def finish(self) -> None:
        """Brings `loss` and `lowest` up to the last step."""
        with torch.cuda.stream(self._stream):
            self._fused.measure()
            note(self.state, self._fused.row_loss.sum(1))
        self.wait()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Some steps, recorded after one that compiles the kernels and is undone."""
        before = {name: part.clone() for name, part in self.state.items()}
        self._fused.take()
        for name, part in before.items():
            self.state[name].copy_(part)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_STEPS):
                self._fused.take()
        return graph
