"""Measures as the paper does: the mean and standard deviation of 10 runs after 5 warm-ups, one method at a time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, pstdev

from ...records import Records
from ..cases import Case, Settings, make_call, make_inputs
from ..machine import Measured, now
from ..measure import LEAST_ROUNDS, sample
from ..memory import extra_bytes
from ..progress import Advance
from ..run import FAILURES
from .methods import PASSES, Method

WARM_UPS, RUNS = 5, 10


@dataclass(frozen=True)
class PaperRow(Measured):
    """One cell of a table: milliseconds per call, and the peak memory beyond the inputs (None if not measured)."""

    kernel: str
    method: str
    backend: str
    dtype: str
    passes: str
    n: int
    mean_ms: float
    std_ms: float
    runs: int
    warm_ups: int
    memory_bytes: int | None
    batch: int
    heads: int
    head_dim: int
    value_dim: int
    causal: bool
    device: str
    threads: int

    @property
    def case(self) -> Case:
        return Case(self.kernel, self.backend, self.dtype, self.passes, self.n)


def wanted(methods: Sequence[Method], sizes: Sequence[int]) -> list[tuple[Method, Case]]:
    """All cells, table by table and small sizes first."""
    return [(one, one.case(passes, n)) for passes in PASSES for n in sorted(set(sizes)) for one in methods]


def run(
    cells: Sequence[tuple[Method, Case]],
    settings: Settings,
    records: Records[PaperRow],
    *,
    memory: bool,
    budget: float,
    patience: float,
    advance: Advance,
) -> list[str]:
    """Measures the cells that `records` does not hold; returns why some were left out.

    A method whose calls take longer than `patience`, in seconds, is not measured at larger sizes. `budget` is that of
    `timings`.
    """
    done = {row.case: row for row in records.rows}
    given_up: dict[Case, str] = {}
    for method, case in cells:
        label = f"{case.passes} N={case.n:,} {method.kernel} {method.name}"
        if case in done or case.at(0) in given_up:
            advance(label, 0 if case in done else 1)
            continue
        try:
            advance(label, 0)
            samples, warm_ups = timings(make_call(case, settings, make_inputs(case, settings)), settings.device, budget)
            extra = extra_bytes(case, settings) if memory else None
        except FAILURES as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            given_up[case.at(0)] = f"{label} failed, larger sizes were not tried: {first}"
        else:
            records.add(_row(method, case, samples, warm_ups, extra, records))
            if mean(samples) > patience * 1e3:
                given_up[case.at(0)] = f"{label} took {mean(samples) / 1e3:.2g} s a call, larger sizes were not tried"
        advance(label, 1)
    return list(given_up.values())


def timings(call: Callable[[], None], device: str, budget: float) -> tuple[list[float], int]:
    """The milliseconds of each of the runs after the warm-ups, and how many warm-ups there were.

    Where that would take longer than `budget`, in seconds, a single warm-up and as many runs as fit, three at least.
    """
    started = time.perf_counter()
    # a first call that compiles says nothing about the others
    both = [sample(call, 1, device) for _ in range(2)]
    quick = min(both) / 1e3 * (WARM_UPS + RUNS) <= budget
    warm_ups, samples = (WARM_UPS, []) if quick else (1, both[1:])
    for _ in range(2, warm_ups):
        sample(call, 1, device)
    while len(samples) < RUNS and (
        warm_ups == WARM_UPS or len(samples) < LEAST_ROUNDS or time.perf_counter() - started < budget
    ):
        samples.append(sample(call, 1, device))
    return samples, warm_ups


def _row(
    method: Method,
    case: Case,
    samples: Sequence[float],
    warm_ups: int,
    extra: int | None,
    records: Records[PaperRow],
) -> PaperRow:
    average, spread = (float(f"{number:.5g}") for number in (mean(samples), pstdev(samples)))
    return PaperRow(
        **asdict(case),
        method=method.name,
        mean_ms=average,
        std_ms=spread,
        runs=len(samples),
        warm_ups=warm_ups,
        memory_bytes=extra,
        date=now(),
        **records.common,
    )
