"""The paper's layout: a column for each method, a row for each N; and break-even points and slopes from it."""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import resources

from ...table import render
from ..cases import FORWARD
from ..crossover import crossover
from .methods import PASSES
from .run import PaperRow

# (kernel, method) -> N -> milliseconds
Columns = dict[tuple[str, str], dict[int, float]]


def published() -> tuple[dict[str, Columns], str]:
    """The paper's figures by pass, and where they come from."""
    text = resources.files(__package__).joinpath("rtx5090.csv").read_text()
    tables: dict[str, Columns] = {}
    rows = list(csv.DictReader(text.splitlines()))
    for row in rows:
        column = tables.setdefault(row["passes"], {}).setdefault((row["kernel"], row["method"]), {})
        column[int(row["n"])] = float(row["mean_ms"])
    return tables, rows[0]["source"].replace("Table 2", "Tables 2 and 5")


def measured(rows: Sequence[PaperRow], passes: str) -> Columns:
    """The means of one pass."""
    columns: Columns = {}
    for row in rows:
        if row.passes == passes:
            columns.setdefault((row.kernel, row.method), {})[row.n] = row.mean_ms
    return columns


def time_table(rows: Sequence[PaperRow], passes: str, style: str = "text") -> str:
    """Means and standard deviations of one pass; the fastest of each row is starred."""
    spread = {((row.kernel, row.method), row.n): row.std_ms for row in rows if row.passes == passes}
    return _layout(measured(rows, passes), style, lambda key, n: f" ±{spread[key, n]:.2g}")


def published_table(columns: Columns, style: str = "text") -> str:
    """The same of the paper, which gives no deviations."""
    return _layout(columns, style, lambda key, n: "")


def _layout(columns: Columns, style: str, spread: Callable[[tuple[str, str], int], str]) -> str:
    lines = []
    for n in sorted({n for column in columns.values() for n in column}):
        least = min(column[n] for column in columns.values() if n in column)
        cells = [_cell(column.get(n), least, spread(key, n) if n in column else "") for key, column in columns.items()]
        lines.append([f"{n:,}", *cells])
    return render(["N", *(label(key) for key in columns)], lines, style, left=0)


def _cell(spent: float | None, least: float, spread: str) -> str:
    if spent is None:
        return "-"
    return f"{milliseconds(spent)}{spread}{'*' if spent == least else ''}"


def milliseconds(spent: float) -> str:
    """Four digits, as the paper has them."""
    return f"{spent:,.0f}" if spent >= 1000 else f"{spent:.4g}"


def label(key: tuple[str, str]) -> str:
    """`add_riesz SORTED`, and for softmax the method alone."""
    kernel, method = key
    return method if kernel == "softmax" else f"{kernel} {method}"


def memory_table(rows: Sequence[PaperRow], passes: str, style: str = "text") -> str | None:
    """Peak memory beyond the inputs in MiB, None if it was not measured."""
    columns: dict[tuple[str, str], dict[int, int]] = {}
    for row in rows:
        if row.passes == passes and row.memory_bytes is not None:
            columns.setdefault((row.kernel, row.method), {})[row.n] = row.memory_bytes
    if not columns:
        return None
    lines = [
        [f"{n:,}", *(f"{column[n] / 2**20:,.1f}" if n in column else "-" for column in columns.values())]
        for n in sorted({n for column in columns.values() for n in column})
    ]
    return render(["N", *map(label, columns)], lines, style, left=0)


def break_even_table(columns: Columns, style: str = "text") -> str:
    """From which N on each kernel is faster than each softmax, between two sizes interpolated in the log-log plot."""
    softmax = {key: column for key, column in columns.items() if key[0] == "softmax"}
    lines = [
        [label(key), *(_break_even(other, column) for other in softmax.values())]
        for key, column in columns.items()
        if key not in softmax
    ]
    return render(["faster than", *map(label, softmax)], lines, style)


def _break_even(softmax: Mapping[int, float], kernel: Mapping[int, float]) -> str:
    point, sizes = crossover(softmax, kernel), sorted(softmax.keys() & kernel.keys())
    if not sizes:
        return "-"
    if point is None:
        return f"> {sizes[-1]:,}"
    return f"{point:,.0f}" if point else f"< {sizes[0]:,}"


def slope(column: Mapping[int, float]) -> float | None:
    """The exponent p of `time ~ N^p`, fitted to the larger half of the sizes; None for fewer than two of them.

    >>> slope({1: 5.0, 2: 5.0, 4: 16.0, 8: 64.0})
    2.0
    """
    sizes = sorted(column)
    points = [(math.log(n), math.log(column[n])) for n in sizes[len(sizes) // 2 :]]
    if len(points) < 2:
        return None
    middle = [sum(values) / len(points) for values in zip(*points, strict=True)]
    rise = sum((x - middle[0]) * (y - middle[1]) for x, y in points)
    return round(rise / sum((x - middle[0]) ** 2 for x, _ in points), 9)


def slope_text(column: Mapping[int, float]) -> str:
    """The slope with two digits, or a dash."""
    found = slope(column)
    return "-" if found is None else f"{found:.2f}"


def slope_table(rows: Sequence[PaperRow], style: str = "text") -> str:
    """The slope of every method, here and in the paper."""
    lines = []
    for passes in PASSES:
        theirs = published()[0][passes]
        lines += [
            [passes, place, label(key), slope_text(column)]
            for place, columns in (("here", measured(rows, passes)), ("paper", theirs))
            for key, column in columns.items()
        ]
    return render(["pass", "where", "method", "slope"], lines, style, left=3)


def conditions(rows: Sequence[PaperRow]) -> str:
    """One sentence: protocol, shape, machine, versions, date."""
    first = rows[0]
    most = max(rows, key=lambda row: row.runs)
    fewest = min(row.runs for row in rows)
    fewer = f" (of slow calls at least {fewest} after 1)" if fewest < most.runs else ""
    return (
        f"Milliseconds, mean ± standard deviation of {most.runs} runs after {most.warm_ups} warm-ups{fewer}, the "
        f"fastest starred; B={first.batch}, H={first.heads}, D={first.head_dim}, C={first.value_dim}; "
        f"{first.accelerator or first.cpu}, {first.threads} threads ({first.machine}); torch {first.torch}, "
        f"sortattn {first.sortattn}; {max(row.date for row in rows).split()[0]}."
    )


def blocks(rows: Sequence[PaperRow], style: str = "text") -> list[tuple[str, str]]:
    """All tables with their headings: times here and in the paper, break-even points, memory, slopes."""
    tables, source = published()
    found = []
    for number, passes in zip((2, 5), PASSES, strict=True):
        columns = measured(rows, passes)
        if not columns:
            continue
        name = "Forward" if passes == FORWARD else "Forward and backward"
        found.append((f"{name}, here", time_table(rows, passes, style)))
        found.append((f"{name}, the paper's Table {number} (RTX 5090)", published_table(tables[passes], style)))
        found.append((f"{name}: N from which on it is faster, here", break_even_table(columns, style)))
        found.append((f"{name}: the same from the paper's figures", break_even_table(tables[passes], style)))
        memory = memory_table(rows, passes, style)
        if memory:
            found.append((f"{name}: peak memory beyond the inputs, MiB", memory))
    found.append(("Slopes in the log-log plot, larger half of the sizes", slope_table(rows, style)))
    return [*found, ("Source of the paper's figures", source)]
