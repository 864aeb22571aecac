"""A look at the points: a sample of them, their extremes, and whether all are finite."""

import triton
import triton.language as tl

# stretches of the sequence whose extremes stand in the sample
STRETCHES = 16
# rows of a sample that one program brings
ROWS = 64


@triton.jit
def survey_kernel(
    points,
    chosen,
    line,
    flags,
    length,
    rows,
    sampled,
    first,
    width,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    GROUP: tl.constexpr,
    CHOSEN: tl.constexpr,
    STRETCHES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: the extremes of a stretch of `points (P, length, D)`, or 64 rows of the sample.

    To `line (P, D, width)` from `first` on: the sample, then the least and the largest point of every stretch. `flags
    (P * GROUP)` are raised where a head, `rows` of the points, holds what is not finite; it counts as zero.
    """
    part, problem, head = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    dim = tl.arange(0, DIMS)
    inside = dim < D
    base = points + problem * length * D
    out = line + (problem * D + dim) * width + first
    if part < STRETCHES:
        stretch = tl.cdiv(rows, STRETCHES)
        start = head * rows + part * stretch
        stop = tl.minimum(start + stretch, (head + 1) * rows)
        low = tl.full((ROWS, DIMS), float("inf"), tl.float32)
        high = tl.full((ROWS, DIMS), float("-inf"), tl.float32)
        odd = tl.zeros((ROWS, DIMS), tl.int32)
        for n0 in range(start, stop, ROWS):
            row = n0 + tl.arange(0, ROWS)
            here = (row < stop)[:, None] & inside[None, :]
            x = tl.load(base + row[:, None].to(tl.int64) * D + dim[None, :], mask=here, other=0.0).to(tl.float32)
            finite = tl.abs(x) < float("inf")
            odd = odd | tl.where(finite, 0, 1)
            x = tl.where(finite, x, 0.0)
            low = tl.minimum(low, tl.where(here, x, float("inf")))
            high = tl.maximum(high, tl.where(here, x, float("-inf")))
        low, high = tl.min(low, 0), tl.max(high, 0)
        # a stretch without rows is told from others by its order
        slot = sampled + 2 * (part * GROUP + head)
        tl.store(out + slot, low, mask=inside)
        tl.store(out + slot + 1, tl.where(high < low, float("inf"), high), mask=inside)
        tl.atomic_max(flags + problem * GROUP + head, tl.max(tl.max(odd, 0), 0))
    elif head == 0:
        place = (part - STRETCHES) * ROWS + tl.arange(0, ROWS)
        here = place < tl.minimum(sampled, length)
        if CHOSEN:
            row = tl.load(chosen + problem * sampled + place, mask=here, other=0)
        else:
            # steps of the golden ratio, in 32 bits behind the point; all points if they are few
            step = (place.to(tl.int64) * 2654435769) & 0xFFFFFFFF
            row = tl.where(length <= sampled, place.to(tl.int64), (step * length) >> 32)
        here = here[:, None] & inside[None, :]
        x = tl.load(base + row[:, None].to(tl.int64) * D + dim[None, :], mask=here, other=0.0).to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        spot = line + (problem * D + dim[None, :]) * width + first + place[:, None]
        tl.store(spot, tl.where(here, x, float("inf")), mask=(place < sampled)[:, None] & inside[None, :])
