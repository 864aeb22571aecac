"""`sortattn vision`: from the options to models, their accuracies and the table."""

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from torch import nn

from ...bench.command import check_names
from ...bench.machine import now, this_machine, version
from ...bench.run import use_threads
from ...distill import END_TO_END, LAYERWISE, EndToEnd, Layerwise, Settings, Stage, distill, logit_loss, pair, parallel
from ...distill.answers import digest
from ...distill.work import Work
from ...errors import CommandError
from ...kernels import KERNELS
from ..resumable import resumable
from . import data, model
from .batches import Batches
from .curves import Curve, save_picture
from .results import Results, Row, conditions, published, table6
from .training import SCRATCH, Scratch, accuracy

SMOKE = {"epochs": 2, "layerwise_steps": 4, "end_to_end_steps": 4, "batch": 16, "every": 2}
SMOKE_IMAGES = (64, 40)


def vision(options: Namespace) -> int:
    """Trains and tests what the options ask for; returns the exit code."""
    if options.smoke:
        vars(options).update(SMOKE)
    check_names("kernel", options.kernel, list(KERNELS))
    threads = use_threads(options.threads)

    def work(device: str) -> None:
        session = _Session(options, device, threads, *_images(options), Results(options.out / "vision.csv"))
        for kernel in dict.fromkeys(options.kernel):
            WORK[options.stage](session, kernel)
        if parallel.leads():
            session.show()

    return resumable(options, work)


def _images(options: Namespace) -> tuple[data.Images, data.Images]:
    if options.smoke:
        return data.synthetic(*SMOKE_IMAGES)
    if options.data is None:
        raise CommandError("expected --data FOLDER with CIFAR-10 in its binary version, or --smoke")
    return data.read_cifar10(options.data)


@dataclass
class _Session:
    """What the runs of one command share."""

    options: Namespace
    device: str
    threads: int
    train: data.Images
    test: data.Images
    results: Results

    @cached_property
    def facts(self) -> dict:
        """What a checkpoint must have been made with."""
        names = ("bandwidth", "learn_bandwidth", "batch", "seed")
        return {**{name: getattr(self.options, name) for name in names}, "data": data.digest(self.train)}

    @cached_property
    def teacher_accuracy(self) -> float:
        """Of the teacher, in per cent."""
        return round(accuracy(self.load_teacher(), self.test, self.options.precision), 4)

    def load_teacher(self) -> nn.Module:
        """A teacher with softmax attention, on the device."""
        teacher = model.load(self.options.teacher)
        kernel = model.kernel_of(teacher.config)
        if kernel not in ("softmax", "own"):
            raise CommandError(f"expected a teacher with softmax, the one in {self.options.teacher} has {kernel}")
        return teacher.to(self.device)

    def pair(self, kernel: str) -> tuple[nn.Module, nn.Module]:
        """The teacher, and the student with its weights."""
        try:
            return pair(self.load_teacher(), kernel, self.options.bandwidth, self.options.learn_bandwidth)
        except ValueError as error:
            raise CommandError(str(error)) from error

    def run(self, stage: Stage, kernel: str, student: nn.Module, work: Work, about: dict) -> tuple[float, float]:
        """Trains the student, or what is left of that; returns its accuracy and the seconds of all steps.

        Of several processes the first one looks after all that is written and shown, and returns the others nothing.
        """
        options, folder = self.options, self.options.out / f"{stage.name}-{kernel}"
        images = self.train.to(self.device)
        batches = Batches(images, size=options.batch, seed=options.seed, labelled=stage.name == SCRATCH.name)
        curve = Curve(folder)

        def watch(name: str, step: int) -> str:
            curve.add(step, accuracy(student, self.test, options.precision))
            return f", accuracy {curve.at(step):.2f}%"

        settings = Settings(options.precision, clip=options.clip, every=options.every, graphs=options.graphs)
        about = {"kernel": kernel, "shape": str(model.shape_of(student)), **self.facts, **about}
        losses = distill(student, [(stage, work)], batches, folder, settings, about=about, watch=watch)
        if not parallel.leads():
            return 0.0, 0.0
        if curve.at(stage.steps) is None:
            watch(stage.name, stage.steps)
        try:
            save_picture(f"{kernel}, {stage.name}", losses, curve.points, folder / "curves.png")
        except CommandError as error:
            print(error, file=sys.stderr)
        return curve.at(stage.steps), sum(row.seconds for row in losses)

    def keep(self, student: nn.Module, kernel: str, stage: str, found: float, **more) -> None:
        """Adds the row of a model."""
        if not parallel.leads():
            return
        options, config = self.options, student.config
        head_dim = config.hidden_size // config.num_attention_heads
        processes = parallel.place()[1]
        facts = {"teacher": None, "steps": 0, "layerwise_steps": 0, "seconds": 0.0, **more}
        facts["seconds"] = round(facts["seconds"], 2)
        self.results.keep(
            Row(
                kernel=kernel, stage=stage, accuracy=round(found, 4), **facts,
                bandwidth=round(options.bandwidth or KERNELS[kernel].default_bandwidth(head_dim), 6),
                learned=options.learn_bandwidth,
                epochs=round(facts["steps"] * options.batch * processes / len(self.train), 4),
                batch=options.batch, processes=processes, precision=options.precision, seed=options.seed,
                train_images=len(self.train), test_images=len(self.test),
                layers=config.num_hidden_layers, heads=config.num_attention_heads, width=config.hidden_size,
                patch=config.patch_size, device=self.device, threads=self.threads, **asdict(this_machine(self.device)),
                transformers=version("transformers") or "", date=now(),
            )
        )  # fmt: skip

    def show(self) -> None:
        """Prints the table of all runs on these images."""
        rows = [row for row in self.results.rows if row.train_images == len(self.train)]
        print(f"{table6(rows)}\n\n{conditions(rows)}")
        print(f"The paper's figures: {published()[1]}\nRows: {self.results.path}")


def _scratch(session: _Session, kernel: str) -> None:
    options = session.options
    shape = model.SMOKE if options.smoke else model.PAPER
    student = model.build(shape, kernel, options.bandwidth, options.seed, options.learn_bandwidth).to(session.device)
    steps = options.epochs * (len(session.train) // (options.batch * parallel.place()[1]))
    about = _compiled(options, student)
    found, seconds = session.run(replace(SCRATCH, steps=steps), kernel, student, Scratch(student), about)
    session.keep(student, kernel, SCRATCH.name, found, steps=steps, seconds=seconds)


def _copy(session: _Session, kernel: str) -> None:
    _, student = session.pair(kernel)
    found = accuracy(student, session.test, session.options.precision)
    session.keep(student, kernel, "copy", found, teacher=session.teacher_accuracy)


def _layerwise(session: _Session, kernel: str) -> tuple[nn.Module, nn.Module]:
    teacher, student = session.pair(kernel)
    stage = replace(LAYERWISE, steps=session.options.layerwise_steps)
    about = {"teacher": digest(teacher)}
    found, seconds = session.run(stage, kernel, student, Layerwise(teacher, student), about)
    more = {"teacher": session.teacher_accuracy, "steps": stage.steps, "seconds": seconds}
    session.keep(student, kernel, stage.name, found, **more)
    return teacher, student


def _end_to_end(session: _Session, kernel: str) -> None:
    # a run that is finished only gives its student back
    teacher, student = _layerwise(session, kernel)
    stage = replace(END_TO_END, steps=session.options.end_to_end_steps)
    before = {"layerwise_steps": session.options.layerwise_steps}
    about = {"teacher": digest(teacher), **before, **_compiled(session.options, teacher, student)}
    found, seconds = session.run(stage, kernel, student, EndToEnd(teacher, student, logit_loss), about)
    more = {"teacher": session.teacher_accuracy, "steps": stage.steps, "seconds": seconds, **before}
    session.keep(student, kernel, stage.name, found, **more)


def _compiled(options: Namespace, *models: nn.Module) -> dict:
    """Has the models compiled, in place, if that was asked for; roundings are others then, so a checkpoint holds it."""
    if not options.compile:
        return {}
    for one in models:
        one.compile(dynamic=False)
    return {"compile": True}


WORK: dict[str, Callable[[_Session, str], object]] = {
    "scratch": _scratch,
    "copy": _copy,
    "layerwise": _layerwise,
    "end-to-end": _end_to_end,
}
