"""The trainer for GPUs: the step is replayed as a CUDA graph, on a stream of its own, beside those of other models."""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from .training import WEIGHT_DECAY, Run, Trainer, questions, rate_at, seed_of

# steps whose sequences and rates lie ready on the GPU
BLOCK = 20
# blocks that are kept for other models; more than are in use at one time
KEPT = 64


class GpuTrainer(Trainer):
    """As `Trainer`; `advance` returns before the GPU has taken the steps, and `loss` is up to date after `wait`."""

    def __init__(self, run: Run):
        super().__init__(run)
        device = run.device
        self._rate = torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self._rate, weight_decay=WEIGHT_DECAY, capturable=True, fused=True
        )
        self._rates = torch.zeros(BLOCK, device=device)
        self._index, self._found = torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), device=device)
        self._block = tuple(part.clone() for part in self._questions(0, BLOCK))
        self._stream, self._graph = torch.cuda.Stream(device), None
        # the model and the buffers have been made on another
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def load(self, state: dict) -> None:
        """Goes back to where `state` was taken."""
        super().load(state)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate

    def advance(self, steps: int) -> None:
        """Gives the GPU so many steps to take."""
        with torch.cuda.stream(self._stream):
            if self._graph is None:
                self._graph = self._capture()
            while steps > 0:
                count = min(BLOCK, steps)
                self._supply(count)
                for _ in range(count):
                    self._graph.replay()
                self.done, steps = self.done + count, steps - count

    def wait(self) -> None:
        """Returns when the steps have been taken."""
        self._stream.synchronize()
        self.loss = float(self._found)

    def _supply(self, count: int) -> None:
        """Puts the sequences and rates of the next steps where the graph reads them."""
        for target, part in zip(self._block, self._questions(self.done, count), strict=True):
            target[:count].copy_(part)
        rates = torch.tensor([rate_at(self.done + ahead, self.run) for ahead in range(count)])
        self._rates[:count].copy_(rates)
        self._index.zero_()

    def _questions(self, first: int, count: int) -> tuple[Tensor, ...]:
        # they are the same whatever the model
        return _block(replace(self.run, kernel="", width=0, rate=0.0), first, count)

    def _take(self) -> None:
        """One step with the next sequences of the block."""
        place = self._index.reshape(1)
        self._rate.copy_(self._rates.index_select(0, place)[0])
        self._found.copy_(self._learn(*(part.index_select(0, place)[0] for part in self._block)))
        self._index.add_(1)

    def _capture(self) -> torch.cuda.CUDAGraph:
        """A step, recorded after some that compile and choose kernels and are undone."""
        weights = {name: part.clone() for name, part in self.model.state_dict().items()}
        moments = {name: dict(part) for name, part in self.optimizer.state_dict()["state"].items()}
        kept = [{name: part.clone() for name, part in one.items()} for one in moments.values()]
        for _ in range(3):
            self._index.zero_()
            self._take()
        self.model.load_state_dict(weights)
        self._restore(kept)
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._take()
        return graph

    def _restore(self, kept: list[dict[str, Tensor]]) -> None:
        """Puts the optimiser's numbers back in place, since the graph holds their addresses."""
        for index, parameter in enumerate(self.model.parameters()):
            for name, part in self.optimizer.state[parameter].items():
                if kept:
                    part.copy_(kept[index][name])
                else:
                    part.zero_()


@lru_cache(KEPT)
def _block(run: Run, first: int, count: int) -> tuple[Tensor, ...]:
    """The questions of some steps, `(count, ...)`."""
    made = [questions(run, seed_of(run, first + ahead)) for ahead in range(count)]
    block = tuple(torch.stack(parts) for parts in zip(*made, strict=True))
    # other streams will read them
    torch.cuda.current_stream().synchronize()
    return block
