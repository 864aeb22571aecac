"""A look at the points: a sample of them, their extremes, and whether all are finite."""

import triton
import triton.language as tl

# rows of a sample that one program brings
ROWS = 64


@triton.jit
def _extremes(low, high, x, FAST: tl.constexpr):
    """The extremes so far and those of `x`; a NaN stays."""
    if FAST and x.dtype == tl.bfloat16:
        low = tl.inline_asm_elementwise(
            "min.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [low, x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
        high = tl.inline_asm_elementwise(
            "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [high, x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
        return low, high
    else:
        low = tl.minimum(low, x, propagate_nan=tl.PropagateNan.ALL)
        return low, tl.maximum(high, x, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _look(
    points,
    chosen,
    line,
    flags,
    part,
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
    AHEAD: tl.constexpr,
    FAST: tl.constexpr,
):
    """The extremes of a stretch of `points (P, length, D)`, or 64 rows of the sample: one part of a side.

    To `line (P, D, width)` from `first` on: the sample, then the least and the largest point of every stretch. `flags
    (P * GROUP)` are raised where a head, `rows` of the points, holds what is not finite; it counts as zero.
    """
    problem, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    dim = tl.arange(0, DIMS)
    inside = dim < D
    base = points + problem * length * D
    out = line + (problem * D + dim) * width + first
    if part < STRETCHES:
        stretch = tl.cdiv(rows, STRETCHES)
        start = head * rows + part * stretch
        stop = tl.minimum(start + stretch, (head + 1) * rows)
        # in the type of the points; a NaN stays, an infinity is an extreme. Of bfloat16 some versions of Triton make
        # float32 at every step, and bfloat16 again: without instructions of our own it is float32 from the start
        WIDE: tl.constexpr = points.dtype.element_ty == tl.bfloat16 and not FAST
        KIND: tl.constexpr = tl.float32 if WIDE else points.dtype.element_ty
        low = tl.full((ROWS, DIMS), float("inf"), KIND)
        high = tl.full((ROWS, DIMS), float("-inf"), KIND)
        # without a minimum, where it can be, eight of them are loaded at a time
        column = dim if D == DIMS else tl.minimum(dim, D - 1)
        for n0 in range(start, stop, AHEAD * ROWS):
            # several loads under way at a time: one after the other they take three times as long
            for step in tl.static_range(AHEAD):
                row = n0 + step * ROWS + tl.arange(0, ROWS)
                # the last point of the stretch again where there is none
                row = tl.minimum(row, stop - 1)
                x = tl.load(base + row[:, None].to(tl.int64) * D + column[None, :]).to(KIND)
                low, high = _extremes(low, high, x, FAST)
        lows, highs = low.to(tl.float32), high.to(tl.float32)
        # what is not finite: a NaN is not equal to itself, and has spread to both
        odd = tl.where((lows > float("-inf")) & (highs < float("inf")), 0, 1)
        odd = tl.max(tl.max(odd, 0), 0)
        odd = tl.where(stop > start, odd, 0)
        low, high = tl.min(tl.where(lows == lows, lows, 0.0), 0), tl.max(tl.where(highs == highs, highs, 0.0), 0)
        low, high = tl.where(tl.abs(low) < float("inf"), low, 0.0), tl.where(tl.abs(high) < float("inf"), high, 0.0)
        if stop <= start:
            low, high = tl.full((DIMS,), float("inf"), tl.float32), tl.full((DIMS,), float("inf"), tl.float32)
        slot = sampled + 2 * (part * GROUP + head)
        tl.store(out + slot, low, mask=inside)
        tl.store(out + slot + 1, high, mask=inside)
        tl.atomic_max(flags + problem * GROUP + head, odd)
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


@triton.jit
def survey_kernel(
    query,
    key,
    chosen,
    line,
    flags,
    key_flags,
    length,
    seen,
    sampled,
    key_sampled,
    width,
    parts,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    GROUP: tl.constexpr,
    CHOSEN: tl.constexpr,
    STRETCHES: tl.constexpr,
    KEY_STRETCHES: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    FAST: tl.constexpr,
):
    """One program: a part of `query (P, length, D)`, which has `parts` of them, or of `key (P, seen, D)`."""
    part = tl.program_id(0)
    if part < parts:
        rows = length // GROUP
        where = (line, flags, part, length, rows, sampled, 0, width)
        _look(query, chosen, *where, D, DIMS, GROUP, False, STRETCHES, ROWS, AHEAD, FAST)
    elif tl.program_id(2) == 0:
        first = sampled + 2 * STRETCHES * GROUP
        where = (line, key_flags, part - parts, seen, seen, key_sampled, first, width)
        _look(key, chosen, *where, D, DIMS, 1, CHOSEN, KEY_STRETCHES, ROWS, AHEAD, FAST)
