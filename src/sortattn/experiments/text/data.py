"""Texts from local files. A line that cannot be read is named with its number, and the rest is kept."""

import csv
import gzip
import json
import math
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import CommandError

# a line of a plain text with fewer words is a heading or markup
LEAST_WORDS = 20
SHOWN = 5
# the line behind a page in a dump of a wiki
PAGE_END = "</page>"
# JSON writes characters beyond 16 bits as two escapes, and one alone is none
HALF = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass
class Report:
    """Lines that were left out: the file, the number, and why."""

    problems: list[str] = field(default_factory=list)

    def add(self, path: Path, number: int, problem: str) -> None:
        """Notes a line."""
        self.problems.append(f"{path}, line {number}: {problem}; left out")


def show(report: Report) -> None:
    """Prints the first lines that were left out, and how many more there are."""
    for problem in report.problems[:SHOWN]:
        print(problem, file=sys.stderr)
    if len(report.problems) > SHOWN:
        print(f"... and {len(report.problems) - SHOWN} more lines", file=sys.stderr)


@dataclass(frozen=True)
class Pairs:
    """Pairs of sentences and how alike people found them, 0 to 5."""

    name: str
    first: list[str]
    second: list[str]
    scores: list[float]


@dataclass(frozen=True)
class Retrieval:
    """Documents and queries by name, and for every query the gains of its relevant documents."""

    name: str
    documents: dict[str, str]
    queries: dict[str, str]
    gains: dict[str, dict[str, float]]


def lines(path: Path, report: Report) -> Iterator[tuple[int, str]]:
    """The numbered lines of a text file, compressed or not, that are UTF-8."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield number, line.decode().rstrip("\r\n")
                except UnicodeDecodeError as error:
                    report.add(path, number, f"expected UTF-8, got byte {line[error.start]:#04x}")
    except (OSError, EOFError, zlib.error) as error:
        raise CommandError(f"cannot read {path}: {error}") from error


def read_sts(path: Path, report: Report) -> Pairs:
    """`sentence1,sentence2,score` with a header, as the STS benchmark has it."""
    table = lines(path, report)
    _, header = next(table, (1, ""))
    if header != "sentence1,sentence2,score":
        raise CommandError(f"{path} must begin with sentence1,sentence2,score, got {header[:80]!r}")
    pairs = Pairs(path.name.removesuffix(".csv"), [], [], [])
    for number, line in table:
        try:
            # line by line: a quotation mark that is never closed would take all lines behind it
            (row,) = csv.reader([line], strict=True)
        except csv.Error as error:
            report.add(path, number, f"expected 3 fields, got {line[:40]!r} ({error})")
            continue
        if len(row) != 3:
            report.add(path, number, f"expected 3 fields, got {len(row)}")
        elif (score := _number(row[2])) is None:
            report.add(path, number, f"expected a score, got {row[2]!r}")
        else:
            pairs.first.append(row[0])
            pairs.second.append(row[1])
            pairs.scores.append(score)
    if len(pairs.scores) < 3:
        raise CommandError(f"{path} holds {len(pairs.scores)} pairs that can be read, expected at least 3")
    return pairs


def read_cranfield(folder: Path, report: Report) -> Retrieval:
    """A folder with `corpus.jsonl`, `queries.jsonl` (`id` and `text`) and `qrels.txt` (query, 0, document, gain)."""
    documents, queries = (
        {row["id"]: row["text"] for _, row in records(folder / name, ("id", "text"), report)}
        for name in ("corpus.jsonl", "queries.jsonl")
    )
    gains: dict[str, dict[str, float]] = {}
    path = folder / "qrels.txt"
    for number, line in lines(path, report):
        parts = line.split()
        gain = _number(parts[3]) if len(parts) == 4 else None
        if gain is None:
            report.add(path, number, f"expected a query, 0, a document and a number, got {line!r}")
        elif parts[0] not in queries or parts[2] not in documents:
            report.add(path, number, f"there is no query {parts[0]} or no document {parts[2]}")
        elif gain > 0:
            gains.setdefault(parts[0], {})[parts[2]] = gain
    return _retrieval(folder.name, documents, queries, gains)


def read_qmsum(path: Path, report: Report) -> Retrieval:
    """Meetings with `id`, `text` and `queries`: each asks for something specific, and wants its own meeting."""
    documents, queries, gains = {}, {}, {}
    for number, row in records(path, ("id", "text"), report):
        asked = row.get("queries")
        if not isinstance(asked, list) or not all(isinstance(query, str) for query in asked):
            report.add(path, number, 'expected "queries", a list of texts')
            continue
        documents[row["id"]] = row["text"]
        for place, query in enumerate(asked):
            name = f"{row['id']}-{place}"
            queries[name], gains[name] = query, {row["id"]: 1.0}
    return _retrieval(f"qmsum-{path.name.partition('.')[0]}", documents, queries, gains)


def read_passages(path: Path, report: Report, words: int = 0) -> list[str]:
    """Texts to learn from: `text` of JSON lines, the sentences of an STS file, or the longer lines of a plain text.

    Lines of a plain text that follow each other are joined until they have `words` words, those of one page where it is
    a dump of a wiki; what is shorter at the end of a page is left out.
    """
    name = path.name.removesuffix(".gz")
    if name.endswith(".jsonl"):
        return [row["text"] for _, row in records(path, ("text",), report)]
    if name.endswith(".csv"):
        pairs = read_sts(path, report)
        return [*pairs.first, *pairs.second]
    return list(_joined((line for _, line in lines(path, report)), words))


def _joined(texts: Iterable[str], words: int) -> Iterator[str]:
    parts: list[str] = []
    for line in texts:
        if line.count(" ") >= LEAST_WORDS - 1:
            parts.append(line)
        complete = parts and sum(part.count(" ") + 1 for part in parts) >= words
        if complete:
            yield "\n".join(parts)
        if complete or line.strip() == PAGE_END:
            parts = []


def records(path: Path, names: tuple[str, ...], report: Report) -> Iterator[tuple[int, dict]]:
    """The numbered JSON objects of a file that have texts under all these names."""
    for number, line in lines(path, report):
        try:
            row = json.loads(line)
        except ValueError as error:
            report.add(path, number, f"expected a JSON object, got {line[:40]!r} ({error})")
            continue
        if not isinstance(row, dict) or not all(isinstance(row.get(name), str) for name in names):
            report.add(path, number, f"expected a JSON object with texts under {' and '.join(names)}")
        elif HALF.search(line) and not all(_is_text(part) for part in _texts(row)):
            report.add(path, number, "expected text, got half of a pair of surrogates")
        else:
            yield number, row


def _retrieval(name: str, documents: dict, queries: dict, gains: dict) -> Retrieval:
    if not documents or not gains:
        raise CommandError(f"{name} holds {len(documents)} documents and {len(gains)} queries with relevant documents")
    return Retrieval(name, documents, {query: queries[query] for query in gains}, gains)


def _texts(row: dict) -> Iterator[str]:
    """The texts of a record, those in its lists too."""
    for value in row.values():
        yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, str))


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
