"""Quality against time per document, the paper's Figure 2: nDCG@10 of evaluations beside the time of one long text."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ...bench.machine import Measured, now, this_machine
from ...bench.measure import sample
from ...bench.plot import COLOURS, MARKERS, SOFTMAX_COLOUR
from ...distill.store import replace
from ...errors import CommandError
from ...integrations.bandwidths import PREFIX
from ...integrations.convert import switch
from ...integrations.transformers import register
from ...table import render
from .encoder import OWN, inputs
from .results import Result

# torch's own attention, which chooses the fastest of its kernels
SOFTMAX = ("softmax", "sdpa")
ROUNDS = 5


@dataclass(frozen=True)
class Point(Measured):
    """How long one text of `tokens` tokens takes with a kernel through a backend: the median, in milliseconds."""

    kernel: str
    backend: str
    tokens: int
    precision: str
    device: str
    milliseconds: float

    @property
    def case(self) -> tuple:
        return (self.kernel, self.backend, self.tokens, self.precision, self.device)


def measure(model, kernel: str, backend: str, tokens: int, precision: str, device: str) -> Point:
    """Times a forward pass over one text of random tokens, after one to warm up."""
    register("auto" if (kernel, backend) == SOFTMAX else backend)
    try:
        switch(model, "sdpa" if (kernel, backend) == SOFTMAX else PREFIX + kernel)
        times = _times(_call(model, tokens, precision, device), device)
    except (RuntimeError, ValueError) as error:
        raise CommandError(f"{kernel} ({backend}), {tokens:,} tokens: {error}") from error
    finally:
        register("auto")
    return Point(
        kernel=kernel, backend=backend, tokens=tokens, precision=precision, device=device,
        milliseconds=round(sorted(times)[len(times) // 2], 3), **asdict(this_machine(device)), date=now(),
    )  # fmt: skip


def _times(call: Callable[[], None], device: str) -> list[float]:
    call()
    started, times = time.perf_counter(), []
    # three are enough of what takes long
    while len(times) < (ROUNDS if time.perf_counter() - started < 60 else 3):
        times.append(sample(call, 1, device))
    return times


def _call(model, tokens: int, precision: str, device: str) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=generator).to(device)
    given = inputs(model, ids, torch.ones_like(ids))

    def call() -> None:
        kind = torch.device(device).type
        with torch.no_grad(), torch.autocast(kind, torch.bfloat16, enabled=precision == "bf16"):
            model(**given)

    return call


def quality(results: Sequence[Result], kernel: str, tokens: int) -> float | None:
    """The mean nDCG@10 with this kernel at this length, of the model that was evaluated last; None if there is none."""
    names = (kernel, OWN) if kernel == SOFTMAX[0] else (kernel,)
    rows = [row for row in results if row.kernel in names and (row.tokens, row.metric) == (tokens, "ndcg@10")]
    values = [row.value for row in rows if (row.model, row.kernel) == (rows[-1].model, rows[-1].kernel)]
    return sum(values) / len(values) if values else None


def time_table(points: Sequence[Point], results: Sequence[Result], style: str = "text") -> str:
    """A line for each point, with its quality where there is an evaluation."""
    lines = []
    for point in points:
        value = quality(results, point.kernel, point.tokens)
        score = "" if value is None else f"{value:.4f}"
        lines.append([point.kernel, point.backend, f"{point.tokens:,}", f"{point.milliseconds:,.1f}", score])
    return render(["kernel", "backend", "tokens", "ms", "ndcg@10"], lines, style, left=2)


def conditions(points: Sequence[Point]) -> str:
    """One sentence: what was timed, the machine, the versions, the date."""
    last = points[-1]
    return (
        f"Milliseconds of one document, {last.precision}; {last.accelerator or last.cpu}; torch {last.torch}, "
        f"sortattn {last.sortattn}; {last.date.split()[0]}."
    )


def save_plot(points: Sequence[Point], results: Sequence[Result], path: Path) -> None:
    """One panel per length, a colour per kernel and a marker per backend; those without an evaluation are left out."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    scored = [point for point in points if quality(results, point.kernel, point.tokens) is not None]
    lengths = sorted({point.tokens for point in scored})
    backends = list(dict.fromkeys(point.backend for point in scored))
    kernels = [kernel for kernel in dict.fromkeys(point.kernel for point in scored) if kernel != SOFTMAX[0]]
    colours = {kernel: COLOURS[place % len(COLOURS)] for place, kernel in enumerate(kernels)} | {
        SOFTMAX[0]: SOFTMAX_COLOUR
    }
    figure = Figure(figsize=(4.4 * len(lengths) + 1.6, 4.0), dpi=150, layout="constrained")
    named = {}
    for axes, tokens in zip(figure.subplots(1, len(lengths), squeeze=False)[0], lengths, strict=True):
        for point in [point for point in scored if point.tokens == tokens]:
            marker = MARKERS[backends.index(point.backend) % len(MARKERS)]
            value = quality(results, point.kernel, tokens)
            (mark,) = axes.plot(point.milliseconds, value, marker, markersize=7, color=colours[point.kernel])
            named.setdefault(f"{point.kernel} ({point.backend})", mark)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(f"milliseconds per document, {points[0].device}, {points[0].precision}")
        axes.set_ylabel("nDCG@10")
        axes.set_title(f"{tokens:,} tokens", fontsize=10)
        axes.grid(True, which="major", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(named.values(), named.keys(), loc="outside right upper", frameon=False, fontsize=8)
    replace(path, lambda draft: figure.savefig(draft, format="png"))
