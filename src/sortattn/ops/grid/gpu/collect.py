"""From points to nodes: tables of ramps times rows on tensor cores, and sums of ramps for the normaliser."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .grid import Grid
from .language import coarse_ramp, code_of, factor_of, factored_ramp, product, ramp, unit
from .launch import quick
from .layout import FAST, channel_block, count_blocks, joined_parts, registers, shifts, split_length, steps_of_cells
from .record import empty
from .tables import Places


@triton.jit
def collect_kernel(
    places,
    seconds,
    shifts,
    rows,
    table,
    largest,
    length,
    span,
    channels,
    D: tl.constexpr,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EVEN: tl.constexpr,
    HATS: tl.constexpr,
    BITS: tl.constexpr,
    PRECISION: tl.constexpr,
    EMULATED: tl.constexpr,
    FAST: tl.constexpr,
):
    """`table (splits, P, D * G, C)`: for a head, TOGETHER blocks of nodes, some channels, `span` of the points.

    Row g of a dimension holds the sum of `ramp_g(place) row`, its last one that of the rows. With HATS it is the weight
    of the node itself that multiplies the rows; ramps of words are those times the factor of a point. `largest (P)` is
    raised to the largest number, as the bits of a float; those of a NaN are larger than all others. EVEN: blocks
    divide everything, so nothing is masked.
    """
    TALL: tl.constexpr = TOGETHER * BLOCK
    problem, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    parts = tl.cdiv(channels, CHANNELS)
    first, part = tl.program_id(0) // parts * TOGETHER, tl.program_id(0) % parts
    block = first + tl.arange(0, TOGETHER)[:, None, None]
    dim = tl.minimum(block // (G // BLOCK), D - 1)
    node = tl.arange(0, BLOCK)[None, :, None]
    if G > BLOCK:
        node += block % (G // BLOCK) * BLOCK
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((TALL, CHANNELS), tl.float32)
    stop = tl.minimum((split + 1) * span, length)
    for start in range(split * span, stop, ROWS):
        n = start + tl.arange(0, ROWS)
        at = (problem * D + dim) * length + n[None, None, :]
        rows_at = rows + (problem * length + n)[:, None] * channels + channel[None, :]
        if EVEN:
            row = tl.load(rows_at)
            place = tl.load(places + at)
        else:
            row = tl.load(rows_at, mask=(n < stop)[:, None] & (channel < channels)[None, :], other=0.0)
            place = tl.load(places + at, mask=(n < stop)[None, None, :], other=0)
        if HATS:
            if EVEN:
                second = tl.load(seconds + at)
            else:
                second = tl.load(seconds + at, mask=(n < stop)[None, None, :], other=0)
            weight = ramp(place, tl.load(shifts + node), FAST)
            weight -= ramp(second, tl.load(shifts + node + 1), FAST)
        elif place.dtype == tl.int32:
            weight = factored_ramp(place, tl.load(shifts + G + 2 + node), BITS, FAST)
        elif BITS == 8:
            weight = coarse_ramp(place, tl.load(shifts + G + 2 + node), FAST)
        else:
            # the second line of the shifts: its last ramp is one everywhere
            weight = ramp(place, tl.load(shifts + G + 2 + node), FAST)
        weight = tl.reshape(weight, (TALL, ROWS))
        total = product(weight, row, total, PRECISION, EMULATED)
    total *= unit(places, BITS)
    line = first * BLOCK + tl.arange(0, TALL)
    inside = (line < D * G)[:, None] & (channel < channels)[None, :]
    out = ((split * tl.num_programs(1) + problem) * (D * G) + line)[:, None] * channels + channel[None, :]
    tl.store(table + out, total, mask=inside)
    bits = tl.abs(tl.where(inside, total, 0.0)).to(tl.int32, bitcast=True)
    tl.atomic_max(largest + problem, tl.max(tl.max(bits, 1), 0))


@triton.jit
def _steps(code, shift, FAST: tl.constexpr):
    """One where codes have reached a row, or zero. FAST: two in an instruction, as float16 of these bits."""
    if FAST:
        code, shift = tl.broadcast(code, shift)
        return tl.inline_asm_elementwise(
            "{.reg .b32 t, l; mov.b32 l, 0x00010001; add.s16x2 t, $1, $2; min.relu.s16x2 $0, t, l;}",
            "=r,r,r",
            [code, shift],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return (code.to(tl.int32) + shift.to(tl.int32) > 0).to(tl.float16)


@triton.jit
def _ramps_within(code, shift, BITS: tl.constexpr, FAST: tl.constexpr):
    """The ramps of the last two bits of cells, as integers."""
    if FAST:
        code, shift = tl.broadcast(code, shift)
        if BITS == 8:
            what: tl.constexpr = "{.reg .b32 t, l; mov.b32 l, 0x01000100; and.b32 t, $1, 0x03FF03FF; "
        else:
            what: tl.constexpr = "{.reg .b32 t, l; mov.b32 l, 0x02000200; and.b32 t, $1, 0x07FF07FF; "
        return tl.inline_asm_elementwise(
            what + "add.s16x2 t, t, $2; min.relu.s16x2 $0, t, l;}",
            "=r,r,r",
            [code, shift],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        number = (code.to(tl.int32) & ((4 << BITS) - 1)) + shift.to(tl.int32)
        return tl.minimum(tl.maximum(number, 0), 1 << BITS).to(tl.float16)


@triton.jit
def _as_halves(factor, FAST: tl.constexpr):
    """Factors in bfloat16, times 2^127, as float16, times 2^15: their digits are those of both."""
    if FAST:
        return tl.inline_asm_elementwise(
            "{.reg .b32 t, l, u; mov.b32 l, 0x90009000; mov.b32 u, 0x7FFF7FFF; add.s16x2 t, $1, l; "
            "min.relu.s16x2 t, t, u; shl.b32 $0, t, 3;}",
            "=r,r",
            [factor],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return (factor.to(tl.float32) * 2.0**-112).to(tl.float16)


@triton.jit
def _times(ramps, factor, FAST: tl.constexpr):
    """Ramps, as integers or float16 of their bits, times factors: 0 ... 1."""
    if FAST:
        ramps, factor = tl.broadcast(ramps, factor)
        return tl.inline_asm_elementwise(
            "mul.f16x2 $0, $1, $2;", "=r,r,r", [ramps, factor], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return (ramps.to(tl.float32) * factor.to(tl.float32) * 2.0**-24).to(tl.float16)


@triton.jit
def count_kernel(
    places,
    steps,
    table,
    length,
    span,
    splits,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TURNS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BITS: tl.constexpr,
    FAST: tl.constexpr,
):
    """`table (splits, P * D, G)`, the sums of `ramp_g(place)`, with BITS behind the point: sums of integers.

    Those of words are times the factors of the points, in float32, rounded as in the other tables; at last stands the
    sum of the factors.

    A line, TOGETHER of its splits and a block of at most 64 nodes by program, so that places less the first of them
    have 15 bits. It is a product on tensor cores: rows that are one from every fourth node on, with columns that hold
    the ramps of four cells, and one. The difference of two rows is what four cells hold, to which points beyond them
    add one each. That takes a sixth of the instructions of 64 ramps. `steps` are those of `layout.steps_of_cells`.
    """
    FACTORED: tl.constexpr = places.dtype.element_ty == tl.int32
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    base = places + line * length
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 8)[None, :]
    # loaded for the reason that `ramp` has
    step, within = tl.load(steps + row), tl.load(steps + 16 + column)
    for turn in range(0, TOGETHER):
        split = tl.program_id(2) * TOGETHER + turn
        stop = tl.minimum((split + 1) * span, length)
        total = tl.zeros((16, 8), tl.float32 if FACTORED else tl.int32)
        for start in range(split * span, stop, ROWS * TURNS):
            some = tl.zeros((16, 8), tl.float32)
            for first in range(start, tl.minimum(start + ROWS * TURNS, stop), ROWS):
                n = first + tl.arange(0, ROWS)
                # what is not there is before all rows but the first, and before all ramps
                place = tl.load(base + n, mask=n < stop, other=0)
                if FACTORED:
                    factor = factor_of(place, BITS)[:, None]
                    place = code_of(place)
                elif place.dtype != tl.int16:
                    # the first step adds one more
                    place = tl.minimum(tl.maximum(place - block * BLOCK, 0.0), 63.996)
                    place = (place * 512 + 0.5).to(tl.int16)
                ramps = _ramps_within(place[:, None], within, BITS, FAST)
                if FACTORED:
                    if BITS == 8:
                        factor = _as_halves(factor, FAST)
                    ramps = _times(ramps, factor, FAST)
                some = tl.dot(_steps(place[None, :], step, FAST), ramps, some)
            if FACTORED:
                # ramps are 0 ... 1, and one factor may have bits of integers
                some *= 8589934592.0 if FAST else 512.0
            elif FAST:
                # two factors with bits of integers
                some *= 281474976710656.0
            total += some if FACTORED else some.to(tl.int32)
        beyond = tl.where(row < 15, tl.gather(total, tl.minimum(row + 1, 15) + 0 * column, 0), 0)
        sums = total - beyond + tl.sum(tl.where(column == 4, beyond, 0), 1)[:, None]
        spot = table + (split.to(tl.int64) * tl.num_programs(0) + line) * G + block * BLOCK + row * 4 + column
        here = (column < tl.where(split < splits, 4, 0)) & (row * 4 < BLOCK)
        if FACTORED:
            # the first row is one everywhere
            whole = tl.sum(tl.sum(tl.where((row == 0) & (column == 4), total, 0.0), 1), 0)
            sums = tl.where(row * 4 + column == BLOCK - 1, whole, sums)
        tl.store(spot, sums * (1.0 / (1 << BITS)), mask=here)


@triton.jit
def _as_number(place):
    if place.dtype != tl.float32:
        place = code_of(place).to(tl.float32) * (1 / 512)
    return place


@triton.jit
def weighted_count_kernel(
    places,
    seconds,
    shifts,
    weight,
    table,
    length,
    span,
    D: tl.constexpr,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HATS: tl.constexpr,
):
    """The one more channel of `collect_kernel`'s table, `(splits, P * D, G)`, for weights in float32."""
    line, block, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    node = block * BLOCK + tl.arange(0, BLOCK)
    if HATS:
        before, shift = tl.load(shifts + node)[:, None], tl.load(shifts + node + 1)[:, None]
    else:
        shift = tl.load(shifts + G + 2 + node)[:, None]
    stop = tl.minimum((split + 1) * span, length)
    sums = tl.zeros((BLOCK, ROWS), tl.float32)
    for start in range(split * span, stop, ROWS):
        n = start + tl.arange(0, ROWS)
        row = tl.load(weight + line // D * length + n, mask=n < stop, other=0.0)[None, :]
        place = tl.load(places + line * length + n, mask=n < stop, other=0)[None, :]
        if place.dtype == tl.int32:
            row *= factor_of(place, 9).to(tl.float32) * 2.0**-15
        place = _as_number(place)
        if HATS:
            second = _as_number(tl.load(seconds + line * length + n, mask=n < stop, other=0)[None, :])
            share = ramp(place, before, False) - ramp(second, shift, False)
        else:
            share = ramp(place, shift, False)
        sums += share * row
    tl.store(table + (split * tl.num_programs(0) + line) * G + node, tl.sum(sums, 1))


def collect_rows(grid: Grid, places: Places, rows: Tensor, largest: Tensor) -> Tensor:
    """The table `(P, D, GP, C)` of `rows (P, N, C)`; raises `largest (P)` to its largest number."""
    problems, length, channels = rows.shape
    padded, block = grid.layout.padded, grid.layout.block
    narrow = grid.layout.narrow
    together = max(1, (256 if narrow else 64) // block)
    wide = channel_block(channels)
    blocks = count_blocks(grid.dims * padded // block, together) * count_blocks(channels, wide)
    # points at a time, and stages: for 32 nodes 0.37 instead of 0.44 ms, but for 64 it would be 0.97 instead of 0.63
    # (weights of 64 bfloat16 points come out wrong with Triton 3.6, with any number of stages; with words of 64 nodes
    # those of float16, too)
    few = places.codes and block == 32 and rows.dtype == torch.float16
    tall, stages = (64, 4) if few else (128 if narrow else 32, 3)
    span, splits = split_length(length, blocks * problems, tall)
    table = empty(splits, problems, grid.dims, padded, channels, device=rows.device)
    quick(collect_kernel, grid.launches)[(blocks, problems, splits)](
        places.first,
        places.second,
        grid.shifts(places.first, places.bits),
        rows,
        table,
        largest,
        length,
        span,
        channels,
        D=grid.dims,
        G=padded,
        BLOCK=block,
        TOGETHER=together,
        ROWS=tall,
        CHANNELS=wide,
        EVEN=length % tall == 0 and channels % wide == 0,
        HATS=grid.hats,
        BITS=places.bits,
        num_warps=8 if narrow else 4,
        num_stages=stages,
        # two blocks a multiprocessor, where that leaves enough
        **(registers(128) if places.codes and not grid.hats else {}),
        FAST=FAST,
        **grid.layout.precision,
    )
    return joined_parts(table)


def count_ramps(grid: Grid, places: Tensor, chunk: int = 0, bits: int = 9) -> Tensor:
    """The sums of ramps at `places (P, D, N)`, `(P, D, GP)`; with `bits` behind the point for 16-bit tensors.

    With a `chunk`, those of every chunk of so many places, `(chunks, P, D, GP)`.
    """
    problems, dims, length = places.shape
    padded, block = grid.layout.padded, grid.layout.block
    if not grid.layout.narrow:
        ones = torch.ones(problems, length, dtype=torch.float32, device=places.device)
        return _sum(grid, Places(places, places), ones, hats=False, chunk=chunk)
    rows = 256
    programs = problems * dims * padded // block
    span, splits = (chunk, math.ceil(length / chunk)) if chunk else split_length(length, programs, rows)
    together = 8 if chunk else 1
    table = empty(splits, problems, dims, padded, device=places.device)
    quick(count_kernel, grid.launches)[(problems * dims, padded // block, count_blocks(splits, together))](
        places,
        steps_of_cells(places.device, bits),
        table,
        length,
        span,
        splits,
        G=padded,
        BLOCK=block,
        ROWS=rows,
        # 4,096 points: sums of at most 21 bits, which tensor cores add up without rounding
        TURNS=4096 // rows,
        TOGETHER=together,
        BITS=bits,
        FAST=FAST,
        num_warps=1,
        # 0.12 instead of 0.13 ms; of chunks there is nothing to load ahead
        num_stages=1 if chunk else 3,
    )
    return table if chunk else joined_parts(table)


def weighted_count(grid: Grid, places: Places, weight: Tensor, chunk: int = 0) -> Tensor:
    """The table of one channel, `weight (P, N)` in float32; with a `chunk` those of all chunks."""
    return _sum(grid, places, weight, grid.hats, chunk)


def _sum(grid: Grid, places: Places, weight: Tensor, hats: bool, chunk: int = 0) -> Tensor:
    problems = weight.shape[0]
    padded, block = grid.layout.padded, grid.layout.block
    span, splits = chunk, math.ceil(places.length / max(chunk, 1))
    if not chunk:
        span, splits = split_length(places.length, problems * grid.dims * padded // block, 1024)
    table = empty(splits, problems, grid.dims, padded, device=weight.device)
    quick(weighted_count_kernel, grid.launches)[(problems * grid.dims, padded // block, splits)](
        places.first,
        places.second,
        shifts(padded, weight.device, torch.float32),
        weight,
        table,
        places.length,
        span,
        D=grid.dims,
        G=padded,
        BLOCK=block,
        ROWS=64,
        HATS=hats,
    )
    return table if chunk else joined_parts(table)
