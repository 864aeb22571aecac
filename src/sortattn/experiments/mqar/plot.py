"""Accuracy against the number of pairs, one panel for each width."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from ...bench.plot import COLOURS, MARKERS, SOFTMAX_COLOUR, new_figure
from ...kernels import KERNELS


def save_plot(rows: Sequence, path: Path, conditions: str) -> None:
    """Writes the picture to `path`; CommandError where matplotlib is not installed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, conditions).savefig(path)


def draw(rows: Sequence, conditions: str):
    """The matplotlib figure."""
    widths = sorted({row.width for row in rows})
    figure = new_figure(3.6 * len(widths) + 1.4, 4)
    names = [name for name in KERNELS if any(row.kernel == name for row in rows)]
    places = figure.subplots(1, len(widths), squeeze=False, sharey=True)[0]
    for axes, width in zip(places, widths, strict=True):
        for index, name in enumerate(names):
            _draw_kernel(axes, [row for row in rows if (row.kernel, row.width) == (name, width)], index)
        axes.set_title(f"width {width}", fontsize=10)
        counts = sorted({row.pairs for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xticks([], minor=True)
        axes.set_ylim(-2, 102)
        axes.set_xlabel("pairs")
        axes.grid(True, color="0.93")
        axes.spines[["top", "right"]].set_visible(False)
    places[0].set_ylabel("values recalled, %")
    places[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.supxlabel(textwrap.fill(conditions, 60 * len(widths)), fontsize=6.5, color="0.4")
    return figure


def _draw_kernel(axes, rows: Sequence, index: int) -> None:
    best: dict[int, float] = {}
    for row in rows:
        best[row.pairs] = max(best.get(row.pairs, 0.0), 100 * row.accuracy)
    if not best:
        return
    name = rows[0].kernel
    colour = SOFTMAX_COLOUR if name == "softmax" else COLOURS[index % len(COLOURS)]
    line = zip(*sorted(best.items()), strict=True)
    axes.plot(*line, color=colour, marker=MARKERS[index % len(MARKERS)], markersize=4, label=name)
