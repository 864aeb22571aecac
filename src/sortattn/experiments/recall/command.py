"""`sortattn recall`: from the options to the rows, the table and the figure."""

import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ...bench.command import check_names, usable_device
from ...bench.machine import Measured, now, this_machine
from ...bench.progress import Advance, progress
from ...bench.run import use_threads
from ...errors import CommandError
from ...records import Records, draw_beside
from ...table import render
from ..capacity import loss_bound, statement
from ..checkpoint import Checkpoint
from ..turns import take_turns
from .adam import AUTHORS, OWN
from .plot import save_plot
from .training import TARGET, TRAINED, Batch, make_trainer, start

# after so many steps the losses are looked at, and a checkpoint may be left
STRIDE, GPU_STRIDE = 20, 500
# how the paper's gaps were filled
ADAMS = {OWN: "Adam by the kernel", AUTHORS: "Adam as in the authors' code"}
# the sums of float32 may undercut a bound by so much
ROUNDING = 1e-4


@dataclass(frozen=True)
class Row(Measured):
    """One run. `bound` is what its loss cannot fall below; `seconds` those of its batch until it ended.

    `final_loss` belongs to the last step, `lowest_loss` to the best; a run ends when its loss is below the target.
    """

    kernel: str
    n: int
    seed: int
    steps: int
    final_loss: float
    lowest_loss: float
    bound: float
    seconds: float
    batch: int
    head_dim: int
    bandwidth: float
    adam: str
    most_steps: int
    device: str
    threads: int


def recall(options: Namespace) -> int:
    """Runs what is missing and shows everything; returns 0, 1 if a loss undercuts its bound, 130 if interrupted."""
    check_names("kernel", options.kernel, list(TRAINED))
    device = usable_device(options.device)
    common = {"head_dim": options.head_dim, "adam": options.adam, "most_steps": options.steps, "device": device}
    common |= {"threads": use_threads(options.threads), **asdict(this_machine(device))}
    path = options.out / f"{options.name}.csv"
    records = Records(path, Row, common, fresh=options.fresh)
    batches = make_batches(options, records.rows)
    try:
        _train_all(batches, options, records)
    except KeyboardInterrupt:
        print(f"\nInterrupted. {len(records.rows)} rows are in {path}; the same command continues.", file=sys.stderr)
        return 130
    except OSError as error:
        raise CommandError(f"{error}; {len(records.rows)} rows are in {path}, the same command continues") from error
    return show(records.rows, path)


def make_batches(options: Namespace, rows: Iterable[Row]) -> list[Batch]:
    """The batches of all runs that are not among the rows; on GPUs all lengths of a kernel share one."""
    done = {(row.kernel, row.n, row.seed) for row in rows}
    batches = []
    for kernel in dict.fromkeys(options.kernel):
        missing = [
            size
            for size in sorted(set(options.sizes))
            if any((kernel, size, seed) not in done for seed in range(options.seeds))
        ]
        groups = [tuple(missing)] if _on_gpu(options.device) else [(size,) for size in missing]
        batches += [
            Batch(kernel, sizes, options.seeds, options.head_dim, options.device, options.adam)
            for sizes in groups
            if sizes
        ]
    return batches


def _on_gpu(device: str) -> bool:
    return torch.device(device).type == "cuda"


def _train_all(batches: Sequence[Batch], options: Namespace, records: Records[Row]) -> None:
    with progress(len(batches) * options.steps) as advance:
        take_turns([_prepare(batch, options, records, advance) for batch in batches], options.device)


def _prepare(batch: Batch, options: Namespace, records: Records[Row], advance: Advance) -> Iterator[None]:
    """The training of a batch, with its checkpoint."""
    plan = {**asdict(batch), "sizes": list(batch.sizes), "most_steps": options.steps}
    sizes = "-".join(map(str, batch.sizes))
    path = records.path.with_name(f"{records.path.stem}.{batch.kernel}-{sizes}.checkpoint")
    checkpoint = Checkpoint(path, plan, every=options.save_every)
    if options.fresh:
        checkpoint.remove()
    return train(batch, options.steps, records, checkpoint, advance)


def train(batch: Batch, most: int, records: Records[Row], checkpoint: Checkpoint, advance: Advance) -> Iterator[None]:
    """Trains one batch, from its checkpoint if there is one, and adds its rows.

    It pauses whenever it has given the device some steps to take, so that others can give theirs.
    """
    state, seconds = _resume(batch, checkpoint)
    trainer = make_trainer(batch, state)
    longest = GPU_STRIDE if _on_gpu(batch.device) else STRIDE
    label = f"{batch.kernel} N={','.join(map(str, batch.sizes))}"
    done = int(state["time"])
    advance(label, done)
    begun = time.perf_counter() - max(seconds)
    while done < most and bool(state["active"].any()):
        stride = min(longest, most - done)
        # the runs that end in this stride ended before its end; the others go on
        running = state["active"].tolist()
        trainer.advance(stride)
        yield
        trainer.wait()
        done += stride
        passed = time.perf_counter() - begun
        seconds = [passed if active else before for active, before in zip(running, seconds, strict=True)]
        advance(f"{label} loss {float(state['loss'].max()):.1e}", stride)
        checkpoint.offer({"tensors": state, "seconds": seconds})
    trainer.finish()
    _add_rows(batch, records, state, seconds)
    checkpoint.remove()
    advance(label, most - done)


def _resume(batch: Batch, checkpoint: Checkpoint) -> tuple[dict, list[float]]:
    found = checkpoint.load()
    if found is None:
        return start(batch), [0.0] * len(batch.runs)
    return {name: part.to(batch.device) for name, part in found["tensors"].items()}, found["seconds"]


def _add_rows(batch: Batch, records: Records[Row], state: dict, seconds: Sequence[float]) -> None:
    kernel = TRAINED[batch.kernel]
    columns = zip(*(state[name].tolist() for name in ("steps", "loss", "lowest")), seconds, strict=True)
    held = {(row.kernel, row.n, row.seed) for row in records.rows}
    rows = [
        Row(
            kernel=kernel.name, n=size, seed=seed, steps=steps, final_loss=short(final), lowest_loss=short(lowest),
            bound=loss_bound(kernel, size, batch.head_dim), seconds=round(spent, 2), batch=len(batch.runs),
            bandwidth=kernel.default_bandwidth(batch.head_dim), date=now(), **records.common,
        )
        for (size, seed), (steps, final, lowest, spent) in zip(batch.runs, columns, strict=True)
        if (kernel.name, size, seed) not in held
    ]  # fmt: skip
    records.add(*rows)


def short(number: float) -> float:
    """Six digits, as many as float32 has."""
    return float(f"{number:.6g}")


def best(rows: Iterable[Row]) -> dict[tuple[str, int], Row]:
    """The row with the lowest loss over the seeds, by kernel and N."""
    found: dict[tuple[str, int], Row] = {}
    for row in rows:
        key = (row.kernel, row.n)
        if key not in found or row.lowest_loss < found[key].lowest_loss:
            found[key] = row
    return found


def loss_table(rows: Sequence[Row], style: str = "text") -> str:
    """The lowest loss over seeds and steps: a line for each kernel, a column for each N."""
    found = best(rows)
    sizes = sorted({row.n for row in rows})
    lines = []
    for name in [name for name in TRAINED if any(row.kernel == name for row in rows)]:
        cells = [f"{found[name, n].lowest_loss:.1e}" if (name, n) in found else "" for n in sizes]
        lines.append([name, statement(TRAINED[name], rows[0].head_dim), *cells])
    return render(["kernel", "capacity", *(f"N={n}" for n in sizes)], lines, style, left=2)


def conditions(rows: Sequence[Row]) -> str:
    """One sentence: the size of the experiment, the machine, the versions and the date."""
    first = rows[0]
    seeds = len({row.seed for row in rows})
    return (
        f"D={first.head_dim}, {ADAMS[first.adam]}, at most {first.most_steps:,} steps, "
        f"target {TARGET:g}, best of {seeds} seeds; "
        f"{first.accelerator or first.cpu}, {first.threads} threads; torch {first.torch}, sortattn {first.sortattn}; "
        f"{max(row.date for row in rows).split()[0]}."
    )


def show(rows: Sequence[Row], path: Path) -> int:
    """Prints the table and draws the figure; returns 1 if a loss undercuts its bound: a mistake of ours."""
    if not rows:
        raise CommandError(f"{path} holds no rows")
    print(f"Lowest |A - Id|_F^2\n\n{loss_table(rows)}\n\n{conditions(rows)}")
    draw_beside(path, lambda picture: save_plot(rows, picture, conditions(rows)), "Figure")
    wrong = [row for row in rows if row.lowest_loss < row.bound * (1 - ROUNDING)]
    for row in wrong:
        print(f"{row.kernel}, N = {row.n}: the loss {row.lowest_loss} is below its bound {row.bound}", file=sys.stderr)
    return 1 if wrong else 0
