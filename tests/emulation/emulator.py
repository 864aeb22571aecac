"""CUDA sources run on the CPU, thread by thread: slow, and enough to see whether a kernel computes what it should.

What it cannot show is whether warps that run at a time disturb each other: blocks run one after the other.
"""

import ctypes
import functools
import hashlib
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from torch import Tensor

from sortattn.cuda.boxes import Boxes
from sortattn.cuda.compile import Defines, _text

COMPILER = shutil.which("g++")
AVAILABLE = COMPILER is not None and platform.machine() == "x86_64" and platform.system() == "Linux"
# a kernel: its name, its parameters and all of it
_ENTRY = re.compile(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(([^)]*)\) {\n(?s:.*?)\n}\n')
# a name and what stands for it, on lines that a backslash ends
_MACRO = re.compile(r"(?m)^#define (\w+) +((?:[^\n]*\\\n)*[^\n]*)$")


class EmulatedKernel:
    """In place of a `Kernel`, for tensors on the CPU; `twins` is a header with what the source has in assembly."""

    def __init__(self, source: Path, entry: str, defines: Defines = (), twins: str | None = None):
        self._launch = getattr(_library(source, tuple(defines), twins), f"launch_{entry}")

    def __call__(
        self, grid: tuple[int, ...], block: int, *arguments: Tensor | int | float | None, shared: int = 0,
        early: bool = False, boxes: Boxes | None = None,
    ):  # fmt: skip
        """As a `Kernel` is called."""
        width, height = (*grid, 1)[:2]
        arguments = [_argument(part) for part in arguments]
        if boxes is not None:
            arguments[1] = _map(boxes, arguments[1].value)
        self._launch(ctypes.c_long(width), ctypes.c_long(height), ctypes.c_int(block), *arguments)

    def prepared(
        self, grid: tuple[int, ...], block: int, pointers: int, *numbers: int | float, shared: int = 0,
        early: bool = False,
    ):  # fmt: skip
        """As that of a `Kernel`."""

        def launch(stream: int, *given: int) -> None:
            assert len(given) == pointers
            width, height = (*grid, 1)[:2]
            places = map(ctypes.c_void_p, given)
            self._launch(
                ctypes.c_long(width), ctypes.c_long(height), ctypes.c_int(block), *places, *map(_argument, numbers)
            )

        return launch


def listing(entries: list[str]) -> type[EmulatedKernel]:
    """Such kernels, which add their names to `entries`."""

    class Listed(EmulatedKernel):
        def __init__(self, source: Path, entry: str, defines: Defines = ()):
            entries.append(entry)
            super().__init__(source, entry, defines)

    return Listed


@functools.cache
def _library(source: Path, defines: Defines, twins: str | None) -> ctypes.CDLL:
    """The source behind the emulator's header, with a function that launches each of its kernels."""
    text = _text(source)
    if twins is not None:
        parts = re.split(r"(?m)^(?=inline |template |struct |extern |constexpr |static_assert|//|#)", text)
        text = "".join(part for part in parts if not (part.startswith(("inline", "template")) and "asm" in part))
    written = {name: body.replace("\\\n", "") for name, body in _MACRO.findall(text)}

    def with_launcher(kernel: re.Match) -> str:
        """A kernel and a function that launches it, beside it, as some parts are compiled and not others."""
        entry, parameters = kernel[1], re.sub(r"\b[A-Z]+\b", lambda word: written.get(word[0], word[0]), kernel[2])
        # what is not one number arrives by its place
        parameters = re.sub(r"__grid_constant__ (\w+) (\w+)", r"\1 *\2_given", parameters)
        names = re.findall(r"(\w+)(?:,|$)", parameters)
        names = ", ".join(f"*{name}" if name.endswith("_given") else name for name in names)
        return (
            f"{kernel[0]}"
            f'extern "C" void launch_{entry}(long width, long height, int block, {parameters}) {{\n'
            f"    emulator::launch(width, height, block, [=]() {{ {entry}({names}); }});\n}}\n"
        )

    text = _ENTRY.sub(with_launcher, text)
    # its size is for a launch to decide: as much as there can be
    text = re.sub(r"extern __shared__ ([^;]*)\[\];", r"alignas(128) static \1[1 << 18];", text)
    headers = [f'#include "{Path(__file__).with_name(name)}"' for name in ("threads.h", twins) if name]
    macros = [f"#define {name} {value}" for name, value in defines]
    return _compiled("\n".join([*headers, *macros, text]), source.stem)


def _compiled(code: str, name: str) -> ctypes.CDLL:
    """The library of a C++ source, kept for other processes: tests in several of them want the same ones."""
    # a product and a sum are rounded one by one, as the kernels ask where it matters; libraries of the same source do
    # not share the shared memory of an inline function, which may be larger with other macros
    command = [COMPILER, "-Og", "-march=native", "-ffp-contract=off", "-std=c++17", "-w", "-shared", "-fPIC"]
    command.append("-fno-gnu-unique")
    headers = [Path(__file__).with_name(name).read_text() for name in ("threads.h", "tiled.h", "warpgroup.h")]
    digest = hashlib.sha256("\n".join([*command, *headers, code]).encode()).hexdigest()[:24]
    folder = Path(__file__).with_name("__pycache__")
    library = folder / f"{name}-{digest}.so"
    if not library.exists():
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            source, result = Path(draft) / f"{name}.cpp", Path(draft) / library.name
            source.write_text(code)
            subprocess.run([*command, "-o", result, source], check=True)
            result.replace(library)
    return ctypes.CDLL(str(library))


def _map(boxes: Boxes, address: int):
    """What boxes of a tensor are here, see `warpgroup.h`."""
    # a whole number of times the alignment that the compiler counts on
    room = (ctypes.c_uint64 * 32)()
    first = -ctypes.addressof(room) % 64 // 8
    room[first : first + 3] = (address, boxes.length, boxes.rows)
    return ctypes.byref(room, 8 * first)


def _argument(argument: Tensor | int | float | None):
    if isinstance(argument, Tensor):
        assert argument.is_contiguous()
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    return ctypes.c_void_p(None) if argument is None else ctypes.c_longlong(argument)
