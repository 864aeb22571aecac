"""The rows of a benchmark as tables: time beside softmax, crossover, memory."""

from collections.abc import Sequence

from ..table import render
from .cases import BOTH, FORWARD, SOFTMAX
from .crossover import describe
from .store import Row

Times = dict[int, float]


def panels(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows by (passes, dtype), forward first: each is one table and one panel of the plot."""
    found = {(row.passes, row.dtype) for row in rows}
    order = sorted(found, key=lambda panel: ((FORWARD, BOTH).index(panel[0]), panel[1]))
    return {panel: [row for row in rows if (row.passes, row.dtype) == panel] for panel in order}


def contenders(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The (kernel, backend) pairs in the rows, softmax first, the rest in their order."""
    pairs = dict.fromkeys((row.kernel, row.backend) for row in rows)
    return [pair for pair in pairs if pair == SOFTMAX] + [pair for pair in pairs if pair != SOFTMAX]


def labels(rows: Sequence[Row]) -> dict[tuple[str, str], str]:
    """What each contender is called: its kernel, and its backend where there are several."""
    pairs = contenders(rows)
    several = len({backend for kernel, backend in pairs if (kernel, backend) != SOFTMAX}) > 1

    def label(kernel: str, backend: str) -> str:
        ambiguous = several or kernel == SOFTMAX[0]
        return f"{kernel} ({backend})" if ambiguous and (kernel, backend) != SOFTMAX else kernel

    return {pair: label(*pair) for pair in pairs}


def times(rows: Sequence[Row], contender: tuple[str, str]) -> Times:
    """The median milliseconds of a contender by N."""
    return {row.n: row.median_ms for row in rows if (row.kernel, row.backend) == contender}


def time_table(rows: Sequence[Row], style: str = "text") -> str:
    """One panel: N, softmax in ms, then every contender in ms and how many times as fast as softmax it was."""
    names = labels(rows)
    cells = {(row.kernel, row.backend, row.n): _time(row) for row in rows}
    lines = [[f"{n:,}", *(cells.get((*pair, n), "") for pair in names)] for n in sorted({row.n for row in rows})]
    return render(["N", *(f"{name} [ms]" for name in names.values())], lines, style, left=0)


def memory_table(rows: Sequence[Row], style: str = "text") -> str | None:
    """One panel: the peak memory beyond the inputs as a multiple of them, by N; None if it was not measured."""
    names = labels(rows)
    cells = {
        (row.kernel, row.backend, row.n): f"{row.memory_ratio:.2f}" for row in rows if row.memory_ratio is not None
    }
    if not cells:
        return None
    lines = [[f"{n:,}", *(cells.get((*pair, n), "") for pair in names)] for n in sorted({size for *_, size in cells})]
    return render(["N", *names.values()], lines, style, left=0)


def crossovers(rows: Sequence[Row]) -> dict[str, str]:
    """One panel: for every contender but softmax its label and its crossover in words."""
    found = {}
    for pair, name in labels(rows).items():
        if pair != SOFTMAX:
            # of the same rounds, which need not be those of the row of softmax
            softmax = {
                row.n: row.softmax_ms
                for row in rows
                if (row.kernel, row.backend) == pair and row.softmax_ms is not None
            }
            found[name] = describe(softmax, times(rows, pair))
    return found


def conditions(rows: Sequence[Row]) -> str:
    """One sentence: the shape, the machine, the versions and the dates of the rows."""
    first = rows[0]
    days = sorted({row.date.split()[0] for row in rows})
    return (
        f"B={first.batch}, H={first.heads}, D={first.head_dim}, C={first.value_dim}"
        f"{', causal' if first.causal else ''}; {first.accelerator or first.cpu}, {first.threads} threads "
        f"({first.machine}); torch {first.torch}, numba {first.numba}, Python {first.python}, "
        f"sortattn {first.sortattn}; {' to '.join(dict.fromkeys((days[0], days[-1])))}."
    )


def summary(rows: Sequence[Row]) -> str:
    """Everything above for the terminal."""
    blocks = []
    for (passes, dtype), panel in panels(rows).items():
        blocks.append(f"{passes}, {dtype}\n\n{time_table(panel)}")
        blocks.append("\n".join(f"{name}: {text}" for name, text in crossovers(panel).items()))
        memory = memory_table(panel)
        if memory:
            blocks.append(f"{passes}, {dtype}: peak memory beyond the inputs, as a multiple of them\n\n{memory}")
    return "\n\n".join([*(block for block in blocks if block), conditions(rows)])


def _time(row: Row) -> str:
    spent = f"{row.median_ms:,.0f}" if row.median_ms >= 100 else f"{row.median_ms:.3g}"
    if (row.kernel, row.backend) == SOFTMAX or row.speedup is None:
        return spent
    return f"{spent} ({row.speedup:.2f}x)"
