"""The paper's Figure 1: the loss against N on a logarithmic axis, with the capacities marked."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from ...bench.plot import COLOURS, MARKERS, new_figure
from ..capacity import bounds
from .training import TARGET, TRAINED


def save_plot(rows: Sequence, path: Path, conditions: str) -> None:
    """Writes the picture to `path`; CommandError where matplotlib is not installed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(rows, conditions).savefig(path)


def draw(rows: Sequence, conditions: str):
    """The matplotlib figure: a line for each kernel, dotted where `N - dim` bounds it, capacities as vertical lines."""
    figure = new_figure(9, 5)
    axes = figure.subplots()
    head_dim = rows[0].head_dim
    names = [name for name in TRAINED if any(row.kernel == name for row in rows)]
    for index, name in enumerate(names):
        look = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        # several kernels share a colour when there are more of them than colours
        look["linestyle"] = "-" if index < len(COLOURS) else "--"
        _draw_kernel(axes, [row for row in rows if row.kernel == name], look)
    _mark_capacities(axes, names, head_dim, max(row.n for row in rows))
    axes.set_yscale("log")
    axes.axhline(TARGET, color="0.7", linewidth=0.8, zorder=0)
    axes.set_ylim(bottom=TARGET / 2)
    axes.set_xlabel("N, tokens")
    axes.set_ylabel(f"lowest |A - Id|² ({TARGET:g}: reached)")
    axes.grid(True, color="0.93")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.supxlabel(textwrap.fill(conditions, 130), fontsize=6.5, color="0.4")
    return figure


def _draw_kernel(axes, rows: Sequence, look: dict) -> None:
    lowest: dict[int, float] = {}
    for row in rows:
        # runs end somewhere below the target; how far below says nothing
        lowest[row.n] = max(TARGET, min(lowest.get(row.n, float("inf")), row.lowest_loss))
    line = sorted(lowest.items())
    label = f"{rows[0].kernel} ({rows[0].bandwidth:.3g})"
    axes.plot(*zip(*line, strict=True), linewidth=1.6, markersize=4, label=label, **look)
    limits = sorted({(row.n, row.bound) for row in rows if row.bound > 0})
    if limits:
        axes.plot(*zip(*limits, strict=True), color=look["color"], linewidth=1, linestyle=":")


def _mark_capacities(axes, names: Sequence[str], head_dim: int, largest: int) -> None:
    marks: dict[float, list[str]] = {}
    for name in names:
        low, high = bounds(TRAINED[name], head_dim)
        for limit in {low, high} - {1.0}:
            if limit <= largest:
                marks.setdefault(limit, []).append(name)
    for limit, kernels in marks.items():
        axes.axvline(limit, color="0.75", linewidth=0.8, linestyle="--")
        axes.annotate(
            # above the lines, which would cross the names
            ", ".join(kernels), (limit, 1.01), xycoords=("data", "axes fraction"), fontsize=6, color="0.4",
            rotation=90, ha="center", va="bottom",
        )  # fmt: skip
