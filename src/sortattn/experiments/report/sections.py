"""What each kind of results file shows on the page. A file is known by its columns."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

from ...bench import plot as bench_plot
from ...bench import store, summary
from ...bench.machine import Machine
from ...bench.paper import plot as paper_plot
from ...bench.paper import tables as paper_tables
from ...bench.paper.run import PaperRow
from ...errors import CommandError
from ...overview import kernel_table
from ...records import columns, read
from ...table import render
from ..mqar import command as mqar
from ..mqar import plot as mqar_plot
from ..recall import command as recall
from ..recall import plot as recall_plot
from ..text import pareto, scores
from ..text.results import Result
from ..vision import results as vision
from .page import Section

# what is shown of a file of an unknown kind
MOST_ROWS = 200


def kernels() -> Section:
    """The paper's Table 1."""
    section = Section("Kernels")
    section.note("The paper's Table 1, with the default bandwidths; for additive kernels the formula of one dimension.")
    section.table(kernel_table("csv"))
    return section


def _recall(section: Section, rows: Sequence[recall.Row]) -> None:
    section.note(recall.conditions(rows))
    _draw(section, lambda: recall_plot.draw(rows, recall.conditions(rows)), "loss against N for every kernel")
    section.table(recall.loss_table(rows, "csv"), "Lowest |A - Id|² over seeds and steps")


def _mqar(section: Section, rows: Sequence[mqar.Row]) -> None:
    section.note(mqar.conditions(rows))
    _draw(section, lambda: mqar_plot.draw(rows, mqar.conditions(rows)), "accuracy against pairs for every kernel")
    section.table(mqar.accuracy_table(rows, "csv"))


def _paper(section: Section, rows: Sequence[PaperRow]) -> None:
    section.note(paper_tables.conditions(rows))
    _draw(section, lambda: paper_plot.draw(rows), "time against N, here and in the paper")
    *found, (_, source) = paper_tables.blocks(rows, "csv")
    for heading, body in found:
        section.table(body, heading)
    section.note(f"The paper's figures: {source}")


def _text(section: Section, rows: Sequence[Result]) -> None:
    section.note(scores.conditions(rows))
    section.table(scores.score_table(rows, "csv"))
    section.note(f"The paper's figures: {scores.published()[1]}")


def _pareto(section: Section, points: Sequence[pareto.Point]) -> None:
    section.note(pareto.conditions(points))
    section.table(pareto.time_table(points, (), "csv"))


def _vision(section: Section, rows: Sequence[vision.Row]) -> None:
    section.note(vision.conditions(rows))
    section.table(vision.table6(rows, "csv"))
    section.note(f"The paper's figures: {vision.published()[1]}")


def _bench(section: Section, rows: Sequence[store.Row]) -> None:
    section.note(summary.conditions(rows))
    _draw(section, lambda: bench_plot.draw(rows), "time against N beside softmax")
    for (passes, dtype), panel in summary.panels(rows).items():
        section.table(summary.time_table(panel, "csv"), f"{passes}, {dtype} (in brackets: times as fast as softmax)")
        section.note("; ".join(f"{name} {text}" for name, text in summary.crossovers(panel).items()))
        memory = summary.memory_table(panel, "csv")
        if memory:
            section.table(memory, f"{passes}, {dtype}: peak memory beyond the inputs, as a multiple of them")


Fill = Callable[[Section, Sequence], None]
# kind of row -> title, and what fills the section; in the order of the page
KINDS: dict[type, tuple[str, Fill]] = {
    recall.Row: ("Associative recall", _recall),
    mqar.Row: ("Multi-query associative recall", _mqar),
    PaperRow: ("The paper's speed tables", _paper),
    store.Row: ("Speed beside softmax", _bench),
    Result: ("Scores of text models", _text),
    pareto.Point: ("Time of a document", _pareto),
    vision.Row: ("Accuracy of vision models", _vision),
}


def of_file(path: Path) -> tuple[int, Section]:
    """The section of a file, and where it stands on the page; unknown kinds come last, accuracy of the grid before."""
    heading = _heading(path)
    for place, (kind, (title, fill)) in enumerate(KINDS.items()):
        if heading == columns(kind):
            rows = read(path, kind)
            section = Section(f"{title}: {path.stem}")
            section.note(f"From {path.name}")
            if rows:
                fill(section, rows)
            return place, section
    if "grid" in path.stem:
        section = Section(f"Accuracy of the grid: {path.stem}")
        section.note(f"From {path.name}")
        section.table(_head(path))
        return len(KINDS), section
    section, inner = Section(f"Notes: {path.stem}"), Section("")
    inner.table(_head(path))
    section.folded(f"Rows of {path.name}", inner)
    return len(KINDS) + 1, section


def _heading(path: Path) -> tuple[str, ...]:
    """The names of the columns; CommandError if the file is no table."""
    try:
        heading = tuple(next(csv.reader(path.read_text().splitlines()), ()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CommandError(f"{path} is not a CSV file ({error})") from error
    if not heading:
        raise CommandError(f"{path} is empty; expected a results file, with the names of its columns first")
    return heading


def machines(paths: Sequence[Path]) -> Section:
    """Where and with which versions the results were made, as far as the files tell."""
    names = columns(Machine)
    lines: dict[tuple[str, ...], list[str]] = {}
    for path in paths:
        for row in csv.DictReader(path.read_text().splitlines()):
            if names[0] in row and names[-1] in row:
                files = lines.setdefault(tuple(row[name] for name in names), [])
                files += [path.name] if path.name not in files else []
    section = Section("Machines and versions")
    section.table(render([*names, "files"], [[*line, ", ".join(files)] for line, files in lines.items()], "csv"))
    return section


def _head(path: Path) -> str:
    """The first lines of a file of any columns; CommandError if one has more or fewer fields than the heading."""
    lines = path.read_text().splitlines()[: MOST_ROWS + 1]
    first, *rows = csv.reader(lines)
    for number, row in enumerate(rows, 2):
        if len(row) != len(first):
            raise CommandError(f"{path}, line {number}, is damaged: expected {len(first)} fields, got {len(row)}")
    return "\n".join(lines)


def _draw(section: Section, make: Callable[[], object], text: str) -> None:
    try:
        section.picture(make(), text)
    except CommandError as error:
        section.note(f"No picture: {error}")
