"""A few columns of a file of results for a document: softmax, if it is named, and what is compared with it, by N.

What to show is said in the mark before the table, as in `<!-- brief:h200-grid softmax=cudnn by=grid:32,grid:64
kernels=add_riesz dtype=float16 passes=forward -->`. `by` names methods (of `sortattn bench --paper`) or backends, a
column each for every kernel; `tiled+sorted` is one column with the faster of the two. With `passes` a cell has
milliseconds and how many times as fast as softmax that is, by `sdpa` in the same rounds; without, those of forward and,
in brackets, of forward and backward.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import CommandError
from ..records import columns, read
from ..table import render
from .cases import BOTH, FORWARD, SOFTMAX
from .paper.run import PaperRow
from .store import Row

# what a mark may say, and what holds where it does not; None has to be said
_OPTIONS = {
    "by": None,
    "softmax": "",
    "kernels": "add_riesz,add_laplace,add_bump",
    "dtype": "",
    "passes": "",
    "n": "",
}


class _Time(NamedTuple):
    kernel: str
    method: str
    passes: str
    n: int
    ms: float
    # that of softmax by `sdpa` in the same rounds
    softmax: float | None = None


def block(path: Path, words: Sequence[str]) -> str:
    """The Markdown between two marks, the first of which has these words behind the name of the file."""
    options = _options(words)
    kind = PaperRow if path.read_text().startswith(",".join(columns(PaperRow))) else Row
    sizes = {int(n) for n in options["n"].split(",") if n}
    wanted = {options["softmax"], *options["by"].replace("+", ",").split(",")}
    rows = [
        row
        for row in read(path, kind)
        if options["dtype"] in ("", row.dtype) and (row.n in sizes or not sizes) and _time(row).method in wanted
    ]
    times = [_time(row) for row in rows]
    softmax = _found(times, "softmax", options["softmax"])
    shown = [
        (f"{kernel} {by}" if "," in options["by"] else kernel, _found(times, kernel, by))
        for kernel in options["kernels"].split(",")
        for by in options["by"].split(",")
    ]
    beside = [(f"softmax {options['softmax']}", softmax)] if options["softmax"] else []
    if not all(found for _, found in beside + shown):
        raise CommandError(f"{path} has no rows for some of {' '.join(words)}")
    passes, (_, first) = options["passes"], (beside + shown)[0]
    lines = [
        [f"{n:,}", *(_cell(found, n, passes) for _, found in beside)]
        + [_cell(found, n, passes, softmax) for _, found in shown]
        for n in sorted({n for _, n in first})
    ]
    table = render(["N", *(name for name, _ in beside + shown)], lines, "markdown", left=0)
    return f"{_conditions(rows)}\n\n{table}\n"


def _options(words: Iterable[str]) -> dict[str, str]:
    given = dict(word.split("=", 1) for word in words)
    unknown, missing = given.keys() - _OPTIONS, [name for name, usual in _OPTIONS.items() if usual is None]
    if unknown or not given.keys() >= set(missing):
        raise CommandError(
            f"a brief table takes {', '.join(_OPTIONS)}, of which {' and '.join(missing)} are needed, got {given}"
        )
    return {**_OPTIONS, **given}


def _time(row: PaperRow | Row) -> _Time:
    if isinstance(row, PaperRow):
        return _Time(row.kernel, row.method, row.passes, row.n, row.mean_ms)
    return _Time(row.kernel, row.backend, row.passes, row.n, row.median_ms, row.softmax_ms)


def _found(times: Sequence[_Time], kernel: str, by: str) -> dict[tuple[str, int], _Time]:
    """Those of a kernel by passes and N, of methods joined by a plus the fastest."""
    found = {}
    for time in times:
        if time.kernel == kernel and time.method in by.split("+"):
            place = time.passes, time.n
            found[place] = min(time, found.get(place, time), key=lambda one: one.ms)
    return found


def _cell(found: dict, n: int, passes: str, softmax: dict | None = None) -> str:
    first, second = found.get((passes or FORWARD, n)), None if passes else found.get((BOTH, n))
    if first is None:
        return ""
    if second is not None:
        return f"{_digits(first.ms)} ({_digits(second.ms)})"
    beside = softmax.get((passes, n)) if softmax else None
    if beside is None:
        return _digits(first.ms)
    spent = first.softmax if beside.method == SOFTMAX[1] and first.softmax else beside.ms
    return f"{_digits(first.ms)} ({spent / first.ms:.2f}x)"


def _digits(ms: float) -> str:
    """Three of them."""
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:#.3g}"


def _conditions(rows: Sequence[PaperRow | Row]) -> str:
    first, days = rows[0], sorted({row.date.split()[0] for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    shape = f"B={first.batch}, H={first.heads}, D={first.head_dim}, C={first.value_dim}"
    return f"Milliseconds; {shape}; {first.accelerator or first.cpu}; torch {first.torch}; {when}."
