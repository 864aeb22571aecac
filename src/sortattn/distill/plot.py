"""The curves of a run: loss against steps."""

from collections.abc import Sequence
from pathlib import Path

from .store import Row, replace


def save_curves(rows: Sequence[Row], path: Path) -> None:
    """Writes a picture with one panel per stage; ImportError where matplotlib is not installed."""
    from matplotlib.figure import Figure

    stages = list(dict.fromkeys(row.stage for row in rows))
    figure = Figure(figsize=(4.6 * len(stages), 3.6), dpi=150, layout="constrained")
    for axes, stage in zip(figure.subplots(1, len(stages), squeeze=False)[0], stages, strict=True):
        steps, losses = zip(*((row.step, row.loss) for row in rows if row.stage == stage), strict=True)
        axes.plot(steps, losses, color="#0072b2", linewidth=1.0)
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.set_title(stage, fontsize=10)
        axes.grid(True, which="major", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    replace(path, lambda draft: figure.savefig(draft, format="png"))
