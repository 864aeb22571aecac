"""Rows in a CSV file: kept row by row, complete at any moment, continued by the next run.

A kind of row is a frozen dataclass whose fields are `str`, `int`, `float`, `bool`, `int | None` or `float | None`.
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, asdict, fields, is_dataclass
from pathlib import Path
from typing import Generic, TypeVar

from .errors import CommandError
from .files import check_writable, replacing

Row = TypeVar("Row")


class Records(Generic[Row]):
    """The rows of one file, all of the same `kind` and with the same values of the columns `common`."""

    def __init__(self, path: Path, kind: type[Row], common: Mapping[str, object], *, fresh: bool = False):
        self.path, self.kind, self.common = path, kind, dict(common)
        check_writable(path)
        self.rows: list[Row] = [] if fresh or not path.exists() else read(path, kind)
        for row in self.rows:
            self._refuse_stranger(row)

    def _refuse_stranger(self, row: Row) -> None:
        for name, here in self.common.items():
            there = getattr(row, name)
            if there != here:
                raise CommandError(
                    f"{self.path} was measured with {name}={there!r}, this run has {name}={here!r}; "
                    "choose another --name or --out to keep both, or --fresh to replace it"
                )

    def add(self, *rows: Row) -> None:
        """Appends rows; when this returns the file holds them."""
        for row in rows:
            self._refuse_stranger(row)
        write(self.path, self.kind, [*self.rows, *rows])
        self.rows.extend(rows)


def columns(kind: type) -> tuple[str, ...]:
    """The heading of a file with rows of this kind."""
    return tuple(field.name for field in _fields(kind))


def _fields(kind: type) -> list[Field]:
    """The fields in the order of the columns: its own first, then those of the class it is made from."""
    inherited = {field.name for base in kind.__bases__ if is_dataclass(base) for field in fields(base)}
    return sorted(fields(kind), key=lambda field: field.name in inherited)


def write(path: Path, kind: type, rows: Sequence[object]) -> None:
    """Replaces the file by these rows in one step."""
    text = io.StringIO()
    table = csv.DictWriter(text, columns(kind), lineterminator="\n")
    table.writeheader()
    table.writerows(asdict(row) for row in rows)
    with replacing(path) as draft:
        draft.write_text(text.getvalue())


def read(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of a file; CommandError if it is not a file of this kind or a row is damaged."""
    try:
        lines = list(csv.reader(path.read_text().splitlines()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise CommandError(f"{path} is not a CSV file ({error}); move it away or choose another --name") from error
    wanted = columns(kind)
    if not lines or tuple(lines[0]) != wanted:
        came = ", ".join(lines[0]) if lines else "an empty file"
        raise CommandError(
            f"{path} is not a results file of this version: expected the columns {', '.join(wanted)}, got {came}; "
            "move it away or choose another --name"
        )
    return [_parse(path, kind, number, line) for number, line in enumerate(lines[1:], 2)]


def _parse(path: Path, kind: type[Row], number: int, line: list[str]) -> Row:
    wanted = _fields(kind)
    if len(line) != len(wanted):
        problem = f"expected {len(wanted)} fields, got {len(line)}"
    else:
        try:
            return kind(**{field.name: _value(field.type, text) for field, text in zip(wanted, line, strict=True)})
        except ValueError as error:
            problem = str(error)
    raise CommandError(f"{path}, line {number}, is damaged: {problem}; remove the line or measure anew with --fresh")


def _value(kind: object, text: str) -> object:
    if kind in (str, int, float):
        return kind(text)
    if kind is bool:
        if text not in ("True", "False"):
            raise ValueError(f"expected True or False, got {text!r}")
        return text == "True"
    # the rest are `int | None` and `float | None`
    return None if text == "" else kind.__args__[0](text)


def draw_beside(path: Path, draw: Callable[[Path], object], name: str) -> None:
    """Draws the picture of the rows in a file beside it, if that can be done here, and says where both are."""
    picture = path.with_suffix(".png")
    try:
        draw(picture)
    except CommandError as error:
        print(f"\nRows: {path}\n{name}: none; {error}")
    else:
        print(f"\nRows: {path}\n{name}: {picture}")
