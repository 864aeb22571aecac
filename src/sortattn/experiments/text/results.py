"""The results of evaluations in one CSV file; a finished row is not measured again."""

from dataclasses import dataclass, fields
from pathlib import Path

from ... import records
from ...bench.machine import Measured


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
class Result(Measured):
    """A question with its answer, and the time it took."""

    model: str
    kernel: str
    task: str
    tokens: int
    limit: int
    prefixes: bool
    metric: str
    value: float
    texts: int
    seconds: float
    device: str
    transformers: str

    @property
    def question(self) -> Question:
        """What was asked."""
        return Question(**{field.name: getattr(self, field.name) for field in fields(Question)})


class Results(records.Records[Result]):
    """A file of results, of any machine."""

    def __init__(self, path: Path, *, fresh: bool = False):
        super().__init__(path, Result, {}, fresh=fresh)

    def __contains__(self, question: Question) -> bool:
        return any(row.question == question for row in self.rows)
