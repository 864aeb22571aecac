"""The accuracy along a run, in a file of its own, and the picture of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ... import records
from ...bench.plot import new_figure
from ...distill.store import Row as Loss
from ...files import replacing

NAME = "accuracy.csv"


@dataclass(frozen=True)
class Point:
    """The test accuracy in per cent after a step."""

    step: int
    accuracy: float


class Curve:
    """The points of a run; one that is measured again, as a run continues, takes the place of the old one."""

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self.points = records.read(self.path, Point) if self.path.exists() else []

    def add(self, step: int, accuracy: float) -> None:
        """Keeps a point; those after it were made by a run that has begun anew."""
        self.points = [*(point for point in self.points if point.step < step), Point(step, accuracy)]
        records.write(self.path, Point, self.points)

    def at(self, step: int) -> float | None:
        """The accuracy after a step, None if it was not measured."""
        return next((point.accuracy for point in self.points if point.step == step), None)


def save_picture(title: str, losses: Sequence[Loss], points: Sequence[Point], path: Path) -> None:
    """Loss and accuracy against steps; CommandError where matplotlib is not installed."""
    figure = new_figure(9.2, 3.6)
    left, right = figure.subplots(1, 2)
    left.plot([row.step for row in losses], [row.loss for row in losses], color="#0072b2", linewidth=1.0)
    left.set_yscale("log")
    left.set_ylabel("loss")
    right.plot(
        [point.step for point in points],
        [point.accuracy for point in points],
        color="#d55e00",
        marker="o",
        markersize=2,
    )
    right.set_ylabel("test accuracy, per cent")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(True, which="major", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    with replacing(path) as draft:
        figure.savefig(draft, format="png")
