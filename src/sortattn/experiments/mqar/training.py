"""Training and testing of one model. Every step has data of its own, made from the seed and the number of the step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .model import make_model
from .task import NOTHING, make_batch

WARM_UP = 0.1
WEIGHT_DECAY = 0.1
LARGEST_GRADIENT = 1.0
# seeds of the test set lie beyond those of all steps
TEST_SEED = 2**40


@dataclass(frozen=True)
class Run:
    """One model of a sweep."""

    kernel: str
    pairs: int
    width: int
    rate: float
    seed: int
    length: int
    vocabulary: int
    layers: int
    heads: int
    batch: int
    most_steps: int
    device: str


class Trainer:
    """A model, its optimiser and the number of steps done; `state` and `load` carry it over an interrupt."""

    def __init__(self, run: Run):
        self.run, self.done, self.loss = run, 0, math.nan
        self.model = make_model(
            run.vocabulary, run.width, run.kernel, layers=run.layers, heads=run.heads, seed=run.seed
        ).to(run.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=run.rate, weight_decay=WEIGHT_DECAY)

    def state(self) -> dict:
        """All that the next step depends on."""
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**parts, "done": self.done, "loss": self.loss}

    def load(self, state: dict) -> None:
        """Goes back to where `state` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.loss = state["done"], state["loss"]

    def advance(self, steps: int) -> None:
        """Takes so many steps; `loss` is that of the last."""
        for _ in range(steps):
            for group in self.optimizer.param_groups:
                group["lr"] = rate_at(self.done, self.run)
            loss = self._learn(*questions(self.run, seed_of(self.run, self.done)))
            self.done += 1
        self.loss = float(loss)

    def wait(self) -> None:
        """Returns when the steps have been taken: here at once."""

    @torch.no_grad()
    def test(self, batches: int) -> float:
        """The share of values that are recalled, over batches that were not trained on."""
        right = 0.0
        for index in range(batches):
            tokens, places, wanted = questions(self.run, TEST_SEED + index)
            right += float((self.model(tokens, places).argmax(-1) == wanted).float().mean())
        return right / batches

    def _learn(self, tokens: Tensor, places: Tensor, wanted: Tensor) -> Tensor:
        """One step; returns the loss before it."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(tokens, places).flatten(0, 1), wanted.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()
        return loss.detach()


def make_trainer(run: Run) -> Trainer:
    """The trainer for the run's device."""
    if torch.device(run.device).type != "cuda":
        return Trainer(run)
    from .gpu import GpuTrainer

    return GpuTrainer(run)


def seed_of(run: Run, step: int) -> int:
    """The seed of the sequences of a step."""
    return run.seed * run.most_steps + step


def questions(run: Run, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences `(B, N)`, and the places `(B, pairs)` where values are to be recalled, and those values."""
    generator = torch.Generator(run.device).manual_seed(seed)
    tokens, labels = make_batch(
        run.batch, pairs=run.pairs, length=run.length, vocabulary=run.vocabulary, generator=generator
    )
    # as many in every row as there are pairs; a sort, since the host need not wait for it
    places = (labels == NOTHING).to(torch.uint8).sort(stable=True).indices[:, : run.pairs]
    return tokens, places, labels.gather(1, places)


def rate_at(step: int, run: Run) -> float:
    """The learning rate: rising for a tenth of the steps, then falling along a cosine."""
    warm = max(1, round(WARM_UP * run.most_steps))
    if step < warm:
        return run.rate * (step + 1) / warm
    return run.rate * (1 + math.cos(math.pi * (step - warm) / max(1, run.most_steps - warm))) / 2
