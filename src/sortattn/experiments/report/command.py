"""`sortattn report`: finds the results and writes the page."""

from argparse import Namespace
from pathlib import Path

from ...errors import CommandError
from ...files import check_writable, replacing
from .page import page
from .sections import kernels, machines, of_file

TITLE = "sortattn: results"
# where a checkout keeps results, and where the commands leave theirs
FOLDERS = (
    "benchmarks/results",
    *(f"sortattn-{name}" for name in ("bench", "demo", "grid", "recall", "mqar", "text", "vision")),
)


def report(options: Namespace) -> int:
    """Writes the page and says what is on it; returns 0."""
    files = find(options.results)
    target = options.out / f"{options.name}.html"
    check_writable(target)
    found = sorted((of_file(path) for path in files), key=lambda pair: pair[0])
    sections = [kernels(), *(section for _, section in found), machines(files)]
    with replacing(target) as draft:
        draft.write_text(page(TITLE, sections), encoding="utf-8")
    for path in files:
        print(f"Rows: {path}")
    if not files:
        print(f"No results in {', '.join(FOLDERS)}; the page has the kernels only. --results names other places.")
    print(f"Page: {target}")
    return 0


def find(places: list[Path] | None) -> list[Path]:
    """The results files: those named, and those in the folders named; CommandError if a place is not there."""
    if places is None:
        places = [Path(folder) for folder in FOLDERS if Path(folder).is_dir()]
    files: list[Path] = []
    for place in places:
        if not place.exists():
            raise CommandError(f"{place} is not there; expected a results file or a folder of them")
        # by the names without the ending, so that variants of a run come after it
        files += sorted(place.glob("*.csv"), key=lambda path: path.stem) if place.is_dir() else [place]
    return list(dict.fromkeys(files))
