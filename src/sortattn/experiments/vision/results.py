"""Rows of accuracies, and the paper's Table 6 made from them, beside the paper's own figures."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from ... import records
from ...bench.machine import Machine, Measured
from ...kernels import KERNELS
from ...table import render

COLUMNS = ("scratch", "copy", "layerwise", "end-to-end")


@dataclass(frozen=True)
class Row(Measured):
    """The test accuracy of one model in per cent, with how it was made.

    `steps` are those of the stage itself, `layerwise_steps` those before it; `teacher` is the accuracy of the teacher.
    A bandwidth that is `learned`, one per layer and head, began as `bandwidth`. `batch` counts the images of a process.
    """

    kernel: str
    stage: str
    bandwidth: float
    learned: bool
    accuracy: float
    teacher: float | None
    steps: int
    epochs: float
    layerwise_steps: int
    batch: int
    processes: int
    precision: str
    seed: int
    train_images: int
    test_images: int
    layers: int
    heads: int
    width: int
    patch: int
    seconds: float
    device: str
    threads: int
    transformers: str


# where and when it was looked at says nothing about a run that was finished before
CIRCUMSTANCES = {"seconds", "date", "device", "threads", "transformers", *records.columns(Machine)}


class Results(records.Records[Row]):
    """The rows of one file, of any machine."""

    def __init__(self, path: Path):
        super().__init__(path, Row, {})

    def keep(self, row: Row) -> None:
        """Adds a row, unless the same run is there already."""
        if not any(_facts(other) == _facts(row) for other in self.rows):
            self.add(row)


def _facts(row: Row) -> dict:
    return {name: value for name, value in asdict(row).items() if name not in CIRCUMSTANCES}


def published() -> tuple[dict[tuple[str, str], float], str]:
    """The paper's accuracies by kernel and stage, and where they come from."""
    text = resources.files(__package__).joinpath("table6.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    found = {(row["kernel"], stage): float(row[stage]) for row in rows for stage in COLUMNS if row[stage]}
    return found, rows[0]["source"]


def table6(rows: Sequence[Row], style: str = "text") -> str:
    """A line for each kernel that there are rows of, with the paper's figure behind each of ours; the newest counts."""
    theirs, _ = published()
    ours = {(row.kernel, row.stage): row for row in rows}
    lines = []
    for kernel in KERNELS:
        found = [ours.get((kernel, stage)) for stage in COLUMNS]
        if any(found):
            bandwidth = next(row.bandwidth for row in found if row)
            paper = [theirs.get((kernel, stage)) for stage in COLUMNS]
            cells = [
                cell
                for row, other in zip(found, paper, strict=True)
                for cell in (_cell(row and row.accuracy), _cell(other))
            ]
            lines.append([kernel, f"{bandwidth:.4g}", *cells])
    heading = [name for stage in COLUMNS for name in (stage, "paper")]
    return render(["kernel", "bandwidth", *heading], lines, style)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def conditions(rows: Sequence[Row]) -> str:
    """One sentence: how far the runs went, the machine, the versions, the date."""
    lengths = []
    for stage in COLUMNS:
        of_stage = [row for row in rows if row.stage == stage and row.steps]
        counts = sorted({f"{row.steps:,} steps ({row.epochs:.4g} epochs)" for row in of_stage})
        lengths += [f"{stage} {' or '.join(counts)}"] if counts else []
    last = rows[-1]
    return (
        f"Test accuracy in per cent on {last.test_images:,} images; {'; '.join(lengths) or 'nothing trained'}; "
        f"{last.layers} layers, {last.heads} heads, width {last.width}, patch {last.patch}; "
        f"{last.accelerator or last.cpu}, {last.threads} threads; torch {last.torch}, "
        f"transformers {last.transformers}, sortattn {last.sortattn}; {last.date.split()[0]}."
    )
