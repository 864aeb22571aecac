"""The tables of docs/experiments.md on text and vision are those of the committed rows."""

from itertools import takewhile
from pathlib import Path

import pytest

from sortattn.experiments.text import scores
from sortattn.experiments.text.pareto import Point
from sortattn.experiments.text.results import Result
from sortattn.experiments.vision import results as vision
from sortattn.records import read

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def table_below(heading):
    """The cells of the lines below the one that begins so, without marks of code."""
    lines = (ROOT / "docs" / "experiments.md").read_text().splitlines()
    (start,) = [place for place, line in enumerate(lines) if line.startswith(heading)]
    table = takewhile(lambda line: line.startswith("|"), lines[start:])
    return [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in table]


def cells(values, digits):
    return ["" if value is None else f"{value:.{digits}f}" for value in values]


def test_scores_of_text():
    found = {
        (row.model, row.kernel, row.task, row.tokens): row.value for row in read(RESULTS / "text-h200.csv", Result)
    }
    tasks = [("stsb-dev", 512), ("sts12-test", 512), ("cranfield", 512)]
    tasks += [("qmsum-val", tokens) for tokens in (512, 2048, 4096, 8192, 16384)]
    theirs, _ = scores.published()
    _, _, *lines = table_below("| model | STSb dev |")
    assert len(lines) == 10
    for name, *line in lines:
        model = ("teacher", "own") if name == "teacher" else (f"{name}/end-to-end", name)
        assert line[:8] == cells((found.get((*model, *task)) for task in tasks), 3), name
        paper = theirs["softmax" if name == "teacher" else name]
        assert float(line[8]) == pytest.approx(float(paper["mteb"]), abs=0.0501), name
        assert line[9:] == [paper["loco-2048"], paper["loco-8192"]], name


def test_stages_of_text():
    rows = [*read(RESULTS / "text-cpu.csv", Result), *read(RESULTS / "text-h200.csv", Result)]
    found = {(row.model, row.kernel): row.value for row in rows if row.task == "stsb-dev"}
    (_, *kernels), _, *lines = table_below("| STSb dev |")
    for (_, *line), stage in zip(lines, ("copy", "layerwise", "end-to-end"), strict=True):
        models = [("teacher" if stage == "copy" else f"{kernel}/{stage}", kernel) for kernel in kernels]
        assert line == cells(map(found.get, models), 3), stage


def test_times_of_documents():
    points = [point for point in read(RESULTS / "pareto-h200.csv", Point) if point.tokens == 16384]
    found = {(point.kernel, point.backend): point.milliseconds for point in points}
    (_, *names), _, (_, *times), _ = table_below("| 16,384 tokens |")
    for name, time in zip(names, times, strict=True):
        kernel, _, backend = name.partition(" ")
        value = found[kernel, {"(SDPA)": "sdpa", "(grid)": "grid", "": "auto"}[backend]]
        # rounded as by hand, which a half in binary is not
        assert float(time) == pytest.approx(value, abs=0.0501 if "." in time else 0.501), name


def test_accuracies_of_vision():
    found = {(row.kernel, row.stage): row.accuracy for row in read(RESULTS / "vision-h200.csv", vision.Row)}
    theirs, _ = vision.published()
    _, _, *lines = table_below("| accuracy in per cent |")
    assert len(lines) == 11
    for name, *line in lines:
        kernel = name.partition(" ")[0]
        ours, paper = ([table.get((kernel, stage)) for stage in vision.COLUMNS] for table in (found, theirs))
        assert (line[::2], line[1::2]) == (cells(ours, 2), cells(paper, 2)), name
