"""`sortattn bench --paper`: from the options to the two tables, the CSV and the plot."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ...errors import CommandError
from ...records import Records, draw_beside
from ..cases import Settings
from ..machine import this_machine
from ..progress import progress
from .methods import usable_methods
from .plot import save_plot
from .run import PaperRow, run, wanted
from .tables import blocks, conditions


def paper(options: Namespace, settings: Settings) -> int:
    """Measures what is missing and shows everything; returns 0, 1 if a cell failed, 130 if interrupted."""
    path = options.out / f"{options.name}.csv"
    common = {**asdict(settings), **asdict(this_machine(settings.device))}
    records = Records(path, PaperRow, common, fresh=options.fresh)
    try:
        problems = _measure(options, settings, records)
    except KeyboardInterrupt:
        print(f"\nInterrupted. {len(records.rows)} rows are in {path}; the same command continues.", file=sys.stderr)
        return 130
    show(records.rows, path)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _measure(options: Namespace, settings: Settings, records: Records[PaperRow]) -> list[str]:
    methods, left_out = usable_methods(settings, quick=options.smoke)
    for reason in left_out:
        print(reason, file=sys.stderr)
    cells = wanted(methods, options.sizes)
    held = {row.case for row in records.rows}
    missing = sum(case not in held for _, case in cells)
    if missing < len(cells):
        print(f"{len(cells) - missing} of {len(cells)} rows are in {records.path} already", file=sys.stderr)
    with progress(missing) as advance:
        return run(
            cells,
            settings,
            records,
            memory=options.memory,
            budget=options.budget,
            patience=options.patience,
            advance=advance,
        )


def show(rows: Sequence[PaperRow], path: Path) -> None:
    """Prints the tables, draws the plot beside the CSV, and says where both are."""
    if not rows:
        raise CommandError("nothing could be measured; see the reasons above and `sortattn doctor`")
    print("\n\n".join([conditions(rows), *(f"{heading}\n\n{body}" for heading, body in blocks(rows))]))
    draw_beside(path, lambda picture: save_plot(rows, picture), "Plot")
