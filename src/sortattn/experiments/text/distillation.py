"""`sortattn text distill`: from the options to students and their losses."""

import zlib
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ...bench.command import check_names
from ...bench.run import use_threads
from ...distill import (
    END_TO_END,
    LAYERWISE,
    EndToEnd,
    Layerwise,
    Pupil,
    Settings,
    distill_together,
    pair,
    parallel,
)
from ...distill.answers import answered
from ...distill.objectives import embedding
from ...distill.plot import save_curves
from ...distill.run import numbers
from ...errors import CommandError
from ...kernels import KERNELS
from ..resumable import resumable
from .batches import PassageBatches, Prepared
from .data import Report, read_passages, show
from .encoder import load

# what a checkpoint must have been made with, beside the kernel and the data
FACTS = ("teacher", "bandwidth", "learn_bandwidth", "tokens", "lengths", "batch", "seed", "prefixes")


def distill_text(options: Namespace) -> int:
    """Distils what the options ask for; returns the exit code."""
    check_names("kernel", options.kernel, list(KERNELS))
    if options.smoke:
        options.layerwise_steps = options.end_to_end_steps = 4
        options.tokens, options.batch, options.every = 32, 4, 2
        options.lengths = options.lengths and [16, 32]
    use_threads(options.threads)
    return resumable(options, lambda device: _distill(options, device))


def _distill(options: Namespace, device: str) -> None:
    settings = Settings(options.precision, options.accumulation, options.clip, options.every, options.graphs)
    stages = [replace(LAYERWISE, steps=options.layerwise_steps), replace(END_TO_END, steps=options.end_to_end_steps)]
    ranges = [numbers(place, stage.steps, settings) for place, stage in enumerate(stages)]
    model, tokenizer = load(options.teacher, tokens=options.tokens, device=device)
    about = {name: getattr(options, name) for name in FACTS}
    about["data"], batches = _batches(options, tokenizer, ranges)
    # before the teacher gets the masks of its students, which cost it some time
    batches = answered(model, embedding, batches, ranges[1], _own_file(options.out, "answers.pt"), settings, about)
    pupils = []
    for kernel in dict.fromkeys(options.kernel):
        try:
            teacher, student = pair(model, kernel, options.bandwidth, options.learn_bandwidth)
        except ValueError as error:
            raise CommandError(str(error)) from error
        works = [Layerwise(teacher, student), EndToEnd(teacher, student)]
        pupils.append(
            Pupil(
                student,
                list(zip(stages, works, strict=True)),
                options.out / kernel,
                {**about, "kernel": kernel},
                finish=lambda path: tokenizer.save_pretrained(path),
            )
        )
    for pupil, rows in zip(pupils, distill_together(pupils, batches, settings), strict=True):
        if rows:
            _say_where(pupil.about["kernel"], rows, pupil.folder)


def _batches(options: Namespace, tokenizer, ranges: list[range]) -> tuple[str, Callable[[int], dict[str, Tensor]]]:
    """What the passages are, and the batches of these numbers."""
    report = Report()
    passages = [text for path in options.data for text in read_passages(path, report, options.join)]
    show(report)
    if not passages:
        raise CommandError(f"found no texts in {', '.join(map(str, options.data))}")
    lengths = [min(length, options.tokens) for length in options.lengths or [options.tokens]]
    data = _digest(passages)
    source = PassageBatches(passages, tokenizer, options.batch, lengths, options.seed, options.prefixes)
    facts = (
        f"{data}; {_digest(sorted(tokenizer.get_vocab()))}; {lengths} {options.batch} {options.seed} {options.prefixes}"
    )
    return data, Prepared(source, ranges, _own_file(options.out, "tokens.npz"), facts)


def _digest(texts: list[str]) -> str:
    """Their number and a sum over them: other texts are another run."""
    total = 0
    for text in texts:
        total = zlib.crc32(text.encode(), total)
    return f"{len(texts)} texts, {total:08x}"


def _own_file(folder: Path, name: str) -> Path:
    """A file of this process alone, as every one has its own batches."""
    rank, processes = parallel.place()
    return folder / (name if processes == 1 else f"{rank}-of-{processes}-{name}")


def _say_where(kernel: str, rows: list, folder: Path) -> None:
    for stage in dict.fromkeys(row.stage for row in rows):
        losses = [row.loss for row in rows if row.stage == stage]
        steps = f"{losses[0]:.3g} at the first step, {losses[-1]:.3g} at the last of {len(losses):,}"
        print(f"{kernel}, {stage}: loss {steps}")
    try:
        save_curves(rows, folder / "losses.png")
        print(f"Losses: {folder / 'losses.csv'}, {folder / 'losses.png'}")
    except ImportError:
        print(f"Losses: {folder / 'losses.csv'}; curves need matplotlib: pip install 'sortattn[bench]'")
    print(f"Student: {folder / END_TO_END.name}")
