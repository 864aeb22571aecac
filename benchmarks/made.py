"""Times of kernels that a user makes, by `tiled` and `sorted`, forward and with gradients.

    PYTHONPATH=src python benchmarks/made.py --device cuda --out benchmarks/results/h200-made.csv
    PYTHONPATH=src python benchmarks/made.py --device cuda --causal --out benchmarks/results/h200-made-causal.csv

The cost model of `auto` is compared with these rows by a test. The columns are those of `sortattn bench`, softmax left
out.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median, pstdev

import torch

import sortattn
from sortattn.bench.cases import BOTH, FORWARD, Case, Settings, make_inputs
from sortattn.bench.machine import now, this_machine
from sortattn.bench.measure import measure, warm_up
from sortattn.bench.store import Row, write

# three nodes, none of them like another; degree one
KERNELS = {
    "spline": sortattn.Spline(nodes=[-1.0, 0.5, 2.0], slopes=[-0.25, 0.75, -0.5, 0.125], offset=1.0),
    "matern32": sortattn.PolynomialExponential([1.0, 1.0]),
}
BACKENDS = ("tiled", "sorted")


def call_of(case: Case, settings: Settings):
    """What is timed."""
    inputs = make_inputs(case, settings)
    cotangent = torch.ones_like(inputs[2])

    def call() -> None:
        rows = sortattn.kernel_attention(*inputs, KERNELS[case.kernel], is_causal=settings.causal, backend=case.backend)
        if case.passes == BOTH:
            torch.autograd.grad(rows, inputs, cotangent)

    return call


def measured(kernel: str, passes: str, n: int, settings: Settings, rounds: int) -> Iterator[Row]:
    """A row for each backend, measured in turn."""
    cases = [Case(kernel, backend, "float32", passes, n) for backend in BACKENDS]
    calls = {case: call_of(case, settings) for case in cases}
    repeats = {case: warm_up(call, settings.device) for case, call in calls.items()}
    samples = measure(calls, repeats, rounds=rounds, budget=20.0, device=settings.device)
    unknown = dict.fromkeys(("softmax_ms", "speedup", "memory_bytes", "memory_ratio"))
    common = asdict(settings) | asdict(this_machine(settings.device)) | unknown
    for case, found in samples.items():
        median_ms, min_ms, std_ms = (float(f"{how(found):.5g}") for how in (median, min, pstdev))
        times = {"median_ms": median_ms, "min_ms": min_ms, "std_ms": std_ms, "rounds": len(found)}
        yield Row(**asdict(case), **times, **common, date=now())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("made.csv"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-n", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    given = parser.parse_args()
    settings = Settings(batch=4, heads=12, causal=given.causal, device=given.device, threads=torch.get_num_threads())
    rows = []
    for kernel in KERNELS:
        for passes in (FORWARD, BOTH):
            for n in given.n:
                for row in measured(kernel, passes, n, settings, given.rounds):
                    print(kernel, row.backend, passes, n, row.median_ms, flush=True)
                    rows.append(row)
                write(given.out, rows)


if __name__ == "__main__":
    main()
