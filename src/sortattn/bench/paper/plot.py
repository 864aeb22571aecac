"""Time against N in log-log, measured here (solid) and in the paper (dotted), with the slopes in the legend."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from ..plot import COLOURS, MARKERS, new_figure
from .methods import PASSES
from .run import PaperRow
from .tables import Columns, conditions, label, measured, published, slope_text

# what is alike here and in the paper has one colour
HUES = {"add_laplace": COLOURS[1], "add_bump": COLOURS[2], "add_riesz": COLOURS[0], "softmax": "0.35"}


def save_plot(rows: Sequence[PaperRow], path: Path) -> None:
    """Writes the picture to `path`; CommandError where matplotlib is not installed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(rows).savefig(path)


def draw(rows: Sequence[PaperRow]):
    """The matplotlib figure: one panel for each table."""
    figure = new_figure(12, 6.4)
    for axes, passes in zip(figure.subplots(1, len(PASSES)), PASSES, strict=True):
        _draw(axes, measured(rows, passes), "here", linestyle="-", linewidth=1.8)
        _draw(axes, published()[0][passes], "RTX 5090", linestyle=":", linewidth=1.0)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("N, queries and keys")
        axes.set_ylabel("milliseconds, mean")
        axes.set_title(passes, fontsize=10)
        axes.grid(True, which="major", color="0.93")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=6, ncols=2, loc="upper left")
    figure.supxlabel(textwrap.fill(conditions(rows), 180), fontsize=6.5, color="0.4")
    return figure


def _draw(axes, columns: Columns, place: str, **look) -> None:
    for index, (key, column) in enumerate(columns.items()):
        text = f"{label(key)}, {place} (slope {slope_text(column)})"
        marker = MARKERS[index % len(MARKERS)]
        line = zip(*sorted(column.items()), strict=True)
        axes.plot(*line, color=HUES[key[0]], marker=marker, markersize=3.5, label=text, **look)
