"""Runs stages of distillation: one student or several side by side, checkpoints, and where to continue."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from ..bench.progress import Advance, progress
from ..errors import CommandError
from . import parallel
from .replay import Batch, Recorder
from .schedule import Stage
from .store import Losses, Row, alone_in, load_checkpoint, replace, save_checkpoint
from .training import Settings, Training, autocast
from .work import EXPECTED, Work

# the batch with this number: the same at every call, so that a run that continues sees what it would have seen
Batches = Callable[[int], Batch]
# no stage has more steps: the batches of the next one begin there
_STAGE = 10_000_000
# steps of a GPU between two looks at their losses, which wait for it
_LOOK = 50


@dataclass
class Pupil:
    """A student with its stages, each with its work (`Layerwise`, `EndToEnd`), and the folder of its run.

    `about` is what must not change when a run continues: text and numbers. `finish` may add to the folder of a model, a
    tokenizer say. `watch` is called with the stage and the step before every checkpoint; what it returns is shown
    beside the loss from then on.
    """

    student: nn.Module
    stages: Sequence[tuple[Stage, Work]]
    folder: Path
    about: dict = field(default_factory=dict)
    finish: Callable[[Path], None] = lambda path: None
    watch: Callable[[str, int], str] = lambda stage, step: ""


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

    `folder` gets `checkpoint.pt`, `losses.csv` and the model after every stage under the stage's name. The same call
    continues an interrupted run, with exactly the numbers it would have had. The options are those of `Pupil`.

    Under `torchrun` every process calls it, with a model on its own device; the first one writes.
    """
    (rows,) = distill_together([Pupil(student, stages, folder, about or {}, finish, watch)], batches, settings)
    return rows


def distill_together(pupils: Sequence[Pupil], batches: Batches, settings: Settings | None = None) -> list[list[Row]]:
    """Trains several students with the same stages on the same batches; each learns what it would have learned alone.

    Where the teacher's part is common to all, as in `Layerwise`, it is done once for all; in other stages students come
    one after another, in this order.
    """
    settings = settings or Settings()
    total = sum(stage.steps for pupil in pupils for stage, _ in pupil.stages)
    shown = progress(total) if parallel.leads() else contextlib.nullcontext(lambda text, steps: None)
    with contextlib.ExitStack() as stack, shown as advance:
        for pupil in pupils if parallel.leads() else ():
            stack.enter_context(alone_in(pupil.folder))
        runs = [_Run(pupil, settings, advance) for pupil in pupils]
        for place in range(len(pupils[0].stages)):
            for group in _groups([run for run in runs if run.has_to_learn(place)], place):
                _train(group, place, batches, settings)
    return [run.losses.rows if run.losses else [] for run in runs]


def numbers(place: int, steps: int, settings: Settings) -> range:
    """The numbers of the batches of this process in the stage at that place."""
    rank, processes = parallel.place()
    each = settings.accumulation * processes
    return range(place * _STAGE * each + rank, (place * _STAGE + steps) * each + rank, processes)


def _groups(runs: list["_Run"], place: int) -> Iterator[list["_Run"]]:
    """Those that learn at the same time."""
    together = [run for run in runs if run.pupil.stages[place][1].together]
    if together:
        yield together
    yield from ([run] for run in runs if run not in together)


def _train(runs: list["_Run"], place: int, batches: Batches, settings: Settings) -> None:
    """All steps of a stage that are not done yet; a run that is ahead waits for the others."""
    device = next(runs[0].pupil.student.parameters()).device
    recorder = Recorder(device, settings.graphs)
    stage, work = runs[0].pupil.stages[place]

    def teach(batch: Batch) -> object:
        with torch.no_grad(), autocast(device, settings):
            return work.teach(batch)

    taught = recorder.record(teach)
    with recorder.stream():
        for run in runs:
            run.begin(place, recorder)
        own = numbers(place, stage.steps, settings)
        count = settings.accumulation
        for step in range(min(run.training.step for run in runs), stage.steps):
            learning = [run for run in runs if run.training.step == step]
            for number in own[step * count : (step + 1) * count]:
                batch = recorder.feed(batches(number))
                known = EXPECTED in batch or work.teach is None
                lesson = batch.get(EXPECTED) if known else taught(batch)
                for run in learning:
                    run.training.learn(batch, lesson)
            for run in learning:
                run.training.update()
                run.keep()
        for run in runs:
            run.end(place)


class _Run:
    """A pupil on its way: what is on disk, and the training of the present stage."""

    def __init__(self, pupil: Pupil, settings: Settings, advance: Advance):
        self.pupil, self.settings, self.advance = pupil, settings, advance
        self.facts = {**pupil.about, **asdict(settings), **{stage.name: asdict(stage) for stage, _ in pupil.stages}}
        self.facts["processes"] = parallel.place()[1]
        # how often it is saved changes nothing, nor who launches the kernels
        del self.facts["every"], self.facts["graphs"]
        self.saved = load_checkpoint(pupil.folder, next(pupil.student.parameters()).device)
        _refuse_stranger(pupil.folder, self.saved, self.facts)
        names = [stage.name for stage, _ in pupil.stages]
        self.done = (0, 0) if self.saved is None else (names.index(self.saved["stage"]), self.saved["step"])

        def known(stage: str, step: int) -> bool:
            return stage in names and (names.index(stage), step) <= self.done

        self.losses = Losses(pupil.folder, known) if parallel.leads() else None
        self.training: Training | None = None
        self.seen = ""
        advance("", sum(stage.steps for stage, _ in pupil.stages[: self.done[0]]) + self.done[1])

    def has_to_learn(self, place: int) -> bool:
        """Whether steps of that stage are left; after the last one that is done the student is as it was then."""
        stage = self.pupil.stages[place][0]
        if self.done == (place, stage.steps):
            _restore(self.pupil.student, self.saved["student"], self.pupil.folder)
            self.save_model(stage, again=False)
            self.saved, self.done = None, (place + 1, 0)
        return self.done[0] <= place

    def begin(self, place: int, recorder: Recorder) -> None:
        """Starts a stage, or continues it."""
        self.training = Training(*self.pupil.stages[place], self.settings, recorder)
        if self.saved is not None and place == self.done[0]:
            _restore(self.pupil.student, self.saved["student"], self.pupil.folder)
            self.training.load(self.saved["optimizer"], self.saved["step"])
        # its tensors are not needed any more
        self.saved = None

    def keep(self) -> None:
        """Looks at the losses and writes the checkpoint, where it is time for that."""
        training, stage = self.training, self.training.stage
        last = training.step == stage.steps
        due = last or training.step % self.settings.every == 0
        if not due and training.device.type == "cuda" and training.step % _LOOK:
            return
        try:
            rows = training.rows()
        except CommandError as error:
            raise CommandError(
                f"{error}; the checkpoint in {self.pupil.folder} is sound, but a lower learning rate needs a folder of "
                "its own"
            ) from error
        if self.losses is None:
            return
        self.losses.add(rows)
        self.advance(f"{stage.name} step {training.step:,}, loss {rows[-1].loss:.3g}{self.seen}", len(rows))
        if due:
            self.seen = self.pupil.watch(stage.name, training.step)
            self.save(last)

    def save(self, last: bool) -> None:
        """Writes the checkpoint; after the last step of a stage nobody needs the optimiser any more."""
        training = self.training
        state = {"stage": training.stage.name, "step": training.step, "facts": self.facts}
        state["student"] = self.pupil.student.state_dict()
        if not last:
            state["optimizer"] = training.optimizer.state_dict()
        save_checkpoint(self.pupil.folder, state)

    def end(self, place: int) -> None:
        """Writes the model of a finished stage."""
        self.save_model(self.training.stage)
        self.training.close()
        self.training, self.done = None, (place + 1, 0)

    def save_model(self, stage: Stage, *, again: bool = True) -> None:
        """Writes the student under the name of the stage; if not `again`, only where that is not there."""
        path = self.pupil.folder / stage.name

        def write(draft: Path) -> None:
            self.pupil.student.save_pretrained(draft)
            self.pupil.finish(draft)

        # the first process alone looks, since the others may come when it has written already; all of them wait
        if parallel.leads() and (again or not path.exists()):
            _save(path, write)
        parallel.wait()


def _save(path: Path, write: Callable[[Path], None]) -> None:
    from safetensors import SafetensorError

    try:
        replace(path, write)
    except SafetensorError as error:
        # a full disk, for one
        raise OSError(f"cannot write {path} ({error})") from error


def _restore(student: nn.Module, weights: dict, folder: Path) -> None:
    try:
        student.load_state_dict(weights)
    except RuntimeError as error:
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
