"""One student in one stage: gradients, clipping, Adam, and what is kept of every step."""

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..errors import CommandError
from . import parallel
from .replay import Batch, Recorder
from .schedule import Stage
from .store import Row
from .work import Work

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """What all stages have in common.

    - `precision`: `fp32`, or `bf16` for the matrix products, with weights and sums in float32.
    - `accumulation`: batches per step and process.
    - `clip`: the largest norm of the gradients, of a layer in the layerwise stage and of the model end to end.
    - `every`: steps from one checkpoint to the next.
    - `graphs`: on a CUDA device, replay steps as CUDA graphs.
    """

    precision: str = "fp32"
    accumulation: int = 1
    clip: float = 1.0
    every: int = 250
    graphs: bool = True

    def __post_init__(self):
        if self.precision not in PRECISIONS:
            raise ValueError(f"unknown precision {self.precision!r}, expected one of {', '.join(PRECISIONS)}")


def autocast(device: torch.device, settings: Settings) -> torch.autocast:
    """The types of the matrix products; backward passes stay outside, as they have those of their forward passes."""
    return torch.autocast(device.type, PRECISIONS["bf16"], enabled=settings.precision == "bf16")


class Training:
    """The state of a student in a stage; `step` is the number of steps that are done."""

    def __init__(self, stage: Stage, work: Work, settings: Settings, recorder: Recorder):
        self.stage, self.work, self.settings, self.step = stage, work, settings, 0
        groups = [[part for part in group if part.requires_grad] for group in work.groups()]
        self.groups = [group for group in groups if group]
        self.parts = [part for group in self.groups for part in group]
        self.device = self.parts[0].device
        self.optimizer = _optimizer(self.parts, stage.rate, work.weight_decay)
        # in place from now on, as a recorded step has their addresses
        for part in self.parts:
            part.grad = torch.zeros_like(part)
        self._losses = torch.zeros(2, device=self.device)
        self._reports = _Reports(stage)
        self._learn, self._advance = recorder.record(self._backward), recorder.record(self._update)

    def load(self, state: dict, step: int) -> None:
        """Continues after a step, with the optimiser's state there."""
        self.step = step
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def learn(self, batch: Batch, lesson: object) -> None:
        """Adds the gradients of a batch, given what the teacher says to it."""
        self._reports.start()
        self._learn(batch, lesson)

    def _backward(self, batch: Batch, lesson: object) -> None:
        losses = self.work.losses(batch, lesson)
        while (loss := self._next(losses)) is not None:
            (loss / self.settings.accumulation).backward()
            self._losses += torch.stack([loss.detach(), torch.ones_like(loss)])

    def _next(self, losses) -> Tensor | None:
        with autocast(self.device, self.settings):
            return next(losses, None)

    def update(self) -> None:
        """One step of Adam with the gradients there are."""
        parallel.average([self._losses, *(part.grad for part in self.parts)])
        rate = self.stage.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._reports.add(self._advance({}), rate)
        self.step += 1

    def _update(self, batch: Batch) -> Tensor:
        """Clips, moves the weights and forgets the gradients; returns the mean loss and the largest norm of a group."""
        norms = [nn.utils.clip_grad_norm_(group, self.settings.clip) for group in self.groups]
        self.optimizer.step()
        report = torch.stack([self._losses[0] / self._losses[1], torch.stack(norms).max()])
        self._losses.zero_()
        self.optimizer.zero_grad(set_to_none=False)
        return report

    def close(self) -> None:
        """Lets go of gradients and recordings, which hold a good part of a GPU's memory."""
        # they know this object, which knows them: nobody would miss them before the next collection of garbage
        self._learn = self._advance = None
        for part in self.parts:
            part.grad = None

    def rows(self) -> list[Row]:
        """The rows of the steps since the last call; this waits for the device. CommandError if one is not finite."""
        return self._reports.take(self.step)


@dataclass
class _Reports:
    """What steps have returned and nobody has looked at yet."""

    stage: Stage
    found: list[Tensor] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    since: float | None = None

    def start(self) -> None:
        """The clock, if it does not run: checkpoints in between do not count."""
        self.since = time.perf_counter() if self.since is None else self.since

    def add(self, report: Tensor, rate: float) -> None:
        self.found.append(report.clone())
        self.rates.append(rate)

    def take(self, step: int) -> list[Row]:
        if not self.found:
            return []
        table = torch.stack(self.found).tolist()
        seconds = round((time.perf_counter() - self.since) / len(table), 4)
        first = step - len(table) + 1
        rows = [
            Row(self.stage.name, first + place, loss, rate, norm, seconds)
            for place, ((loss, norm), rate) in enumerate(zip(table, self.rates, strict=True))
        ]
        self.found, self.rates, self.since = [], [], None
        for row in rows:
            if not (math.isfinite(row.loss) and math.isfinite(row.gradient_norm)):
                raise CommandError(
                    f"the loss of step {row.step} is not finite (loss {row.loss}, norm of the gradients "
                    f"{row.gradient_norm})"
                )
        return rows


def _optimizer(parameters: list[nn.Parameter], rate: float, decay: float) -> torch.optim.Optimizer:
    """Adam, or AdamW that draws matrices to zero and leaves biases and norms alone."""
    cuda = parameters[0].is_cuda
    # one kernel, and nothing in it that a recorded step could not change
    more = {"fused": True, "capturable": True} if cuda else {}
    lr = torch.tensor(rate, device=parameters[0].device) if cuda else rate
    if not decay:
        return torch.optim.Adam(parameters, lr=lr, **more)
    matrices, others = ([part for part in parameters if (part.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, **more)
