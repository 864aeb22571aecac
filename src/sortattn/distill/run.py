"""Runs stages of distillation: steps, averages, clipping, checkpoints, and where to continue."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..bench.progress import Advance, progress
from ..errors import CommandError
from . import parallel
from .schedule import Stage
from .store import Losses, Row, load_checkpoint, replace, save_checkpoint
from .work import Batch, Work

# the batch with this number: the same at every call, so that a run that continues sees what it would have seen
Batches = Callable[[int], Batch]
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
# no stage has more steps: the batches of the next one begin there
_STAGE = 10_000_000


@dataclass(frozen=True)
class Settings:
    """What all stages have in common.

    - `precision`: `fp32`, or `bf16` for the matrix products, with weights and sums in float32.
    - `accumulation`: batches per step and process.
    - `clip`: the largest norm of the gradients, of a layer in the layerwise stage and of the model end to end.
    - `every`: steps from one checkpoint to the next.
    """

    precision: str = "fp32"
    accumulation: int = 1
    clip: float = 1.0
    every: int = 250

    def __post_init__(self):
        if self.precision not in PRECISIONS:
            raise ValueError(f"unknown precision {self.precision!r}, expected one of {', '.join(PRECISIONS)}")


def distill(
    student: nn.Module,
    stages: Sequence[tuple[Stage, Work]],
    batches: Batches,
    folder: Path,
    settings: Settings | None = None,
    *,
    about: dict | None = None,
    finish: Callable[[Path], None] = lambda path: None,
    watch: Callable[[str, int], str] = lambda stage, step: "",
) -> list[Row]:
    """Trains the student through the stages, each with its work (`Layerwise`, `EndToEnd`); returns the losses.

    `folder` gets `checkpoint.pt`, `losses.csv` and the model after every stage under the stage's name; `finish` may add
    to that folder, a tokenizer say. The same call continues an interrupted run, with exactly the numbers it would have
    had. `about` is what must not change between the two: text and numbers. `watch` is called with the stage and the
    step before every checkpoint; what it returns is shown beside the loss from then on.

    Under `torchrun` every process calls it, with a model on its own device; the first one writes.
    """
    settings = settings or Settings()
    facts = {**(about or {}), **asdict(settings), **{stage.name: asdict(stage) for stage, _ in stages}}
    facts["processes"] = parallel.place()[1]
    # how often it is saved changes nothing
    del facts["every"]
    saved = load_checkpoint(folder, next(student.parameters()).device)
    _refuse_stranger(folder, saved, facts)
    names = [stage.name for stage, _ in stages]
    done = (0, 0) if saved is None else (names.index(saved["stage"]), saved["step"])

    def known(stage: str, step: int) -> bool:
        return stage in names and (names.index(stage), step) <= done

    losses = Losses(folder, known) if _leads() else None
    total = sum(stage.steps for stage, _ in stages)
    with progress(total) if _leads() else contextlib.nullcontext(lambda text, steps: None) as advance:
        advance("", sum(stage.steps for stage, _ in stages[: done[0]]) + done[1])
        run = _Run(student, batches, folder, settings, facts, losses, advance, watch)
        for place, (stage, work) in enumerate(stages):
            if place >= done[0]:
                run.stage(place, stage, work, saved if place == done[0] else None)
                _save_model(student, folder / stage.name, finish)
    return losses.rows if losses else []


@dataclass
class _Run:
    student: nn.Module
    batches: Batches
    folder: Path
    settings: Settings
    facts: dict
    losses: Losses | None
    advance: Advance
    watch: Callable[[str, int], str]

    def stage(self, place: int, stage: Stage, work: Work, saved: dict | None) -> None:
        """All steps of a stage that are not done yet."""
        groups = [[part for part in group if part.requires_grad] for group in work.groups()]
        optimizer = _optimizer([part for group in groups for part in group], stage.rate, work.weight_decay)
        if saved is not None:
            _restore(self.student, optimizer, saved, self.folder)
        seen = ""
        for step in range(saved["step"] if saved else 0, stage.steps):
            started = time.perf_counter()
            rate = stage.learning_rate(step)
            loss, norm = self.step(place * _STAGE + step, work, groups, optimizer, rate)
            if self.losses is not None:
                seconds = round(time.perf_counter() - started, 4)
                self.losses.add(Row(stage.name, step + 1, loss, rate, norm, seconds))
                self.advance(f"{stage.name} step {step + 1:,}, loss {loss:.3g}{seen}", 1)
                if (step + 1) % self.settings.every == 0 or step + 1 == stage.steps:
                    seen = self.watch(stage.name, step + 1)
                    self.save(stage.name, step + 1, optimizer)

    def step(self, number: int, work: Work, groups: list, optimizer, rate: float) -> tuple[float, float]:
        """One step of Adam; returns the mean loss and the largest norm of a group."""
        optimizer.zero_grad()
        loss = self.backward(number, work)
        gradients = [part.grad for group in groups for part in group if part.grad is not None]
        parallel.average([loss, *gradients])
        norm = max(nn.utils.clip_grad_norm_(group, self.settings.clip).item() for group in groups if group)
        mean = loss.mean().item()
        if not max(mean, norm) < float("inf"):
            raise CommandError(
                f"the loss of step {number % _STAGE + 1} is not finite (loss {mean}, norm of the gradients {norm}); "
                f"the checkpoint in {self.folder} is sound, but a lower learning rate needs a folder of its own"
            )
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        return mean, norm

    def backward(self, number: int, work: Work) -> Tensor:
        """The gradients of one step on this process; returns the losses, one per layer or a single one."""
        device = next(self.student.parameters()).device
        rank, processes = parallel.place()
        count = self.settings.accumulation
        parts = []
        for part in range(count):
            batch = self.batches((number * count + part) * processes + rank)
            losses = work.losses({name: tensor.to(device) for name, tensor in batch.items()})
            while (loss := self.next_loss(losses, device)) is not None:
                (loss / count).backward()
                parts.append(loss.detach())
        return torch.stack(parts)

    def next_loss(self, losses, device: torch.device) -> Tensor | None:
        # backward passes stay outside: they have the types of their forward passes
        with torch.autocast(device.type, PRECISIONS["bf16"], enabled=self.settings.precision == "bf16"):
            return next(losses, None)

    def save(self, stage: str, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Writes the checkpoint."""
        weights = {"student": self.student.state_dict(), "optimizer": optimizer.state_dict()}
        save_checkpoint(self.folder, {"stage": stage, "step": step, "facts": self.facts, **weights})


def _optimizer(parameters: list[nn.Parameter], rate: float, decay: float) -> torch.optim.Optimizer:
    """Adam, or AdamW that draws matrices to zero and leaves biases and norms alone."""
    if not decay:
        return torch.optim.Adam(parameters, lr=rate)
    matrices, others = ([part for part in parameters if (part.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate)


def _restore(student: nn.Module, optimizer: torch.optim.Optimizer, state: dict, folder: Path) -> None:
    try:
        student.load_state_dict(state["student"])
        optimizer.load_state_dict(state["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise CommandError(
            f"the checkpoint in {folder} is of a model of another shape ({' '.join(str(error).split())[:200]}); choose "
            "another folder"
        ) from error


def _refuse_stranger(folder: Path, saved: dict | None, facts: dict) -> None:
    for name in () if saved is None else sorted({*facts, *saved["facts"]}):
        there, here = saved["facts"].get(name), facts.get(name)
        if there != here:
            raise CommandError(
                f"the checkpoint in {folder} was made with {name}={there!r}, this run has {name}={here!r}; choose "
                "another folder to keep both"
            )


def _save_model(student: nn.Module, path: Path, finish: Callable[[Path], None]) -> None:
    if _leads():

        def write(draft: Path) -> None:
            student.save_pretrained(draft)
            finish(draft)

        replace(path, write)
    parallel.wait()


def _leads() -> bool:
    return parallel.place()[0] == 0
