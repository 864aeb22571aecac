"""`sortattn mqar`: from the options to the rows, the table and the figure."""

import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from ...bench.command import check_names, usable_device
from ...bench.machine import Measured, now, this_machine
from ...bench.progress import Advance, progress
from ...bench.run import use_threads
from ...errors import CommandError
from ...kernels import KERNELS
from ...records import Records, draw_beside
from ...table import render
from ..checkpoint import Checkpoint
from ..turns import take_turns
from .plot import save_plot
from .task import length_for
from .training import Run, make_trainer

# after so many steps the loss is shown, and a checkpoint may be left
STRIDE = 20
TEST_BATCHES = 16


@dataclass(frozen=True)
class Row(Measured):
    """One trained model: `accuracy` is the share of values it recalls on sequences it was not trained on."""

    kernel: str
    pairs: int
    width: int
    rate: float
    seed: int
    length: int
    accuracy: float
    loss: float
    seconds: float
    vocabulary: int
    layers: int
    heads: int
    batch: int
    most_steps: int
    device: str
    threads: int

    @property
    def key(self) -> tuple:
        return self.kernel, self.pairs, self.width, self.rate, self.seed


def mqar(options: Namespace) -> int:
    """Trains what is missing and shows everything; returns 0, or 130 if interrupted."""
    check_names("kernel", options.kernel, list(KERNELS))
    device = usable_device(options.device)
    shape = {"vocabulary": options.vocabulary, "layers": 2, "heads": options.heads, "batch": options.batch}
    shape |= {"most_steps": options.steps, "device": device}
    common = {**shape, "threads": use_threads(options.threads), **asdict(this_machine(device))}
    path = options.out / f"{options.name}.csv"
    records = Records(path, Row, common, fresh=options.fresh)
    runs = make_runs(options, shape, records.rows)
    try:
        _train_all(runs, options, records)
    except KeyboardInterrupt:
        print(f"\nInterrupted. {len(records.rows)} rows are in {path}; the same command continues.", file=sys.stderr)
        return 130
    except OSError as error:
        raise CommandError(f"{error}; {len(records.rows)} rows are in {path}, the same command continues") from error
    show(records.rows, path)
    return 0


def make_runs(options: Namespace, shape: dict, rows: Iterable[Row]) -> list[Run]:
    """The runs that are not among the rows; CommandError if one of them cannot be."""
    done = {row.key for row in rows}
    for pairs, width in product(options.pairs, options.width):
        if width % options.heads:
            raise CommandError(f"expected widths that are multiples of --heads {options.heads}, got {width}")
        if options.vocabulary <= 2 * pairs + 1:
            raise CommandError(f"{pairs} pairs need a --vocabulary above {2 * pairs + 1}, got {options.vocabulary}")
    sweep = product(options.kernel, options.pairs, options.width, options.rate, range(options.seeds))
    keys = [key for key in dict.fromkeys(sweep) if key not in done]
    return [Run(*key, length=length_for(key[1]), **shape) for key in keys]


def _train_all(runs: Sequence[Run], options: Namespace, records: Records[Row]) -> None:
    with progress(len(runs) * options.steps) as advance:
        take_turns([_prepare(run, options, records, advance) for run in runs], options.device)


def _prepare(run: Run, options: Namespace, records: Records[Row], advance: Advance) -> Iterator[None]:
    """The training of a model, with its checkpoint."""
    label = f"{run.kernel}-{run.pairs}-{run.width}-{run.rate:g}-{run.seed}"
    path = records.path.with_name(f"{records.path.stem}.{label}.checkpoint")
    checkpoint = Checkpoint(path, asdict(run), every=options.save_every)
    if options.fresh:
        checkpoint.remove()
    return train(run, records, checkpoint, advance)


def train(run: Run, records: Records[Row], checkpoint: Checkpoint, advance: Advance) -> Iterator[None]:
    """Trains one model, from its checkpoint if there is one, tests it and adds its row.

    It pauses whenever it has given the device some steps to take, so that others can give theirs.
    """
    trainer, found = make_trainer(run), checkpoint.load()
    seconds = 0.0
    if found is not None:
        trainer.load(found)
        seconds = found["seconds"]
    label = f"{run.kernel} {run.pairs} pairs width {run.width}"
    advance(label, trainer.done)
    begun = time.perf_counter() - seconds
    while trainer.done < run.most_steps:
        stride = min(STRIDE, run.most_steps - trainer.done)
        trainer.advance(stride)
        yield
        trainer.wait()
        seconds = time.perf_counter() - begun
        advance(f"{label} loss {trainer.loss:.2f}", stride)
        checkpoint.offer({**trainer.state(), "seconds": seconds})
    advance(f"{label} test", 0)
    accuracy, loss = (float(f"{number:.6g}") for number in (trainer.test(TEST_BATCHES), trainer.loss))
    own = {name: getattr(run, name) for name in ("kernel", "pairs", "width", "rate", "seed", "length")}
    records.add(Row(**own, accuracy=accuracy, loss=loss, seconds=round(seconds, 2), date=now(), **records.common))
    checkpoint.remove()


def best(rows: Iterable[Row]) -> dict[tuple[str, int, int], float]:
    """The best accuracy over learning rates and seeds, by kernel, pairs and width."""
    found: dict[tuple[str, int, int], float] = {}
    for row in rows:
        key = (row.kernel, row.pairs, row.width)
        found[key] = max(found.get(key, 0.0), row.accuracy)
    return found


def accuracy_table(rows: Sequence[Row], style: str = "text") -> str:
    """Per cent of values recalled: a line for each kernel and width, a column for each number of pairs."""
    found = best(rows)
    counts = sorted({row.pairs for row in rows})
    lines = [
        [name, str(width), *(f"{100 * found[name, n, width]:.1f}" if (name, n, width) in found else "" for n in counts)]
        for name in KERNELS
        for width in sorted({row.width for row in rows if row.kernel == name})
    ]
    return render(["kernel", "width", *(f"{n} pairs" for n in counts)], lines, style)


def conditions(rows: Sequence[Row]) -> str:
    """One sentence: the size of the experiment, the machine, the versions and the date."""
    first = rows[0]
    return (
        f"Per cent of values recalled, best of {len({row.rate for row in rows})} learning rates and "
        f"{len({row.seed for row in rows})} seeds; {first.layers} layers, {first.heads} heads, "
        f"vocabulary {first.vocabulary:,}, {first.most_steps:,} steps of {first.batch}; "
        f"{first.accelerator or first.cpu}, {first.threads} threads; torch {first.torch}, sortattn {first.sortattn}; "
        f"{max(row.date for row in rows).split()[0]}."
    )


def show(rows: Sequence[Row], path: Path) -> None:
    """Prints the table and draws the figure, and says where both are."""
    print(f"{accuracy_table(rows)}\n\n{conditions(rows)}")
    draw_beside(path, lambda picture: save_plot(rows, picture, conditions(rows)), "Figure")
