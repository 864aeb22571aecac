"""`sortattn doctor`: what is installed, what works here, and why the rest does not."""

import contextlib
import io
import platform
import time
from pathlib import Path

import torch

from . import cache, choose
from .attention import kernel_attention
from .bench.machine import cpu_model, version

PACKAGES = ("sortattn", "torch", "numpy", "numba", "llvmlite", "triton", "cuda-core", "pykeops", "transformers")
PACKAGES += ("matplotlib", "rich")
BACKENDS = ("reference", "tiled", "sorted", "linear", "keops", "grid")
# these come with the package itself; the others need an extra
ALWAYS = ("reference", "tiled", "sorted", "linear", "grid")


def doctor(*, costs: bool = False, clear_cache: bool = False) -> int:
    """Prints the report; returns 0 if all backends that need no extra work on the CPU, else 1."""
    if costs:
        print(choose.cost_table())
        return 0
    if clear_cache:
        folders = ", ".join(map(str, cache.folders()))
        print(f"Removed {cache.clear()} files from {folders} and {cache.cuda_folder()}")
        return 0
    print(_section("Versions", _versions()))
    print(_section("Devices", _devices()))
    troubles = {}
    for device in _device_names():
        troubles[device] = {}
        print(f"Backends on {device} (a small call, forward and backward)")
        for name in BACKENDS:
            # before the call, which may compile for half a minute
            print(f"  {name.ljust(max(map(len, BACKENDS)))}  ", end="", flush=True)
            started = time.perf_counter()
            trouble = troubles[device][name] = _trouble(name, device)
            seconds = time.perf_counter() - started
            print(f"works, first call {seconds:.1f} s" if trouble is None else f"no: {trouble}")
        print()
    print(_section("Compiled kernels", _cache()))
    broken = [name for name in ALWAYS if troubles["cpu"][name] is not None]
    print(f"Not well: {', '.join(broken)} should work here." if broken else "All well.")
    return 1 if broken else 0


def _trouble(backend: str, device: str) -> str | None:
    """The first line of what the backend raises at a small call on `device`, None if it works."""
    inputs = [torch.randn(1, 2, 16, 8, device=device, requires_grad=True) for _ in range(3)]
    try:
        # compilers tell what they do
        with contextlib.redirect_stdout(io.StringIO()):
            output = kernel_attention(*inputs, "elu" if backend == "linear" else "add_laplace", backend=backend)
            output.sum().backward()
    # whatever it is, it is what the user came to read
    except Exception as error:
        lines = str(error).splitlines()
        return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return None


def _versions() -> list[tuple[str, str]]:
    found = [("python", platform.python_version())]
    return found + [(name, version(name) or "not installed") for name in PACKAGES]


def _devices() -> list[tuple[str, str]]:
    lines = [("cpu", f"{cpu_model()}, {torch.get_num_threads()} threads")]
    for name in _device_names()[1:]:
        lines.append((name, torch.cuda.get_device_name(name)))
    return lines if len(lines) > 1 else [*lines, ("cuda", "none that torch can use")]


def _device_names() -> list[str]:
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def _cache() -> list[tuple[str, str]]:
    # Numba keeps an index and the code of every function; Python keeps its own files in the same folder
    kinds = [("cpu", folder, "*.nb[ic]") for folder in cache.folders()] + [("cuda", cache.cuda_folder(), "*.cubin")]
    lines = []
    for device, folder, pattern in kinds:
        files = list(Path(folder).rglob(pattern))
        size = sum(path.stat().st_size for path in files)
        lines += [(device, str(folder)), ("", f"{size / 1e6:.1f} MB in {len(files)} files")]
    return [*lines, ("clear with", "sortattn doctor --clear-cache")]


def _section(title: str, lines: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in lines)
    return "\n".join([title, *(f"  {name.ljust(width)}  {text}" for name, text in lines), ""])
