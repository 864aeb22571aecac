"""The results of evaluations in one CSV file; a finished row is not measured again."""

import csv
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ...distill.store import replace
from ...errors import CommandError


@dataclass(frozen=True)
class Question:
    """What is measured: a model with an attention on a task, with texts cut at `tokens`; `limit` 0 is all of it."""

    model: str
    kernel: str
    task: str
    tokens: int
    limit: int
    prefixes: bool


@dataclass(frozen=True)
class Result(Question):
    """The answer, with the machine time it took."""

    metric: str
    value: float
    texts: int
    seconds: float
    device: str
    date: str

    @property
    def question(self) -> Question:
        return Question(**{field.name: getattr(self, field.name) for field in fields(Question)})


COLUMNS = tuple(field.name for field in fields(Result))


class Results:
    """A file of results; adding a row replaces the file in one step."""

    def __init__(self, path: Path, *, fresh: bool = False):
        self.path = path
        self.rows = [] if fresh or not path.exists() else read(path)

    def __contains__(self, question: Question) -> bool:
        return any(row.question == question for row in self.rows)

    def add(self, row: Result) -> None:
        """Appends a row; when this returns the file holds it."""
        self.rows.append(row)

        def write(draft: Path) -> None:
            with draft.open("w", newline="") as file:
                table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                table.writeheader()
                table.writerows(asdict(row) for row in self.rows)

        replace(self.path, write)


def read(path: Path) -> list[Result]:
    """The rows of a file; CommandError if one is damaged."""
    table = csv.DictReader(path.read_text().splitlines())
    if tuple(table.fieldnames or ()) != COLUMNS:
        raise CommandError(f"{path} is not a file of results: expected the columns {', '.join(COLUMNS)}; move it away")
    try:
        return [
            Result(**{field.name: _value(field.type, row[field.name]) for field in fields(Result)}) for row in table
        ]
    except (TypeError, ValueError) as error:
        raise CommandError(f"{path}, line {table.line_num}, is damaged ({error}); remove it, or use --fresh") from error


def _value(kind: type, text: str) -> object:
    return text == "True" if kind is bool else kind(text)
