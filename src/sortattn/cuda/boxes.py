"""Boxes of a tensor that the copy engine of Hopper brings to shared memory: what a kernel has to be given for that."""

import ctypes
import functools
import os
from typing import NamedTuple

# bytes of the driver's `CUtensorMap`, and what its address has to be a multiple of
_SIZE, _ALIGN = 128, 64
# CU_TENSOR_MAP_DATA_TYPE_UINT16, _INTERLEAVE_NONE, _SWIZZLE_128B, _L2_PROMOTION_L2_128B, _FLOAT_OOB_FILL_NONE (zeros)
_NUMBERS, _PLAIN, _TURNED, _TOGETHER, _ZEROS = 1, 0, 3, 2, 0


class Boxes(NamedTuple):
    """Of a tensor `(heads, length, 64)` of 16-bit numbers, boxes of so many rows of a head."""

    heads: int
    length: int
    rows: int

    def encode(self, room: "Room", address: int) -> None:
        """Write what a kernel is given to some room."""
        sizes, strides, box, steps = _shape(self)
        error = _encoder()(
            room.address, _NUMBERS, 3, address, sizes, strides, box, steps, _PLAIN, _TURNED, _TOGETHER, _ZEROS
        )
        if error:
            raise RuntimeError(f"{self} at {address:#x} cannot be brought by the copy engine: error {error}")


class Room:
    """Memory for what a kernel is given."""

    def __init__(self):
        self._bytes = ctypes.create_string_buffer(_SIZE + _ALIGN)
        self.address = -(-ctypes.addressof(self._bytes) // _ALIGN) * _ALIGN


@functools.lru_cache(maxsize=256)
def _shape(boxes: Boxes) -> tuple[ctypes.Array, ...]:
    columns, pitch = 64, 128
    return (
        (ctypes.c_uint64 * 3)(columns, boxes.length, boxes.heads),
        (ctypes.c_uint64 * 2)(pitch, pitch * boxes.length),
        (ctypes.c_uint32 * 3)(columns, boxes.rows, 1),
        (ctypes.c_uint32 * 3)(1, 1, 1),
    )


@functools.cache
def _encoder():
    """The driver's `cuTensorMapEncodeTiled`: that of cuda.bindings takes longer, as it makes objects."""
    encode = driver_library().cuTensorMapEncodeTiled
    number, place = ctypes.c_uint32, ctypes.c_void_p
    encode.argtypes = (place, number, number, *(place,) * 5, *(number,) * 4)
    encode.restype = ctypes.c_int
    return encode


@functools.cache
def driver_library() -> ctypes.CDLL:
    """NVIDIA's driver."""
    return ctypes.WinDLL("nvcuda.dll") if os.name == "nt" else ctypes.CDLL("libcuda.so.1")
