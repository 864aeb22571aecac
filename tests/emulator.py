"""Runs the package's CUDA kernels on the CPU, thread by thread, so that their arithmetic is tested without a GPU."""

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from torch import Tensor

COMPILER = shutil.which("g++")
_HEADER = Path(__file__).with_name("emulator.h")
# a kernel's name and its parameters
_ENTRY = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(([^)]*)\) {')


class EmulatedKernel:
    """In place of `sortattn.cuda.launch.Kernel`, for tensors on the CPU; blocks run one after the other."""

    def __init__(self, source: Path, entry: str, defines=()):
        self.run = getattr(_library(source, tuple(defines)), f"launch_{entry}")

    def __call__(self, grid: tuple[int, ...], block: int, *arguments: Tensor | int | float | None, shared: int = 0):
        width, height = (*grid, 1)[:2]
        self.run(ctypes.c_long(width), ctypes.c_long(height), ctypes.c_int(block), *map(_word, arguments))


def _word(argument: Tensor | int | float | None):
    if isinstance(argument, Tensor):
        assert argument.is_contiguous()
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(None)
    return ctypes.c_double(argument) if isinstance(argument, float) else ctypes.c_longlong(argument)


@functools.cache
def _library(source: Path, defines: tuple) -> ctypes.CDLL:
    """The source behind the emulator's header, and a function that launches each of its kernels."""
    # what a launch decides, the size of shared memory, is here the most that there can be
    text = source.read_text().replace("extern __shared__ char shared[];", "static char shared[1 << 18];")
    launchers = []
    for entry, parameters in _ENTRY.findall(text):
        names = ", ".join(parameter.split()[-1].lstrip("*") for parameter in parameters.split(","))
        launchers.append(
            f'extern "C" void launch_{entry}(long width, long height, int block, {parameters}) {{\n'
            f"    emulator::launch(width, height, block, [=]() {{ {entry}({names}); }});\n}}"
        )
    macros = [f"#define {name} {value}" for name, value in defines]
    folder = Path(tempfile.mkdtemp(prefix="emulated"))
    code, library = folder / f"{source.stem}.cpp", folder / f"{source.stem}.so"
    code.write_text("\n".join([f'#include "{_HEADER}"', *macros, text, *launchers]))
    # a product and a sum are rounded one by one, as the kernels ask where it matters
    command = [COMPILER, "-O1", "-ffp-contract=off", "-std=c++17", "-w", "-shared", "-fPIC", "-o", library, code]
    try:
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))
    finally:
        shutil.rmtree(folder)
