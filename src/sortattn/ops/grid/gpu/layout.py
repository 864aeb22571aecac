"""How many nodes there are, in which types they work, and into which blocks things are cut."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from ....cuda.constants import kept
from .language import ramp

INTERPRETED = isinstance(ramp, InterpretedFunction)
# programs that keep a large GPU busy
_BUSY = 528
# points of a program, at most: their codes, of 9 bits and one, are summed in integers of 32
_LONGEST = 1 << 21


def _fast() -> bool:
    """Whether all GPUs have instructions for two integers of 16 bits: compute capability 9.0 on; or there are none."""
    if INTERPRETED or torch.version.hip is not None:
        return False
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return all(torch.cuda.get_device_capability(device) >= (9, 0) for device in devices)


# two integers of 16 bits in one instruction
FAST = _fast()
# points of a block of lines, see `Places`
LINE = 64


@dataclass(frozen=True)
class Layout:
    """How many nodes there are, and the types in which they work."""

    count: int
    dtype: torch.dtype

    @functools.cached_property
    def padded(self) -> int:
        return max(16, power_of_two(self.count))

    @property
    def block(self) -> int:
        """Nodes that are taken together."""
        return min(self.padded, 64)

    @property
    def narrow(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)

    @property
    def table_type(self) -> torch.dtype:
        """What queries read: scaled, so that the range of bfloat16 is not needed and its missing digits are there."""
        return torch.float16 if self.narrow else torch.float32

    @property
    def precision(self) -> dict:
        return {"PRECISION": "tf32" if self.narrow else "tf32x3", "EMULATED": INTERPRETED}


@kept
def shifts(padded: int, device: torch.device, kind: torch.dtype, bits: int = 9) -> Tensor:
    """What `ramp` adds for the nodes -1 ... G, then for 0 ... G - 1 with a last one that makes every ramp one."""
    nodes = torch.arange(1, -padded - 1, -1, device="cpu")
    nodes = torch.cat([nodes, nodes[1:-2], nodes[:1]])
    return (nodes.to(kind) if kind == torch.float32 else (nodes << bits).to(torch.int16)).to(device)


@kept
def steps_of_cells(device: torch.device, bits: int) -> Tensor:
    """What `count_kernel` adds: for 16 rows, one from every fourth cell on; for eight columns, four ramps and one."""
    rows, columns = (torch.arange(number, device="cpu") for number in (16, 8))
    ramps = torch.where(columns < 4, -columns, 1) << bits
    return torch.cat([1 - (4 * rows << bits), ramps]).to(torch.int16).to(device)


def joined_parts(table: Tensor) -> Tensor:
    """The table of all points from those of parts."""
    return table[0] if table.shape[0] == 1 else table.sum(0)


def of_heads(part: Tensor | None, heads: slice) -> Tensor | None:
    """A tensor of some heads; of all of them the tensor itself, as slices take microseconds, some dozens a call."""
    return part if part is None or whole(part, heads) else part[heads]


def whole(part: Tensor, heads: slice) -> bool:
    """Whether these are all heads of a tensor."""
    return heads.start == 0 and heads.stop == part.shape[0]


def count_blocks(length: int, block: int) -> int:
    """How many blocks hold so many things; Triton's own `cdiv` takes microseconds, some dozens of times a call."""
    return -(-length // block)


def power_of_two(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def channel_block(channels: int) -> int:
    """Channels of a block."""
    return min(64, max(16, power_of_two(channels)))


def registers(number: int) -> dict:
    """How many registers a thread has, where NVIDIA's compiler would take more and leave room for fewer blocks."""
    return {"maxnreg": number} if FAST else {}


def split_length(length: int, programs: int, least: int) -> tuple[int, int]:
    """How many points a program takes, a multiple of `least`, and how many of them take one line."""
    splits = max(1, min(_BUSY // max(programs, 1), length // 1024))
    span = math.ceil(min(math.ceil(length / splits), _LONGEST) / least) * least
    return span, math.ceil(length / span)
