"""What the first call of a kernel costs on a GPU, each in a process of its own with no compiled kernels on disk.

    PYTHONPATH=src python benchmarks/first_use.py --out benchmarks/results/h200-first-use.csv [--note before] [case ...]

A case is `sorted-add_riesz-16384-float32`. Every process has imported torch and sortattn before the clock starts; the
parts are the CUDA context, the import of cuda.core, and the forward and the backward pass of the first and of a later
call. Seconds. NVRTC keeps what it has compiled too, and is told not to.
"""

import argparse
import csv
import functools
import os
import tempfile
import threading
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

import sortattn
from sortattn.cuda import compile as compiler

SPLINE = sortattn.Spline(nodes=[-1.0, 0.5, 2.0], slopes=[0.0, 1.0, -0.5, 0.0])
KERNELS = {"spline": SPLINE, "matern32": sortattn.PolynomialExponential([1.0, 1.0])}
SORTED, TILED = ("add_riesz", "add_laplace", "add_bump", "spline", "matern32"), ("laplace", "riesz")
CASES = [
    *(f"sorted-{name}-16384-float32" for name in SORTED),
    *(f"tiled-{name}-512-float32" for name in (*SORTED, *TILED)),
    *(f"tiled-{name}-64-float32" for name in SORTED[:3]),
    *(f"sorted-{name}-16384-bfloat16" for name in SORTED[:3]),
    "sorted-add_bump-16384-float64",
    "tiled-riesz-512-float64",
]


def measure(case: str) -> dict:
    """In a child: the seconds of its parts."""
    backend, name, length, dtype = case.split("-")
    kernel = KERNELS.get(name) or name
    parts, compiled = {}, []

    def timed(part, call):
        start = time.perf_counter()
        result = call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        parts[part] = time.perf_counter() - start
        return result

    honest = compiler._compile

    def logged(source, text, defines, arch):
        start = time.perf_counter()
        code = honest(source, text, defines, arch)
        compiled.append((time.perf_counter() - start, source.stem, threading.current_thread().name))
        return code

    compiler._compile = logged
    timed("context", lambda: torch.zeros(1, device="cuda"))

    def cuda_core():
        import cuda.core

        cuda.core.ProgramOptions = functools.partial(cuda.core.ProgramOptions, no_cache=True)

    timed("import", cuda_core)
    points = [
        torch.randn(4, 12, int(length), 64, device="cuda", dtype=getattr(torch, dtype), requires_grad=True)
        for _ in range(3)
    ]

    def forward():
        return sortattn.kernel_attention(*points, kernel, backend=backend)

    # what torch itself does at its first product and sum is not ours
    (points[0][0, 0, :64] @ points[1][0, 0, :64].T).sum().backward()
    out = timed("forward", forward)
    alone = len(compiled)
    timed("backward", lambda: out.backward(out.detach()))
    out = timed("forward again", forward)
    timed("backward again", lambda: out.backward(out.detach()))
    slowest = max(compiled, default=(0.0, "", ""))
    return parts | {
        "kernels": len(compiled),
        "before the backward pass": alone,
        "compiling": sum(seconds for seconds, *_ in compiled),
        "slowest": slowest[0],
        "slowest source": slowest[1],
    }


def in_a_child(task) -> dict:
    """The result of `task()` in a forked process, without which torch would be imported for every case."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            with tempfile.TemporaryDirectory() as folder:
                os.environ["SORTATTN_CACHE"] = os.environ["CUDA_CACHE_PATH"] = folder
                os.write(writing, repr(task()).encode())
                status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return eval(text) if text else {}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "cuda-core", "nvidia-cuda-nvrtc"))
    gpu = in_a_child(lambda: {"name": torch.cuda.get_device_name()})["name"]
    for case in options.cases:
        parts = in_a_child(lambda case=case: measure(case))
        if not parts:
            print(case, "failed", flush=True)
            continue
        row = {"case": case, "note": options.note}
        row |= {part: f"{value:.3f}" if isinstance(value, float) else value for part, value in parts.items()}
        row |= {"machine": f"{gpu}, {os.cpu_count()} cores", "versions": versions}
        row["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
        print(*list(row.values())[:-3], flush=True)
        if options.out:
            new = not options.out.exists()
            with options.out.open("a", newline="") as file:
                writer = csv.DictWriter(file, row)
                if new:
                    writer.writeheader()
                writer.writerow(row)


if __name__ == "__main__":
    main()
