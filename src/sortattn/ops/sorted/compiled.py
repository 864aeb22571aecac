"""How the CPU kernels are compiled: without the interpreter lock, and with the entry points kept on disk."""

import hashlib
from pathlib import Path

from numba import njit

# part of an entry point: compiled with it, not kept by itself
compiled = njit(nogil=True, error_model="numpy")
# part of a hot loop: a call would hand over every array in seven pieces
inlined = njit(nogil=True, error_model="numpy", forceinline=True)
entry = njit(nogil=True, error_model="numpy", cache=True)


def digest() -> str:
    """A digest of the sources in this folder."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
