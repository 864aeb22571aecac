"""The samples that nodes are placed along, in order: launches of order.cu.

Triton can sort a line too, which takes its compiler several times as long, and a GPU twice as long.
"""

import functools
from pathlib import Path

from torch import Tensor

from ....cuda.launch import Kernel
from .launch import Known, compiles, direct

_SOURCE = Path(__file__).with_name("order.cu")
# numbers of a thread
_EACH = 8


def sort_lines(line: Tensor, used: int, power: int, launches: Known | None) -> bool:
    """Sorts the first `used` numbers of every `line (P, D, width)`, then infinities up to `2^power`, if it can."""
    if not compiles(line.device) or not 8 <= power <= 12:
        return False
    problems, dims, width = line.shape
    direct(kernel_of(power), launches)((problems * dims,), (1 << power) // _EACH, line, width, used, shared=0)
    return True


@functools.cache
def kernel_of(power: int) -> Kernel:
    """For lines of up to `2^power` numbers."""
    return Kernel(_SOURCE, "sort_lines", (("POWER", power), ("EACH", _EACH)))
