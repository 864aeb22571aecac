"""Every CUDA kernel of a small run under compute-sanitizer: no bad access, no race, no read of what nobody has written.

    PYTHONPATH=src:. python tests/sanitize.py [--tools memcheck racecheck initcheck] [parts ...]

Parts are the functions below. Each runs once without the tool, so that its kernels are compiled and on disk, and then
under every tool, with an allocation for every tensor (`PYTORCH_NO_CUDA_MEMORY_CACHING`), as a tool sees nothing within
the large ones that torch makes otherwise. The exit status is that of all of them together.
"""

import argparse
import os
import subprocess
import sys
import time

import torch

import sortattn

TOOLS = ("memcheck", "racecheck", "initcheck")
SPLINE = sortattn.Spline(nodes=[-1.5, -0.5, 0.75], slopes=[0.0, 1.0, -0.5, 0.0], jumps=[0.5, 0.0, -0.25])
MATERN = sortattn.PolynomialExponential([1.0, 1.0, 1 / 3])
NAMED = ("add_riesz", "add_laplace", "add_bump")


def points(heads=2, queries=150, keys=170, dims=64, channels=64, dtype=torch.float32, **options):
    """Queries, keys and values with many ties, some at zero."""
    torch.manual_seed(1)
    shapes = ((queries, dims), (keys, dims), (keys, channels))
    parts = [torch.randn(1, heads, *shape) for shape in shapes]
    for part in parts[:2]:
        part[:, :, ::3] = part[:, :, ::3].mul(2).round().div(2)
    return [part.to("cuda", dtype).requires_grad_(**options) for part in parts]


def call(kernel, backend, *given, **options) -> None:
    """Forward and, if anything asks for it, backward."""
    out = sortattn.kernel_attention(*given, kernel, backend=backend, **options)
    if out.requires_grad:
        out.backward(torch.ones_like(out))
    assert kernel not in NAMED or out.isfinite().all()


def relays():
    """Whole tracks: there must be two for every multiprocessor."""
    tracks = torch.cuda.get_device_properties(0).multi_processor_count
    call("add_riesz", "sorted", *points(heads=-(-tracks // 64)))
    call("add_riesz", "sorted", *points(heads=-(-tracks // 64), queries=40, channels=20))


def coils():
    """Wound lines, of which there must be one for every other multiprocessor; some are too long."""
    from sortattn.ops.sorted import cuda_coil, cuda_reel

    cuda_coil._LEAST = cuda_reel._LEAST = 1
    lines = torch.cuda.get_device_properties(0).multi_processor_count // 2
    for channels, scale in ((64, 1.0), (20, 9.0)):
        query, key, value = points(heads=-(-lines // 64), channels=channels, requires_grad=False)
        query[..., ::3] *= scale
        key[..., ::3] *= scale
        # of which little is seen
        query[:, :, 7] = key.amax(2) + 1.49
        call("add_bump", "sorted", query, key, value)
        # with gradients lines are wound if few are tied
        query, key = (part + 0.01 * torch.randn_like(part) for part in (query, key))
        query[:, :, 9] = key[:, :, 11]
        for part in (query, key, value):
            part.requires_grad_()
        call("add_bump", "sorted", query, key, value, key_mask=torch.arange(170, device="cuda") % 7 != 0)


def walks():
    """Those that begin in the middle, with few tracks, and in order."""
    for kernel in (*NAMED, SPLINE, MATERN):
        given = points(heads=1, queries=700, keys=600, dims=3, channels=8)
        call(kernel, "sorted", *given, key_mask=torch.arange(600, device="cuda") % 7 != 0)
    call("add_bump", "sorted", *points(heads=1, dims=2, channels=40, dtype=torch.float64))
    torch.use_deterministic_algorithms(True)
    call("add_bump", "sorted", *points(heads=1, dims=2, channels=40))


def long_lines():
    """Sorts that have to split and to merge."""
    for step in (0.0, 1.0):
        given = points(heads=1, queries=18_000, keys=17_000, dims=2, channels=4, requires_grad=False)
        if step:
            given[0].div_(step).round_()
        call("add_riesz", "sorted", *given)


def classes():
    """Classes of equal coordinates, which have kernels of their own."""
    from sortattn.ops.sorted import classes

    for dtype in (torch.bfloat16, torch.float16):
        classes.LEAST[dtype] = 1, 1
        for kernel in (*NAMED, MATERN):
            call(kernel, "sorted", *points(dims=4, dtype=dtype, requires_grad=False))
            given = points(dims=4, channels=8, dtype=dtype, requires_grad=False)
            call(kernel, "sorted", *given, key_mask=torch.arange(170, device="cuda") % 7 != 0)


def tiles():
    """Tiles, whole and short last ones."""
    for kernel in (*NAMED, SPLINE, MATERN, "laplace", "riesz"):
        call(kernel, "tiled", *points(heads=1))
        call(kernel, "tiled", *points(heads=1, queries=130, keys=130, dims=20, channels=12), is_causal=True)
    call("add_laplace", "tiled", *points(heads=1, dtype=torch.float16))
    call("add_bump", "tiled", *points(heads=1, dims=70, channels=70))
    call("riesz", "tiled", *points(heads=1, queries=40, keys=70, dims=8, channels=8, dtype=torch.float64))


def chunks():
    """Tiles whose keys and values are made ready first: there must be more than two blocks for every multiprocessor."""
    heads = torch.cuda.get_device_properties(0).multi_processor_count
    for kernel in ("add_laplace", "add_bump"):
        call(kernel, "tiled", *points(heads=heads))
    call("add_laplace", "tiled", *points(heads=heads, dims=20, channels=12, requires_grad=False), is_causal=True)


def short_sequences():
    """Up to 96 rows."""
    for kernel in NAMED:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            call(kernel, "tiled", *points(queries=65, keys=70, dtype=dtype))


def grids():
    """The grid, in Triton."""
    for kernel in NAMED:
        for dtype in (torch.float32, torch.float16):
            call(kernel, "grid", *points(queries=300, keys=280, dtype=dtype))


def collected_grids():
    """Keys to nodes in CUDA, on GPUs that have the instructions, with a block for most multiprocessors."""
    heads = torch.cuda.get_device_properties(0).multi_processor_count // 8
    for dtype in (torch.float16, torch.bfloat16):
        given = points(heads=heads, queries=40, keys=1300, dtype=dtype, requires_grad=False)
        for kernel in NAMED:
            for nodes in (32, 64):
                call(kernel, f"grid:{nodes}", *given)


def causal_grids():
    """Tables in registers, on GPUs that have the instructions; the last chunk is not full."""
    for dtype in (torch.float16, torch.bfloat16):
        given = points(queries=328, keys=328, dtype=dtype, requires_grad=False)
        for kernel in NAMED:
            for nodes in (32, 64):
                call(kernel, f"grid:{nodes}", *given, is_causal=True)


PARTS = {
    part.__name__: part
    for part in (
        relays,
        coils,
        walks,
        long_lines,
        classes,
        tiles,
        chunks,
        short_sequences,
        grids,
        collected_grids,
        causal_grids,
    )
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=list(PARTS))
    parser.add_argument("--tools", nargs="*", default=TOOLS)
    parser.add_argument("--plain", action="store_true", help="no tool, in this process")
    options = parser.parse_args()
    if options.plain:
        for part in options.parts:
            PARTS[part]()
        torch.cuda.synchronize()
        return 0
    worst = 0
    for part in options.parts:
        command = [sys.executable, __file__, "--plain", part]
        subprocess.run(command, check=True)
        for tool in options.tools:
            start = time.perf_counter()
            checked = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", "--print-limit", "3"]
            if tool == "memcheck":
                # cuda.bindings asks for functions that a driver need not have
                checked += ["--report-api-errors", "no"]
            checked += command
            environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            child = subprocess.run(checked, env=environment, capture_output=True, text=True)
            result = "FAILED" if child.returncode else "clean"
            print(f"{tool} {part}: {result}, {time.perf_counter() - start:.0f} s", flush=True)
            if child.returncode:
                print(child.stdout[-3000:], child.stderr[-2000:], flush=True)
            worst |= child.returncode
    return worst


if __name__ == "__main__":
    sys.exit(main())
