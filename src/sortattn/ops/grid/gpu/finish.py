"""The last step of a causal call whose tables never went to memory: sums are added up, and normalised."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .march import Far
from .tables import Flags


@dataclass(frozen=True)
class Finish:
    """What is added to the sums of pairs, and where the output goes."""

    far: Far
    rows: Tensor
    totals: Tensor
    flags: Flags
    normalise: bool

    @property
    def arguments(self) -> tuple:
        """What `finished` takes."""
        return self.far.sums, self.far.totals, self.far.unscale, self.flags.rows, self.flags.shared


@triton.jit
def finished(
    found,
    total,
    sums,
    totals,
    unscale,
    flags,
    key_flags,
    problem,
    m,
    here,
    length,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """`found (ROWS, CHANNELS)` and `total (ROWS)` of queries m of a head, with what `march` has left of them.

    NORMALISE divides the one by the other; where there are no weights the output is zero, and NaN where a flag is
    raised.
    """
    at = problem * length + m
    channel = tl.arange(0, CHANNELS)
    far = tl.load(sums + at[:, None] * CHANNELS + channel[None, :], mask=here[:, None], other=0.0).to(tl.float32)
    far *= tl.load(unscale + problem)
    total += tl.load(totals + at, mask=here, other=0.0)
    # halves, threads of a row, blocks of eight columns, two columns
    far = tl.permute(tl.reshape(far, (ROWS, CHANNELS // 32, 4, 4, 2)), (0, 1, 3, 2, 4))
    found += tl.reshape(far, (ROWS, CHANNELS))
    if NORMALISE:
        empty = tl.abs(total) < 1.1754943508222875e-38
        found = tl.where(empty[:, None], 0.0, found / tl.where(empty, 1.0, total)[:, None])
    flag = tl.load(flags + problem) + tl.load(key_flags + problem)
    return tl.where(flag > 0, float("nan"), found), total
