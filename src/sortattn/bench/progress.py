"""A progress bar on standard error; plain lines where rich is not installed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# (what is being done now, how many steps have been finished since the last call)
Advance = Callable[[str, int], None]


@contextmanager
def progress(total: int) -> Iterator[Advance]:
    """A bar of `total` steps; the function it gives sets the text and advances the bar."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _lines(total)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # a bar that refreshes itself does so from a thread, in the middle of what is being timed
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=total)

        def advance(text: str, steps: int = 0) -> None:
            bar.update(task, description=text, advance=steps, refresh=True)

        yield advance


def _lines(total: int) -> Advance:
    done = 0

    def advance(text: str, steps: int = 0) -> None:
        nonlocal done
        done += steps
        if steps:
            print(f"{done}/{total} {text}", file=sys.stderr, flush=True)

    return advance
