"""`sortattn bench`: from the options to the table, the CSV and the plot."""

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from ..choose import NAMES
from ..errors import CommandError
from ..kernels import KERNELS
from ..records import draw_beside
from .cases import SDPA_BACKENDS, Group, Settings, make_groups
from .machine import this_machine
from .plot import save_plot
from .progress import progress
from .run import preflight, run, use_threads
from .store import Row, Store
from .summary import summary

DTYPES = ("float64", "float32", "float16", "bfloat16")


def bench(options: Namespace) -> int:
    """Runs what the options ask for; returns the exit code: 0, 1 if a case failed, 130 if it was interrupted."""
    check_names("kernel", options.kernel, list(KERNELS))
    check_names("backend", [name.partition(":")[0] for name in options.backend], (*NAMES, *SDPA_BACKENDS))
    check_names("dtype", options.dtype, DTYPES)
    settings = Settings(
        batch=options.batch,
        heads=options.heads,
        head_dim=options.head_dim,
        value_dim=options.value_dim or options.head_dim,
        causal=options.causal,
        device=usable_device(options.device),
        threads=use_threads(options.threads),
    )
    if options.paper:
        from .paper.command import paper

        return paper(options, settings)
    groups = make_groups(options.kernel, options.backend, options.dtype, options.sizes, backward=options.backward)
    path = options.out / f"{options.name}.csv"
    store = Store(path, settings, this_machine(settings.device), fresh=options.fresh)
    try:
        problems = measure_all(
            groups, settings, store, rounds=options.rounds, budget=options.budget, memory=options.memory
        )
    except KeyboardInterrupt:
        print(f"\nInterrupted. {len(store.rows)} rows are in {path}; the same command continues.", file=sys.stderr)
        return 130
    show(store.rows, path, [case for group in groups for case in group.cases])
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def measure_all(
    groups: Sequence[Group], settings: Settings, store: Store, *, rounds: int, budget: float, memory: bool
) -> list[str]:
    """Measures what is missing, with a progress bar; returns what went wrong."""
    cases = [case for group in groups for case in group.cases]
    missing = [case for case in cases if case not in store]
    if len(missing) < len(cases):
        print(
            f"{len(cases) - len(missing)} of {len(cases)} rows are in {store.path} already (--fresh measures anew)",
            file=sys.stderr,
        )
    if not missing:
        return []
    with progress(len(missing)) as advance:
        advance("first call of every kernel, which compiles it", 0)
        preflight(groups, settings)
        return run(groups, settings, store, rounds=rounds, budget=budget, memory=memory, advance=advance)


def show(rows: Sequence[Row], path: Path, cases: Sequence) -> None:
    """Prints the tables of the cases asked for, draws all rows beside the CSV, and says where both are."""
    shown = [row for row in rows if row.case in set(cases)]
    if not shown:
        return
    print(summary(shown))
    draw_beside(path, lambda picture: save_plot(rows, picture), "Plot")


def check_names(option: str, given: Sequence[str], known: Sequence[str]) -> None:
    """CommandError if a name is not among those that are known."""
    for name in given:
        if name not in known:
            raise CommandError(f"unknown {option} {name!r}, expected one of {', '.join(known)}")


def usable_device(name: str) -> str:
    """The name itself; CommandError if torch has no such device here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise CommandError(f"unknown device {name!r}, expected cpu, cuda or cuda:0, cuda:1, ...") from None
    if device.type not in ("cpu", "cuda"):
        raise CommandError(f"expected the device cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CommandError("torch finds no CUDA device here; use --device cpu, or see `sortattn doctor`")
    return name
