"""How the CPU kernels are compiled: without the interpreter lock, and with the entry points kept on disk."""

import hashlib
from pathlib import Path

from numba import njit

# part of an entry point: compiled with it, not kept by itself
compiled = njit(nogil=True, error_model="numpy")
# part of a hot loop: a call would hand over every array in seven pieces
inlined = njit(nogil=True, error_model="numpy", forceinline=True)
entry = njit(nogil=True, error_model="numpy", cache=True)


# all that is compiled with an entry point
_MODULES = ("compiled", "drive", "events", "exponential", "halves", "moments", "plan", "simd", "sort", "sweep", "walk")


def digest() -> str:
    """A digest of the sources that are compiled."""
    files = [Path(__file__).with_name(f"{name}.py") for name in _MODULES]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
