"""Time against N on logarithmic axes, from the rows of a results file."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from ..errors import CommandError
from .cases import SOFTMAX
from .store import Row
from .summary import conditions, labels, panels, times

# softmax is the grey line that the coloured ones have to pass; the hues stay apart for colour-blind readers
SOFTMAX_COLOUR = "0.35"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vP*X"


def save_plot(rows: Sequence[Row], path: Path) -> None:
    """Writes the picture to `path`; CommandError where matplotlib is not installed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(rows).savefig(path)


def new_figure(width: float, height: float):
    """An empty matplotlib figure; CommandError where matplotlib is not installed."""
    try:
        # the figure alone: pyplot would look for a screen
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CommandError("a plot needs matplotlib: pip install 'sortattn[bench]'") from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def draw(rows: Sequence[Row]):
    """The matplotlib figure, one panel for each pass and type; CommandError where matplotlib is not installed."""
    found = panels(rows)
    figure = new_figure(5.4 * len(found), 4.6)
    places = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, ((passes, dtype), panel) in zip(places, found.items(), strict=True):
        _draw_panel(axes, f"{passes}, {dtype}", panel)
    figure.supxlabel(textwrap.fill(conditions(rows), 96 * len(found)), fontsize=6.5, color="0.4")
    return figure


def _draw_panel(axes, title: str, rows: Sequence[Row]) -> None:
    others = 0
    _draw_paper(axes, rows)
    for pair, name in labels(rows).items():
        line = sorted(times(rows, pair).items())
        if pair == SOFTMAX:
            look = {"color": SOFTMAX_COLOUR, "linestyle": "--", "marker": "o", "label": "softmax (SDPA)"}
        else:
            look = {"color": COLOURS[others % len(COLOURS)], "marker": MARKERS[others % len(MARKERS)], "label": name}
            others += 1
        axes.plot(*zip(*line, strict=True), linewidth=1.8, markersize=4, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row.n for row in rows})
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes], rotation=45 if len(sizes) > 6 else 0, fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("N, queries and keys")
    axes.set_ylabel("milliseconds, median")
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="major", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)


def _draw_paper(axes, rows: Sequence[Row]) -> None:
    """The paper's own figures of the kernels in a panel, dotted, if it has the shape of its tables."""
    from .paper.tables import label, published

    first, sizes = rows[0], [row.n for row in rows]
    if (first.batch, first.heads, first.head_dim, first.value_dim, first.causal) != (4, 12, 64, 64, False):
        return
    for key, column in published()[0][first.passes].items():
        line = sorted((n, spent) for n, spent in column.items() if min(sizes) <= n <= max(sizes))
        if line and key[0] in {row.kernel for row in rows if row.kernel != SOFTMAX[0]}:
            axes.plot(*zip(*line, strict=True), color="0.6", linestyle=":", label=f"{label(key)}, paper (RTX 5090)")
