"""How the CPU kernels are compiled: without the interpreter lock, and with the entry points kept on disk."""

import hashlib
from pathlib import Path

from numba import njit

from .parts import PartCompiler

# wrappers by which Python and C would call a function take an eighth to a quarter of the time to compile
_FOR_PYTHON = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_INTERNAL = {**_FOR_PYTHON, "no_cpython_wrapper": True, "pipeline_class": PartCompiler}
# part of an entry point: compiled with it, not kept by itself
compiled = njit(**_INTERNAL)
# part of a hot loop: a call would hand over every array in seven pieces
inlined = njit(**_INTERNAL, forceinline=True)
entry = njit(**_FOR_PYTHON, cache=True)

# what any entry point may be compiled with
_SHARED = ("compiled", "exponential", "memory", "parts", "simd")


def digest(file: str, *modules: str) -> str:
    """A digest of the sources that an entry point of `file` is compiled from; the `modules` stand beside it.

    Numba recompiles a kept function when its own file changes, not when one does that it calls into; but what a
    function closes over is part of its key.
    """
    here = Path(__file__)
    files = [here.with_name(f"{name}.py") for name in _SHARED]
    files += [Path(file).with_name(f"{name}.py") for name in (Path(file).stem, *modules)]
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()
