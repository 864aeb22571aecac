"""Small tables as plain text, Markdown or CSV."""

import csv
import io
from collections.abc import Sequence

STYLES = ("text", "markdown", "csv")


def render(columns: Sequence[str], rows: Sequence[Sequence[str]], style: str = "text", left: int = 1) -> str:
    """The table as one string without a newline at its end; the first `left` columns are set flush left.

    >>> print(render(["N", "ms"], [["512", "1.5"], ["1,024", "12.0"]], "markdown", left=0))
    |     N |   ms |
    |------:|-----:|
    |   512 |  1.5 |
    | 1,024 | 12.0 |
    """
    if style == "csv":
        return _csv(columns, rows)
    if style == "markdown":
        # a bar would end the cell
        rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(len(line[index]) for line in [columns, *rows]) for index in range(len(columns))]
    heading, *body = [_pad(line, widths, left) for line in [columns, *rows]]
    if style == "markdown":
        rules = ["-" * (width + 1) + ("-" if index < left else ":") for index, width in enumerate(widths)]
        return "\n".join([_bars(heading), f"|{'|'.join(rules)}|", *map(_bars, body)])
    if style == "text":
        return "\n".join("  ".join(line).rstrip() for line in [heading, ["-" * width for width in widths], *body])
    raise ValueError(f"unknown table style {style!r}, expected one of {', '.join(STYLES)}")


def _pad(line: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    return [
        cell.ljust(width) if index < left else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]


def _bars(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _csv(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue().rstrip("\n")
