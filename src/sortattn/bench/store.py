"""The rows of a benchmark in a CSV file."""

from dataclasses import asdict, dataclass
from pathlib import Path

from .. import records
from .cases import Case, Settings
from .machine import Machine, Measured


@dataclass(frozen=True)
class Row(Measured):
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

    @property
    def case(self) -> Case:
        return Case(self.kernel, self.backend, self.dtype, self.passes, self.n)


COLUMNS = records.columns(Row)


class Store(records.Records[Row]):
    """The rows of one file, all with the same settings and from the same machine."""

    def __init__(self, path: Path, settings: Settings, machine: Machine, *, fresh: bool = False):
        super().__init__(path, Row, {**asdict(settings), **asdict(machine)}, fresh=fresh)

    def __contains__(self, case: Case) -> bool:
        return any(row.case == case for row in self.rows)


def write(path: Path, rows: list[Row]) -> None:
    """Replaces the file by these rows in one step."""
    records.write(path, Row, rows)


def read(path: Path) -> list[Row]:
    """The rows of a file; CommandError if it is not a file of this kind or a row is damaged."""
    return records.read(path, Row)
