"""Keeps the tables of a document equal to the results they come from: `python -m sortattn.bench.report [--check]`.

A block between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->` is generated from `NAME.csv`, which `sortattn bench`
has written; with `grid` in place of `bench`, from what `sortattn grid` has written; with `brief`, a few columns of
`NAME.csv`, see `brief.py`.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import CommandError
from . import brief, grid
from .store import Row, read
from .summary import conditions, crossovers, memory_table, panels, time_table

BLOCK = re.compile(
    r"(?P<begin><!-- (?P<kind>bench|grid|brief):(?P<name>[\w.-]+)(?P<words>( \w+=\S+)*) -->\n)"
    r".*?(?P<end><!-- /(?P=kind):(?P=name) -->)",
    re.DOTALL,
)


def block(rows: Sequence[Row]) -> str:
    """The Markdown that stands between the two marks: a table of times for each pass and type, then of memory."""
    parts = [conditions(rows)]
    for (passes, dtype), panel in panels(rows).items():
        parts.append(f"**{passes}, {dtype}** (in brackets: how many times as fast as softmax)")
        parts.append(time_table(panel, "markdown"))
        parts.append("Crossover: " + "; ".join(f"`{name}` {text}" for name, text in crossovers(panel).items()) + ".")
        memory = memory_table(panel, "markdown")
        if memory:
            parts.append(f"**{passes}, {dtype}: peak memory beyond the inputs**, as a multiple of them")
            parts.append(memory)
    return "\n\n".join(parts) + "\n"


def refresh(document: str, results: Path) -> str:
    """The document with every block generated anew from the files in the folder `results`."""

    def replace(match: re.Match) -> str:
        path = results / f"{match['name']}.csv"
        if not path.exists():
            raise CommandError(f"the block {match['kind']}:{match['name']} needs {path}, which is not there")
        if match["kind"] == "brief":
            return match["begin"] + brief.block(path, match["words"].split()) + match["end"]
        rows = grid.read(path) if match["kind"] == "grid" else read(path)
        if not rows:
            raise CommandError(f"{path} holds no rows")
        text = grid.block(rows) if match["kind"] == "grid" else block(rows)
        return match["begin"] + text + match["end"]

    return BLOCK.sub(replace, document)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites the document, or with `--check` only says whether it would change; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sortattn.bench.report", description=__doc__.splitlines()[0])
    parser.add_argument("document", type=Path, nargs="?", default=Path("README.md"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a block is out of date")
    options = parser.parse_args(arguments)
    try:
        before = options.document.read_text()
        after = refresh(before, options.results)
    except (CommandError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if before == after:
        print(f"{options.document} is up to date")
        return 0
    if options.check:
        print(f"{options.document} is out of date; run: python -m sortattn.bench.report", file=sys.stderr)
        return 1
    options.document.write_text(after)
    print(f"{options.document} has been updated")
    return 0


if __name__ == "__main__":
    sys.exit(main())
