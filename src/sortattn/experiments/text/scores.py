"""All scores in one table, a line for each model, with the paper's Table 3 behind."""

import csv
from collections.abc import Sequence
from importlib import resources

from ...table import render
from .encoder import OWN
from .results import Result

# columns of the paper, whose tasks are not ours
PAPER = {"mteb": "paper: MTEB", "loco-2048": "paper: LoCo 2,048", "loco-8192": "paper: LoCo 8,192"}


def published() -> tuple[dict[str, dict[str, str]], str]:
    """The paper's scores by kernel, and where they come from."""
    text = resources.files(__package__).joinpath("table3.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    return {row["kernel"]: row for row in rows}, rows[0]["source"]


def score_table(rows: Sequence[Result], style: str = "text") -> str:
    """A line for each model and kernel, a column for each task at each length; of equal questions the newest counts."""
    theirs, _ = published()
    tasks = list(dict.fromkeys((row.task, row.tokens) for row in rows))
    found = {(row.model, row.kernel, row.task, row.tokens): row for row in rows}
    lines = []
    for model, kernel in dict.fromkeys((row.model, row.kernel) for row in rows):
        cells = [found.get((model, kernel, *task)) for task in tasks]
        paper = theirs["softmax" if kernel == OWN else kernel]
        scores = ["" if cell is None else f"{cell.value:.4f}" for cell in cells]
        lines.append([model, kernel, *scores, *(paper[name] for name in PAPER)])
    heading = [f"{task} {tokens:,}" for task, tokens in tasks]
    return render(["model", "kernel", *heading, *PAPER.values()], lines, style, left=2)


def conditions(rows: Sequence[Result]) -> str:
    """One sentence: the scores, the machine, the versions, the date."""
    last = rows[-1]
    metrics = sorted({f"{row.metric} on {row.task}" for row in rows})
    return (
        f"{'; '.join(metrics)}. {last.accelerator or last.cpu}; torch {last.torch}, transformers {last.transformers}, "
        f"sortattn {last.sortattn}; {last.date.split()[0]}."
    )
