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
            loss, _ = self._measure(self.run.seed * self.run.most_steps + self.done, self.run.batch)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
            self.optimizer.step()
            self.done += 1
        self.loss = float(loss.detach())

    @torch.no_grad()
    def test(self, batches: int) -> float:
        """The share of values that are recalled, over batches that were not trained on."""
        return sum(float(self._measure(TEST_SEED + index, self.run.batch)[1]) for index in range(batches)) / batches

    def _measure(self, seed: int, count: int) -> tuple[Tensor, Tensor]:
        run = self.run
        generator = torch.Generator(run.device).manual_seed(seed)
        tokens, labels = make_batch(
            count, pairs=run.pairs, length=run.length, vocabulary=run.vocabulary, generator=generator
        )
        # as many in every row as there are pairs
        places = (labels != NOTHING).nonzero()[:, 1].view(count, run.pairs)
        wanted = labels.gather(1, places)
        logits = self.model(tokens, places)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten()), (logits.argmax(-1) == wanted).float().mean()


def rate_at(step: int, run: Run) -> float:
    """The learning rate: rising for a tenth of the steps, then falling along a cosine."""
    warm = max(1, round(WARM_UP * run.most_steps))
    if step < warm:
        return run.rate * (step + 1) / warm
    return run.rate * (1 + math.cos(math.pi * (step - warm) / max(1, run.most_steps - warm))) / 2
