"""Along the chunks of a causal call: what all keys before a chunk have left on the nodes, ready to be read."""

import math

import triton
import triton.language as tl
from torch import Tensor

from ....kernels import RIESZ_EPSILON
from .grid import Grid
from .language import product, ramp, unit
from .launch import quick
from .layout import FAST, channel_block, count_blocks, power_of_two
from .record import empty
from .riesz import riesz_levels_kernel
from .tables import Places

# rows of the tables, keys of a block, warps and stages
_BLOCK = (128, 128, 4, 3)
# into which the values are cut for the largest of them
_PARTS = 64


@triton.jit
def largest_kernel(rows, largest, size, SIZE: tl.constexpr):
    """`largest (P, parts)`: the largest of a part of `rows (P, size)` by its absolute value; NaN where there is one."""
    base = rows + tl.program_id(1).to(tl.int64) * size
    most = tl.zeros((SIZE,), tl.int32)
    span = tl.cdiv(tl.cdiv(size, tl.num_programs(0)), SIZE) * SIZE
    start = tl.program_id(0).to(tl.int64) * span
    for first in range(start, tl.minimum(start + span, size), SIZE):
        at = first + tl.arange(0, SIZE)
        number = tl.load(base + at, mask=at < size, other=0.0).to(tl.float32)
        # as bits, of which those of a NaN are larger than all others
        most = tl.maximum(most, tl.abs(number).to(tl.int32, bitcast=True))
    found = tl.max(most, 0).to(tl.float32, bitcast=True)
    tl.store(largest + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), found)


@triton.jit
def bends_kernel(
    phi,
    phi_largest,
    largest,
    bends,
    factors,
    unscale,
    length,
    parts,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    PARTS: tl.constexpr,
    HATS: tl.constexpr,
    CHANGES: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The kernel between nodes, `phi (P * D, GP, GP)`, for tables of ramps that are read by ramps.

    F is `phi` times a table of hats, and a hat is the difference of two ramps. So the changes of F from node to node
    are the mixed differences of `phi`, its bends, times a table of ramps. The last ramp is one everywhere: its column
    holds the changes for all points together, its row F at the first node. HATS are multiplied with `phi`, or its
    changes, as they are; without CHANGES it gives F.

    SCALED by powers of two, so that all is in the range of 16 bits: the bends; tables of a CHUNK of values of the size
    `largest (P, parts)`, by the first of `factors (P, 2)`; and F of `length` values: what is the product of these two
    has to be multiplied with the second factor, and then with `unscale (P)` it is F. `phi_largest (P)` holds the bits
    of the largest number of `phi`.
    """
    problem = tl.program_id(0) // D
    most = tl.load(phi_largest + problem).to(tl.float32, bitcast=True)
    part = tl.arange(0, PARTS)
    # as bits, of which those of a NaN are larger than all others
    bits = tl.load(largest + problem * parts + part, mask=part < parts, other=0.0).to(tl.int32, bitcast=True)
    value = tl.max(bits, 0).to(tl.float32, bitcast=True)
    bound = most * 2.0 * length * value
    if SCALED:
        scale = tl.exp2(tl.floor(14.0 - tl.log2(tl.maximum(bound, 1e-30))))
        # a bend is the sum of four numbers at most
        own = tl.exp2(tl.floor(13.0 - tl.log2(tl.maximum(most, 1e-30))))
        # times `unit`, 2^15, it is finite too
        up = tl.exp2(tl.floor(15.0 - tl.log2(tl.maximum(CHUNK * value, 2e-29))))
    else:
        scale, own, up = 1.0 + 0.0 * bound, 1.0, 1.0
    # infinities and NaN
    scale = tl.where(bound < float("inf"), scale, float("nan"))
    tl.store(unscale + problem, 1.0 / scale)
    tl.store(factors + problem * 2, up)
    tl.store(factors + problem * 2 + 1, scale / own / up)
    at = tl.program_id(0).to(tl.int64) * GP * GP
    i, j = tl.arange(0, GP)[:, None], tl.arange(0, GP)[None, :]
    spot = phi + at + i * GP + j
    level = tl.load(spot)
    if HATS:
        here = level
        if CHANGES:
            here = tl.where(i < G - 1, tl.load(spot + GP, mask=i < G - 1, other=0.0) - level, 0.0)
    else:
        across = tl.load(spot + 1, mask=j < G - 1, other=0.0) - level
        first = tl.load(phi + at + i * GP)
        if CHANGES:
            inner = (i < G - 1) & (j < G - 1)
            below = tl.load(spot + GP + 1, mask=inner, other=0.0) - tl.load(spot + GP, mask=inner, other=0.0)
            # the sum of all hats: the first column in place of the last one, and so for the rows
            column = tl.where(i < G - 1, tl.load(phi + at + i * GP + GP, mask=i < G - 1, other=0.0) - first, 0.0)
            row_at = phi + at + j
            row = tl.where(j < G - 1, tl.load(row_at + 1, mask=j < G - 1, other=0.0) - tl.load(row_at), 0.0)
            here = tl.where(inner, below - across, 0.0)
            here = tl.where(j == GP - 1, column, tl.where(i == GP - 1, row, here))
            here = tl.where((i == GP - 1) & (j == GP - 1), tl.load(phi + at), here)
        else:
            here = tl.where(j == GP - 1, first, tl.where((i < G) & (j < G - 1), across, 0.0))
    tl.store(bends + at + i * GP + j, (here * own).to(bends.dtype.element_ty))


@triton.jit
def walk_kernel(
    places,
    seconds,
    shifts,
    rows,
    bends,
    factors,
    out,
    length,
    chunks,
    channels,
    D: tl.constexpr,
    GP: tl.constexpr,
    TOGETHER: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EVEN: tl.constexpr,
    HATS: tl.constexpr,
    REVERSED: tl.constexpr,
    PRECISION: tl.constexpr,
    EMULATED: tl.constexpr,
    FAST: tl.constexpr,
):
    """`out (chunks, P, D, GP, C)`: for TOGETHER dimensions of a head, what the points before every chunk give.

    The table of `collect_kernel` of one chunk is in registers; at the begin of the next one its product with `bends` is
    added to what is read. REVERSED it is the points behind every chunk.
    """
    TALL: tl.constexpr = TOGETHER * GP
    problem, problems = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    parts = tl.cdiv(channels, CHANNELS)
    first, part = tl.program_id(0) // parts * TOGETHER, tl.program_id(0) % parts
    own = tl.minimum(first + tl.arange(0, TOGETHER)[:, None, None], D - 1)
    node = tl.arange(0, GP)[None, :, None]
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    line, column = first * GP + tl.arange(0, TALL), tl.arange(0, TALL)
    inside = (line < D * GP)[:, None] & (channel < channels)[None, :]
    # the dimensions have nothing to do with each other
    block = (line < D * GP)[:, None] & ((column // GP)[:, None] == (column // GP)[None, :])
    matrix = tl.load(bends + (problem * (D * GP) + line)[:, None] * GP + (column % GP)[None, :], mask=block, other=0.0)
    up, down = tl.load(factors + problem * 2) * unit(places), tl.load(factors + problem * 2 + 1)
    total = tl.zeros((TALL, CHANNELS), tl.float32)
    found = tl.zeros((TALL, CHANNELS), tl.float32)
    # one loop: what comes next is loaded while a table is written
    for turn in range(0, chunks * (CHUNK // ROWS)):
        chunk, step = turn // (CHUNK // ROWS), turn % (CHUNK // ROWS)
        if REVERSED:
            chunk = chunks - 1 - chunk
        if step == 0:
            # in 16 bits the table of one chunk, but not the sum of all: its rounding would not average out
            found = product(matrix, (total * up).to(matrix.dtype), found, PRECISION, EMULATED)
            total = tl.zeros((TALL, CHANNELS), tl.float32)
            spot = ((chunk * problems + problem) * (D * GP) + line)[:, None] * channels + channel[None, :]
            tl.store(out + spot, (found * down).to(out.dtype.element_ty), mask=inside)
        n = chunk * CHUNK + step * ROWS + tl.arange(0, ROWS)
        at = (problem * D + own) * length + n[None, None, :]
        rows_at = rows + (problem * length + n)[:, None] * channels + channel[None, :]
        if EVEN:
            row = tl.load(rows_at)
            place = tl.load(places + at)
        else:
            row = tl.load(rows_at, mask=(n < length)[:, None] & (channel < channels)[None, :], other=0.0)
            place = tl.load(places + at, mask=(n < length)[None, None, :], other=0)
        if HATS:
            if EVEN:
                second = tl.load(seconds + at)
            else:
                second = tl.load(seconds + at, mask=(n < length)[None, None, :], other=0)
            weight = ramp(place, tl.load(shifts + node), FAST)
            weight -= ramp(second, tl.load(shifts + node + 1), FAST)
        else:
            weight = ramp(place, tl.load(shifts + GP + 2 + node), FAST)
        weight = tl.reshape(weight, (TALL, ROWS))
        total = product(weight, row, total, PRECISION, EMULATED)


@triton.jit
def levels_kernel(
    counts,
    seconds,
    whole,
    phi,
    normaliser,
    chunks,
    problems,
    D: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHANGES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """`normaliser (chunks, P, D, GP, 2)`: at BLOCK of the nodes what the weights of all keys before a chunk give.

    F at a node, and F at the next one, or with CHANGES the change. `counts` and `seconds (chunks, P, D, GP)` are sums
    of ramps of every chunk, `whole (chunks, P)` the keys before a chunk that count, where not all do (MASKED).
    """
    at = tl.program_id(0).to(tl.int64)
    i, j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, GP)
    # transposed
    matrix = phi + at * GP * GP + j[:, None]
    here, there = tl.load(matrix + i[None, :] * GP), tl.load(matrix + tl.minimum(i + 1, G - 1)[None, :] * GP)
    if CHANGES:
        there -= here
    carried = tl.zeros((GP,), tl.float32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        line = chunk.to(tl.int64)[:, None] * problems * D + at
        known = (chunk < chunks)[:, None]
        # all ramps before the first node are one: they are counted as `whole`
        number = tl.load(counts + line * GP + j[None, :] - 1, mask=known & ((j > 0) & (j < G))[None, :], other=0.0)
        number -= tl.load(seconds + line * GP + j[None, :], mask=known & (j < G - 1)[None, :], other=0.0)
        before = tl.cumsum(number, 0) - number + carried[None, :]
        carried += tl.sum(number, 0)
        if MASKED:
            all_before = tl.load(whole + chunk * problems + at // D, mask=chunk < chunks, other=0.0)
        else:
            all_before = (chunk * CHUNK).to(tl.float32)
        before += tl.where(j == 0, 1.0, 0.0)[None, :] * all_before[:, None]
        pair = normaliser + (line * GP + i[None, :]) * 2
        tl.store(pair, tl.dot(before, here, input_precision="tf32x3"), mask=known)
        tl.store(pair + 1, tl.dot(before, there, input_precision="tf32x3"), mask=known)


def walk_chunks(
    grid: Grid,
    places: Places,
    rows: Tensor,
    phi: Tensor,
    phi_largest: Tensor,
    chunk: int,
    changes: bool = False,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """What is read in every chunk of the points before it, `(chunks, P, D, GP, C)`, and its `unscale (P)`.

    In `reverse` of those behind it; `phi` is then transposed. With `changes` those of F from node to node.
    """
    problems, length, channels = rows.shape
    padded, narrow = grid.layout.padded, grid.layout.narrow
    kind = grid.layout.table_type
    bends = empty(*phi.shape, dtype=kind, device=phi.device)
    factors, unscale = (empty(problems, *shape, device=phi.device) for shape in ((2,), ()))
    parts = min(_PARTS, length)
    largest = empty(problems, parts, device=phi.device)
    quick(largest_kernel, grid.launches)[(parts, problems)](rows, largest, length * channels, SIZE=4096)
    quick(bends_kernel, grid.launches)[(problems * grid.dims,)](
        phi,
        phi_largest,
        largest,
        bends,
        factors,
        unscale,
        length,
        parts,
        D=grid.dims,
        CHUNK=chunk,
        G=grid.layout.count,
        GP=padded,
        PARTS=power_of_two(parts),
        HATS=grid.hats,
        CHANGES=changes,
        SCALED=narrow,
        num_warps=8 if padded > 32 else 4,
    )
    together = max(1, (_BLOCK[0] if narrow else 32) // padded)
    wide = channel_block(channels)
    tall = _BLOCK[1] if narrow else 32
    tall = min(tall, chunk)
    chunks = math.ceil(length / chunk)
    out = empty(chunks, problems, grid.dims, padded, channels, dtype=kind, device=rows.device)
    quick(walk_kernel, grid.launches)[(count_blocks(grid.dims, together) * count_blocks(channels, wide), problems)](
        places.first,
        places.second,
        grid.shifts(places.first),
        rows,
        bends,
        factors,
        out,
        length,
        chunks,
        channels,
        D=grid.dims,
        GP=padded,
        TOGETHER=together,
        CHUNK=chunk,
        ROWS=tall,
        CHANNELS=wide,
        EVEN=length % chunk == 0 and channels % wide == 0,
        HATS=grid.hats,
        REVERSED=reverse,
        num_warps=_BLOCK[2],
        num_stages=_BLOCK[3],
        FAST=FAST,
        **grid.layout.precision,
    )
    return out, unscale


def levels(
    grid: Grid, counts: Tensor, seconds: Tensor, whole: Tensor | None, phi: Tensor, chunk: int, changes: bool = False
) -> Tensor:
    """The normaliser of every chunk, `(chunks, P, D, GP, 2)`."""
    chunks, problems = counts.shape[:2]
    padded = grid.layout.padded
    # larger matrices do not fit into shared memory
    block = min(padded, 32)
    normaliser = empty(*counts.shape, 2, device=counts.device)
    if grid.formula.riesz and changes:
        quick(riesz_levels_kernel, grid.launches)[(problems * grid.dims,)](
            counts,
            counts if whole is None else whole,
            grid.nodes,
            grid.stats,
            grid.bandwidth,
            grid.formula.kinks,
            normaliser,
            grid.formula.jumps,
            RIESZ_EPSILON,
            chunks,
            problems,
            D=grid.dims,
            G=grid.layout.count,
            GP=padded,
            CHUNK=chunk,
            CHUNKS=16,
            MASKED=whole is not None,
            num_warps=1,
        )
        return normaliser
    quick(levels_kernel, grid.launches)[(problems * grid.dims, padded // block)](
        counts,
        seconds,
        counts if whole is None else whole,
        phi,
        normaliser,
        chunks,
        problems,
        D=grid.dims,
        G=grid.layout.count,
        GP=padded,
        BLOCK=block,
        CHUNK=chunk,
        CHUNKS=16,
        CHANGES=changes,
        MASKED=whole is not None,
        num_warps=2,
    )
    return normaliser
