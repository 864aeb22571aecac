"""One self-contained HTML page: style, tables and pictures are all in it."""

import base64
import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from ..._version import __version__

# wide tables and pictures scroll in a box of their own, so that the page fits a phone; colours follow the reader
STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1e; --soft: #5c5c66; --paper: #fff; --line: #dcdce2; --band: #f4f4f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8ec; --soft: #a2a2ad; --paper: #16161a; --line: #34343c; --band: #202027; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin-bottom: .4rem; }
a { color: inherit; } nav { display: flex; flex-wrap: wrap; gap: 0 .9rem; } p, summary { overflow-wrap: anywhere; }
.note { color: var(--soft); font-size: .85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
.words { text-align: left; }
tbody tr:nth-child(even) { background: var(--band); }
img { display: block; width: 100%; min-width: 36rem; height: auto; background: #fff; border-radius: .4rem; }
""".strip()


@dataclass
class Section:
    """A heading and what stands below it, as finished HTML."""

    title: str
    parts: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """A line in small print."""
        self.parts.append(f'<p class="note">{escape(text)}</p>')

    def table(self, text: str, heading: str = "") -> None:
        """A table given as CSV, as `sortattn.table.render` makes it."""
        first, *rows = csv.reader(io.StringIO(text))
        kinds = [' class="words"' if _words(column) else "" for column in zip(*rows, strict=True)] or [""] * len(first)
        head = "".join(f'<th scope="col"{kind}>{escape(cell)}</th>' for cell, kind in zip(first, kinds, strict=True))
        lines = (
            "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) for row in rows
        )
        body = "".join(f"<tr>{line}</tr>\n" for line in lines)
        self._heading(heading)
        self._box(f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>")

    def picture(self, figure, text: str) -> None:
        """A matplotlib figure, as a drawing in the page; `text` says what it shows."""
        self._box(f'<img alt="{escape(text)}" src="data:image/svg+xml;base64,{_drawing(figure)}">')

    def folded(self, summary: str, inner: "Section") -> None:
        """Another section's parts, hidden until the reader asks for them."""
        body = "\n".join(inner.parts)
        self.parts.append(f"<details><summary>{escape(summary)}</summary>\n{body}\n</details>")

    def _box(self, inner: str) -> None:
        # a box that scrolls must be reachable by the keyboard
        self.parts.append(f'<div class="scroll" tabindex="0">{inner}</div>')

    def _heading(self, text: str) -> None:
        if text:
            self.parts.append(f"<h3>{escape(text)}</h3>")


def _words(cells: Sequence[str]) -> bool:
    """Whether a column holds words: some cell is neither empty, nor a dash, nor begins with a digit after a sign."""
    rests = (cell.lstrip("+-<>=~ ") for cell in cells)
    return any(rest and not rest[0].isdigit() for rest in rests)


def _drawing(figure) -> str:
    from matplotlib import rc_context

    drawing = io.BytesIO()
    # the same rows give the same page: neither the date nor random names in it
    with rc_context({"svg.hashsalt": "sortattn"}):
        figure.savefig(drawing, format="svg", metadata={"Date": None})
    return base64.b64encode(drawing.getvalue()).decode("ascii")


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole page."""
    links = "".join(f'<a href="#part-{number}">{escape(one.title)}</a>' for number, one in enumerate(sections, 1))
    body = "\n".join(
        f'<section id="part-{number}">\n<h2>{escape(one.title)}</h2>\n' + "\n".join(one.parts) + "\n</section>"
        for number, one in enumerate(sections, 1)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{STYLE}
</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p class="note">Made by sortattn {escape(__version__)} from the files named below.</p>
<nav>{links}</nav>
</header>
<main>
{body}
</main>
</body>
</html>
"""
