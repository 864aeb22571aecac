"""The rows of a benchmark in a CSV file: kept row by row, complete at any moment, continued by the next run."""

import csv
import io
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..errors import CommandError
from .cases import Case, Settings
from .machine import Machine


@dataclass(frozen=True)
class Row:
    """One measurement. Times are per call; `speedup` is `softmax_ms / median_ms`, both from the same rounds.

    `memory_bytes` is the peak beyond the inputs and `memory_ratio` the same as a multiple of the inputs. A number is
    None, an empty field in the file, where it was not measured.
    """

    kernel: str
    backend: str
    dtype: str
    passes: str
    n: int
    median_ms: float
    min_ms: float
    std_ms: float
    rounds: int
    softmax_ms: float | None
    speedup: float | None
    memory_bytes: int | None
    memory_ratio: float | None
    batch: int
    heads: int
    head_dim: int
    value_dim: int
    causal: bool
    device: str
    threads: int
    machine: str
    cpu: str
    accelerator: str
    python: str
    torch: str
    numba: str
    sortattn: str
    date: str

    @property
    def case(self) -> Case:
        return Case(self.kernel, self.backend, self.dtype, self.passes, self.n)


COLUMNS = tuple(field.name for field in fields(Row))
# rows may stand in one file only if they agree on all of these
COMMON = tuple(field.name for kind in (Settings, Machine) for field in fields(kind))


class Store:
    """The rows of one file. `add` writes the file anew beside itself and renames it, so it is never half written."""

    def __init__(self, path: Path, settings: Settings, machine: Machine, *, fresh: bool = False):
        self.path = path
        self.common = {**asdict(settings), **asdict(machine)}
        self.rows = [] if fresh or not path.exists() else read(path)
        for row in self.rows:
            self._refuse_stranger(row)

    def _refuse_stranger(self, row: Row) -> None:
        for name in COMMON:
            there, here = getattr(row, name), self.common[name]
            if there != here:
                raise CommandError(
                    f"{self.path} was measured with {name}={there!r}, this run has {name}={here!r}; "
                    "choose another --name or --out to keep both, or --fresh to replace it"
                )

    def __contains__(self, case: Case) -> bool:
        return any(row.case == case for row in self.rows)

    def add(self, row: Row) -> None:
        """Appends a row; when this returns the file holds it."""
        self._refuse_stranger(row)
        write(self.path, [*self.rows, row])
        self.rows.append(row)


def write(path: Path, rows: list, columns: tuple[str, ...] = COLUMNS) -> None:
    """Replaces the file by these rows, dataclasses with these columns, in one step."""
    text = io.StringIO()
    table = csv.DictWriter(text, columns, lineterminator="\n")
    table.writeheader()
    table.writerows(asdict(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    # in the same folder, since a rename is atomic only within a file system
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text.getvalue())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read(path: Path) -> list[Row]:
    """The rows of a file; CommandError if it is not a file of this kind or a row is damaged."""
    try:
        lines = list(csv.reader(path.read_text().splitlines()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise CommandError(f"{path} is not a CSV file ({error}); move it away or choose another --name") from error
    if not lines or tuple(lines[0]) != COLUMNS:
        came = ", ".join(lines[0]) if lines else "an empty file"
        raise CommandError(
            f"{path} is not a results file of this version: expected the columns {', '.join(COLUMNS)}, got {came}; "
            "move it away or choose another --name"
        )
    return [_parse(path, number, line) for number, line in enumerate(lines[1:], 2)]


def _parse(path: Path, number: int, line: list[str]) -> Row:
    if len(line) != len(COLUMNS):
        problem = f"expected {len(COLUMNS)} fields, got {len(line)}"
    else:
        try:
            return Row(**{field.name: _value(field.type, text) for field, text in zip(fields(Row), line, strict=True)})
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
