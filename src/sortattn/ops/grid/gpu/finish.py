"""The last step of a causal call whose tables never went to memory: parts of sums are added up, and normalised."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .march import Units
from .tables import Flags


@dataclass(frozen=True)
class Finish:
    """What is added to the sums of pairs, and where the output goes."""

    units: Units
    rows: Tensor
    totals: Tensor
    flags: Flags
    normalise: bool

    @property
    def arguments(self) -> tuple:
        """What `finished` takes."""
        units = self.units
        return units.sums, units.totals, units.unscale, units.first, units.each, self.flags.rows, self.flags.shared


@triton.jit
def finished(
    found,
    total,
    sums,
    totals,
    unscale,
    first,
    each,
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
    unit = tl.where(problem < first, problem * each, (2 * problem - first) * each)
    stop = unit + tl.where(problem < first, each, 2 * each)
    channel = tl.arange(0, CHANNELS)
    far = tl.zeros((ROWS, CHANNELS), tl.float32)
    # two at a time, as Triton loads nothing ahead here: pairs and this together 0.326 instead of 0.338 ms
    for part in range(unit, stop, 2):
        at = part * length + m
        spot = sums + at[:, None] * CHANNELS + channel[None, :]
        also = here & (part + 1 + 0 * m < stop)
        one = tl.load(spot, mask=here[:, None], other=0.0)
        two = tl.load(spot + length * CHANNELS, mask=also[:, None], other=0.0)
        total += tl.load(totals + at, mask=here, other=0.0) + tl.load(totals + at + length, mask=also, other=0.0)
        far += one.to(tl.float32) * tl.load(unscale + part)
        far += two.to(tl.float32) * tl.load(unscale + tl.minimum(part + 1, stop - 1))
    # halves, threads of a row, blocks of eight columns, two columns
    far = tl.permute(tl.reshape(far, (ROWS, CHANNELS // 32, 4, 4, 2)), (0, 1, 3, 2, 4))
    found += tl.reshape(far, (ROWS, CHANNELS))
    if NORMALISE:
        empty = tl.abs(total) < 1.1754943508222875e-38
        found = tl.where(empty[:, None], 0.0, found / tl.where(empty, 1.0, total)[:, None])
    flag = tl.load(flags + problem) + tl.load(key_flags + problem)
    return tl.where(flag > 0, float("nan"), found), total
