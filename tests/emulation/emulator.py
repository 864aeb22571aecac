"""CUDA sources run on the CPU, thread by thread: slow, and enough to see whether a kernel computes what it should."""

import ctypes
import re
import subprocess
from pathlib import Path

from torch import Tensor

from sortattn.cuda.compile import _text
from sortattn.cuda.launch import Kernel

_HEADER = Path(__file__).with_name("device.h")


class Emulator:
    """A kernel as a function of its grid, its block and its arguments, compiled by g++ into `folder`."""

    def __init__(self, kernel: Kernel, folder: Path):
        text = _text(kernel.source)
        # the functions with assembly have twins in the header
        parts = re.split(r"(?m)^(?=inline |template |struct |extern |constexpr |static_assert|//|#)", text)
        text = "".join(part for part in parts if not (part.startswith("inline") and "asm" in part))
        (parameters,) = re.findall(rf"\b{kernel.entry}\(([^)]*)\) {{", text)
        names = ", ".join(re.findall(r"(\w+)(?:,|$)", parameters))
        macros = "".join(f"#define {name} {value}\n" for name, value in kernel.defines)
        launcher = f"""
extern "C" void launch(int blocks, int threads, {parameters}) {{
    gridDim = {{unsigned(blocks), 1, 1}};
    for (int b = 0; b < blocks; ++b) {{
        blockIdx = {{unsigned(b), 0, 0}};
        kernel = [&] {{ {kernel.entry}({names}); }};
        run_block(threads);
    }}
}}
"""
        source, library = folder / "kernel.cpp", folder / "kernel.so"
        source.write_text(f'#include "{_HEADER}"\n{macros}{text}{launcher}')
        subprocess.run(
            ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(source)], check=True
        )
        self._launch = ctypes.CDLL(str(library)).launch

    def __call__(self, grid: tuple[int, ...], block: int, *arguments: Tensor | int | float | None, shared: int = 0):
        """As a `Kernel` is called."""
        self._launch(grid[0], block, *map(_argument, arguments))


def _argument(argument: Tensor | int | float | None):
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    return ctypes.c_void_p(None) if argument is None else ctypes.c_longlong(argument)
