"""The places of points between the nodes, `(P, N, D) -> (P, D, N)`: one search, and no exponential after it."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .grid import Grid
from .language import STATS, find_bin, load_pair, load_words, share_and_sum
from .launch import quick
from .layout import FAST, LINE, count_blocks, registers
from .record import empty
from .tables import Places

_LOG2_E = tl.constexpr(math.log2(math.e))
# points and dimensions of a block, and warps; with twice as many dimensions it took 5 per cent longer
_BLOCK = (128, 16, 8)


@triton.jit
def sinh_ratio(z, width):
    """`sinh(z) / sinh(width)` for `0 <= z <= width`; no exponent is positive, and narrow cells lose no digits."""
    ratio = z / tl.where(width > 0, width, 1.0)
    wide = tl.maximum(width, 0.1)
    full = tl.exp(z - wide) * (1 - tl.exp(-2 * z)) / (1 - tl.exp(-2 * wide))
    return tl.where(width < 0.1, ratio * (1 + (z * z - width * width) / 6), full)


@triton.jit
def _find_cell(x, nodes, index, G: tl.constexpr, GP: tl.constexpr):
    """The cells of `x (ROWS, DIMS)`, their starts and one over their widths.

    `nodes` and `index (1, DIMS)` are pointers to those of a dimension and to what `nodes_kernel` says of their bins:
    from the bin of a point on, a binary search of as many steps as the fullest bin needs.
    """
    BINS: tl.constexpr = 4 * GP
    last = index + 2 * (G - 1)
    steps = tl.max(tl.max(tl.load(last + 1), 1), 0).to(tl.int32)
    own = find_bin(x, tl.load(nodes), tl.load(last), BINS)
    cell = tl.load((index + 2 * GP).to(tl.pointer_type(tl.int8)) + own).to(tl.int32)
    for turn in range(1, steps):
        probe = cell + (1 << (steps - turn))
        number = tl.load(nodes + tl.minimum(probe, G - 1))
        cell = tl.where((probe < G - 1) & (number <= x), probe, cell)
    # the last step has both cells loaded at once: most calls have no other
    start, per_width = load_pair(index, cell)
    probe = cell + 1
    number, next_ = load_pair(index, tl.minimum(probe, G - 2))
    higher = (probe < G - 1) & (number <= x)
    cell, start = tl.where(higher, probe, cell), tl.where(higher, number, start)
    per_width = tl.where(higher, next_, per_width)
    return cell, start, per_width


@triton.jit
def _find_code(x, index, zero, per_bin, G: tl.constexpr, GP: tl.constexpr, UNIT: tl.constexpr, FAST: tl.constexpr):
    """The codes of `x (ROWS, DIMS)`, UNIT for a cell, where no bin has two nodes, in one look-up, see `_bins`.

    `zero (1, DIMS)` is what `find_bin` adds. All points are bins away from both ends, so that none has to be moved to
    the first or the last bin; what is no number finds some bin.
    """
    place = tl.fma(x, per_bin, zero)
    whole, slopes = load_words(index + 3 * GP, place.to(tl.int32, bitcast=True) & (4 * GP - 1))
    distance = tl.fma(x, per_bin, zero - place) - _upper_half(whole)
    slope = _upper_half(tl.where(distance < 0, slopes << 16, slopes))
    # the integer is in the last bits, as in `find_bin`: of these there are 16, in which all else is zero
    code = whole + tl.fma(distance, slope, 12582912.0).to(tl.int32, bitcast=True)
    if UNIT == 256:
        code = ((code & 0xFFFF) + 1) >> 1
    return _bounded(code.to(tl.int16), G, UNIT, FAST)


@triton.jit
def _upper_half(word):
    """The number that is a float16 in the first half of a word."""
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _find_factor(x, code, index, rate, GP: tl.constexpr, UNIT: tl.constexpr):
    """For exponentials, the factors of the points times 2^15, see `_factors`; `rate` is log2(e) over the bandwidth."""
    middle, level = load_pair(index + 11 * GP, code.to(tl.int32) >> (8 if UNIT == 256 else 9))
    apart = tl.fma(x, rate, -middle)
    # what is no number has some factor
    return tl.minimum((tl.exp2(apart) + tl.exp2(-apart)) * level, 32768.0)


@triton.jit
def _bounded(code, G: tl.constexpr, UNIT: tl.constexpr, FAST: tl.constexpr):
    """Codes of cells that there are, whatever x was; not the last 512, so that one more cell does not overflow."""
    MOST: tl.constexpr = UNIT * (G - 1) if UNIT * (G - 1) < 32255 else 32255
    if FAST:
        return tl.inline_asm_elementwise(
            "min.relu.s16x2 $0, $1, $2;",
            "=r,r,r",
            [code, tl.full(code.shape, MOST, tl.int16)],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.minimum(tl.maximum(code, 0), MOST).to(tl.int16)


@triton.jit
def _place(
    points,
    weight,
    nodes,
    stats,
    tau,
    places,
    seconds,
    lines,
    length,
    D: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    ROWS: tl.constexpr,
    TURNS: tl.constexpr,
    DIMS: tl.constexpr,
    EXPONENTIAL: tl.constexpr,
    MASKED: tl.constexpr,
    LINES: tl.constexpr,
    STRETCH: tl.constexpr,
    CENTRED: tl.constexpr,
    UNIT: tl.constexpr,
    FAST: tl.constexpr,
    CROWDED: tl.constexpr,
):
    """What `locate_kernel` does; CROWDED: for codes too by a search, as some bin has two nodes."""
    FACTORED: tl.constexpr = places.dtype.element_ty == tl.int32
    problem = tl.program_id(2).to(tl.int64)
    d = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    line = (problem * D + (d if D % DIMS == 0 else tl.where(d < D, d, 0)))[None, :]
    base, index = nodes + line * GP, stats + (line * STATS + 3) * GP
    blocks = tl.cdiv(length, ROWS)
    if not CROWDED:
        # here and not at every turn: behind a store a compiler has to load again
        per_bin = tl.load(index + 2 * (G - 1))
        zero = tl.fma(-tl.load(base), per_bin, 8388608.0)
        rate = _LOG2_E / tau
    rows_at = points + problem * length * D + d[None, :]
    n = tl.program_id(0) * TURNS * ROWS + tl.arange(0, ROWS)
    wanted = (n < length)[:, None] & (d < D)[None, :]
    following = tl.load(rows_at + n[:, None].to(tl.int64) * D, mask=wanted, other=0.0)
    # the points of two turns are on their way: those of one are too few bytes for the memory of a large GPU
    n += ROWS
    wanted = (n < (length if TURNS > 1 else 0))[:, None] & (d < D)[None, :]
    after = tl.load(rows_at + n[:, None].to(tl.int64) * D, mask=wanted, other=0.0)
    for turn in range(0, TURNS):
        tile = tl.program_id(0) * TURNS + turn
        n = tile * ROWS + tl.arange(0, ROWS)
        here = (n < length)[:, None] & (d < D)[None, :]
        x = following.to(tl.float32)
        next_ = n + 2 * ROWS
        wanted = (next_ < tl.where(turn + 2 < TURNS, length, 0))[:, None] & (d < D)[None, :]
        following = after
        after = tl.load(rows_at + next_[:, None].to(tl.int64) * D, mask=wanted, other=0.0)
        # four points of a line a thread, as it is for float32: with the eight that fit for codes it took a third longer
        out = (problem * D + d)[None, :] * length + tl.max_contiguous(n, 4)[:, None]
        if MASKED:
            counts = (tl.load(weight + problem * length + n, mask=n < length, other=0.0) != 0)[:, None]
        if LINES:
            if lines.dtype.element_ty == tl.float16:
                spot, inside = lines + (problem * length + n)[:, None] * D + d[None, :], here
            else:
                block = lines + (problem * blocks + tile) * (D * ROWS)
                spot = block + (d * ROWS)[None, :] + tl.max_contiguous(tl.arange(0, ROWS), 4)[:, None]
                inside = (d < tl.where(tile < blocks, D, 0))[None, :]
            point = x
            if CENTRED:
                point -= tl.load(base + G // 2)
            tl.store(spot, (point / tau * STRETCH).to(lines.dtype.element_ty), mask=inside)
        if not CROWDED:
            code = _find_code(x, index, zero, per_bin, G, GP, UNIT, FAST)
            if FACTORED:
                factor = _find_factor(x, code, index, rate, GP, UNIT)
        else:
            cell, start, per_width = _find_cell(x, base, index, G, GP)
        if places.dtype.element_ty != tl.float32:
            if CROWDED:
                if FACTORED:
                    width = tl.load(base + cell + 1) - start
                    distance = tl.minimum(tl.maximum(x - start, 0.0), width)
                    share, factor = share_and_sum(distance / tau, (width - distance) / tau)
                    factor *= 32768.0
                else:
                    share = (x - start) * per_width
                # a NaN becomes zero
                share = tl.minimum(tl.maximum(share, 0.0), 1.0)
                code = _bounded((cell * UNIT + (share * UNIT + 0.5).to(tl.int32)).to(tl.int16), G, UNIT, FAST)
            if MASKED:
                code = tl.where(counts, code, 0)
            if FACTORED:
                if MASKED:
                    factor = tl.where(counts, factor, 0.0)
                if UNIT == 256:
                    bits = (factor * 2.0**112).to(tl.bfloat16).to(tl.int16, bitcast=True)
                else:
                    bits = factor.to(tl.float16).to(tl.int16, bitcast=True)
                code = (bits.to(tl.int32) << 16) | (code.to(tl.int32) & 0xFFFF)
            tl.store(places + out, code, mask=here)
        else:
            if EXPONENTIAL:
                width = tl.load(base + cell + 1) - start
                distance = tl.minimum(tl.maximum(x - start, 0.0), width)
                above, below = distance / tau, (width - distance) / tau
                above, below = sinh_ratio(above, width / tau), sinh_ratio(below, width / tau)
                rest = tl.minimum(tl.maximum(1 - below, 0.0), 1.0)
            else:
                above = tl.maximum((x - start) * per_width, 0.0)
            above = tl.minimum(above, 1.0)
            if MASKED:
                cell, above = tl.where(counts, cell, 0), tl.where(counts, above, 0.0)
            tl.store(places + out, cell.to(tl.float32) + above, mask=here)
            if EXPONENTIAL:
                if MASKED:
                    rest = tl.where(counts, rest, 0.0)
                tl.store(seconds + out, cell.to(tl.float32) + rest, mask=here)


@triton.jit
def locate_kernel(
    points,
    weight,
    nodes,
    stats,
    bandwidth,
    places,
    seconds,
    lines,
    length,
    D: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    ROWS: tl.constexpr,
    TURNS: tl.constexpr,
    DIMS: tl.constexpr,
    EXPONENTIAL: tl.constexpr,
    MASKED: tl.constexpr,
    LINES: tl.constexpr,
    STRETCH: tl.constexpr,
    CENTRED: tl.constexpr,
    UNIT: tl.constexpr,
    FAST: tl.constexpr,
):
    """The cell and the weight of the node above, as one number; for exponentials also one less the weight below.

    Of words, see `language`, the share is that in the sum of both weights, which is the factor.

    TURNS blocks of ROWS points by program, so that what is known of the nodes is brought once for all of them. Masked
    points stand at the first node. With LINES the points themselves, CENTRED around a node, divided by the bandwidth
    and multiplied with STRETCH, go to `lines (P, blocks, D, ROWS)`, zeros behind them, or in float16 to `(P, N, D)`.
    """
    problem = tl.program_id(2).to(tl.int64)
    what = (points, weight, nodes, stats, tl.load(bandwidth + problem), places, seconds, lines, length)
    if places.dtype.element_ty != tl.float32:
        d = tl.minimum(tl.program_id(1) * DIMS + tl.arange(0, DIMS), D - 1)
        steps = tl.load(stats + ((problem * D + d) * STATS + 3) * GP + 2 * (G - 1) + 1)
        # a loop for either: in one loop both together would take half as many registers again
        if tl.max(steps, 0) > 1:
            _place(*what, D, G, GP, ROWS, TURNS, DIMS, EXPONENTIAL, MASKED, LINES, STRETCH, CENTRED, UNIT, FAST, True)
        else:
            _place(*what, D, G, GP, ROWS, TURNS, DIMS, EXPONENTIAL, MASKED, LINES, STRETCH, CENTRED, UNIT, FAST, False)
    else:
        _place(*what, D, G, GP, ROWS, TURNS, DIMS, EXPONENTIAL, MASKED, LINES, STRETCH, CENTRED, UNIT, FAST, True)


def locate(
    grid: Grid,
    points: Tensor,
    weight: Tensor | None = None,
    kind: torch.dtype = torch.float32,
    lines: torch.dtype | None = None,
    bits: int = 9,
) -> Places:
    """The places of `points (P, N, D)`, in float32, codes with so many `bits` behind the point, or words with these.

    Those without weight stand at the first node, with a factor of zero.
    """
    problems, length, dims = points.shape
    first = empty(problems, dims, length, dtype=kind, device=points.device)
    two = grid.formula.exponential and kind == torch.float32
    second = empty(*first.shape, dtype=kind, device=points.device) if two else first
    tall, wide, warps = (LINE, 16, 4) if lines else _BLOCK
    blocks = count_blocks(length, tall)
    # as measured on one H200: for codes, 0.105 ms instead of 0.112 with four of them, of 16,384 points
    turns = 1 if kind == torch.float32 else 8 if length >= 8192 else 4
    line = first
    if lines is not None:
        shape = (length, dims) if lines == torch.float16 else (blocks, dims, LINE)
        line = empty(problems, *shape, dtype=lines, device=points.device)
    # queries and keys may be as many, but begin at other addresses
    which = (weight is None, lines, bits, length, points.data_ptr() % 16)
    quick(locate_kernel, grid.launches, *which)[(count_blocks(blocks, turns), count_blocks(dims, wide), problems)](
        points,
        first if weight is None else weight,
        grid.nodes,
        grid.stats,
        grid.bandwidth,
        first,
        second,
        line,
        length,
        D=dims,
        G=grid.layout.count,
        GP=grid.layout.padded,
        ROWS=tall,
        TURNS=turns,
        DIMS=wide,
        EXPONENTIAL=grid.formula.exponential,
        MASKED=weight is not None,
        LINES=lines is not None,
        STRETCH=_LOG2_E.value if grid.halves and grid.formula.kind == "laplace" else 1.0,
        # of differences alone, float16 has more digits
        CENTRED=lines == torch.float16 and not grid.formula.riesz,
        UNIT=1 << bits,
        FAST=FAST,
        num_warps=warps,
        # three blocks a multiprocessor
        **(registers(80) if kind == torch.int32 else {}),
    )
    return Places(first, second, None if lines is None else line, bits)
