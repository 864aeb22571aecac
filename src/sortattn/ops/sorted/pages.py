"""Large tensors in huge pages, on Linux.

Room of more than 32 MB `malloc` takes from the system anew for every tensor, and the system clears it page by page when
it is first written to. A page of 4 KB costs it about two microseconds; the sums of 8 heads at N = 16,384 have 8,192.
"""

import ctypes
import sys

from torch import Tensor

_HUGE = 2 << 20
_MADV_HUGEPAGE = 14
_system = ctypes.CDLL(None) if sys.platform == "linux" else None


def in_huge_pages(tensor: Tensor) -> Tensor:
    """`tensor`, of which nothing has been written yet; the system may decline."""
    start = tensor.data_ptr()
    first, last = -(-start // _HUGE) * _HUGE, (start + tensor.nbytes) // _HUGE * _HUGE
    if _system is not None and first < last:
        _system.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_HUGEPAGE)
    return tensor
