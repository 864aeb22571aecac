"""Inside a chunk of a causal call: the definition, pair by pair, with the earlier points of the same chunk."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels import RIESZ_EPSILON
from .grid import Grid
from .launch import quick
from .layout import LINE, channel_block, count_blocks, power_of_two, registers
from .matrix import exponential, spline
from .record import empty, keep
from .tables import Causal

# queries and keys of a block, and warps
_BLOCK = (64, 64, 4)


@triton.jit
def _add_pair(total, s, t, numbers, count, KIND: tl.constexpr):
    """`total` and the kernel of one dimension at `s - t`; of add_riesz `|s - t|` alone."""
    u = s - t
    if KIND == "riesz":
        return total + tl.abs(u)
    elif KIND == "bump":
        return total + tl.maximum(1 - tl.abs(u), 0.0)
    elif KIND == "laplace":
        return total + tl.exp(-tl.abs(u))
    elif KIND == "exponential":
        return total + exponential(u, numbers, count)
    else:
        return total + spline(u, numbers, count)


@triton.jit
def _add_four(total, s, t, KIND: tl.constexpr):
    """The same of four dimensions in float16, two in one instruction; of add_laplace for points times log2(e).

    `s` and `t` are the four numbers of a point, 64 bits; `total` is two sums, those of the even and the odd ones.
    """
    s, t = tl.broadcast(s, t)
    if KIND == "riesz":
        return tl.inline_asm_elementwise(
            "{.reg .b32 a, b, c, d; mov.b64 {a, b}, $1; mov.b64 {c, d}, $2; sub.f16x2 a, a, c; sub.f16x2 b, b, d; "
            "abs.f16x2 a, a; abs.f16x2 b, b; add.f16x2 a, $3, a; add.f16x2 $0, a, b;}",
            "=r,l,l,r",
            [s, t, total],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    elif KIND == "bump":
        return tl.inline_asm_elementwise(
            "{.reg .b32 a, b, c, d, one; mov.b32 one, 0x3C003C00; mov.b64 {a, b}, $1; mov.b64 {c, d}, $2; "
            "sub.f16x2 a, a, c; sub.f16x2 b, b, d; abs.f16x2 a, a; abs.f16x2 b, b; "
            "sub.sat.f16x2 a, one, a; sub.sat.f16x2 b, one, b; add.f16x2 a, $3, a; add.f16x2 $0, a, b;}",
            "=r,l,l,r",
            [s, t, total],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 a, b, c, d; mov.b64 {a, b}, $1; mov.b64 {c, d}, $2; sub.f16x2 a, a, c; sub.f16x2 b, b, d; "
            "abs.f16x2 a, a; abs.f16x2 b, b; neg.f16x2 a, a; neg.f16x2 b, b; "
            "ex2.approx.f16x2 a, a; ex2.approx.f16x2 b, b; add.f16x2 a, $3, a; add.f16x2 $0, a, b;}",
            "=r,l,l,r",
            [s, t, total],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _add_both(sums, few):
    """`sums` and both numbers of `few`, in float32."""
    return tl.inline_asm_elementwise(
        "{.reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, $2; cvt.f32.f16 a, l; cvt.f32.f16 b, h; "
        "add.f32 a, a, b; add.f32 $0, $1, a;}",
        "=r,r,r",
        [sums, few],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _nothing(sums):
    """Zeros in the registers of the sums: only the last compiler sees that this is a constant."""
    return ((sums.to(tl.uint32, bitcast=True) >> 31) >> 1).to(tl.int32)


@triton.jit
def _size(points, at, tau, inside, D: tl.constexpr):
    """`sum_d |x_d| / tau` of points, `at` in their tensor."""
    found = tl.zeros(at.shape, tl.float32)
    for d0 in range(0, D, 16):
        d = d0 + tl.arange(0, 16)
        x = tl.load(points + at[:, None] * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        found += tl.sum(tl.abs(x.to(tl.float32)), 1)
    return found / tau


@triton.jit
def near_kernel(
    query,
    key,
    queries,
    keys,
    nodes,
    bandwidth,
    rows,
    weight,
    numbers,
    zeros,
    out,
    totals,
    count,
    epsilon,
    length,
    seen,
    offset,
    first,
    channels,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UNROLL: tl.constexpr,
    CHANNELS: tl.constexpr,
    LINE: tl.constexpr,
    KIND: tl.constexpr,
    HALF: tl.constexpr,
    FAR: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """What `key (P, seen, D)` of a chunk gives its `query (P, GROUP * length, D)`.

    `queries` and `keys` are the lines of the same points, see `Places`. Query m of a head has the place `m + offset`
    among the keys and sees those up to there; `first` is the first block of places. To `out (P, GROUP * length, C)` go
    the sums of `rows (P, seen, C)`, to `totals (P, GROUP * length)` the sums of the weights.

    HALF: a few dimensions at a time are summed in float16, of heads of which no point is too far out for that, which
    the `nodes (P, D, GP)` tell. FAR: the other heads; by themselves, as both ways together need too many registers.
    """
    problem = tl.program_id(1).to(tl.int64)
    parts = tl.cdiv(channels, CHANNELS)
    head, part = tl.program_id(2) // parts, tl.program_id(2) % parts
    tile = first + tl.program_id(0)
    place = tile * ROWS + tl.arange(0, ROWS)
    own = place - offset
    here = (own >= 0) & (own < length)
    m = head * length + tl.minimum(tl.maximum(own, 0), length - 1)
    at = problem * GROUP * length + m
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    has = channel < channels
    tau = tl.load(bandwidth + problem)
    # places before all keys see nothing
    start = tl.maximum(tile * ROWS // CHUNK * CHUNK, 0)
    stop = tl.minimum((tile + 1) * ROWS, seen)
    if HALF or FAR:
        d = tl.arange(0, DIMS)
        line = nodes + (problem * D + tl.minimum(d, D - 1)) * GP
        far = tl.maximum(tl.abs(tl.load(line + 1)), tl.abs(tl.load(line + G - 2)))
        far = tl.max(far, 0) / tau
        # twice that, eight times, is a number in float16
        mine = far < 2048 if HALF else far >= 2048
        stop, here = tl.where(mine, stop, start), here & mine
    if HALF:
        queries, keys = queries.to(tl.pointer_type(tl.int64)), keys.to(tl.pointer_type(tl.int64))
        # a power of two, with which the sums of all dimensions are numbers in float16 too
        most = D * (2 * far + epsilon) if KIND == "riesz" else D * 1.0
        scale = tl.exp2(tl.floor(15.0 - tl.log2(tl.maximum(most, 1e-30))))
    found = tl.zeros((ROWS, CHANNELS), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if KIND == "riesz":
        size = _size(query, at, tau, here, D)
    for n0 in range(start, stop, KEYS):
        n = n0 + tl.arange(0, KEYS)
        # a product of nothing: the sums then lie in registers as those of tensor cores, with few loads for many pairs
        left = tl.load(zeros + tl.arange(0, ROWS)[:, None] * 16 + tl.arange(0, 16)[None, :])
        right = tl.load(zeros + tl.arange(0, 16)[:, None] * KEYS + tl.arange(0, KEYS)[None, :])
        sums = tl.dot(left.to(tl.float32), right.to(tl.float32)) if EMULATED else tl.dot(left, right)
        if not FAR:
            # of one dimension, or of four of them at once
            LINES: tl.constexpr = D // 4 if HALF else D
            query_block = problem * tl.cdiv(GROUP * length, LINE) + m // LINE
            query_at = queries + (query_block * (LINES * LINE) + m % LINE)[:, None]
            key_block = problem * tl.cdiv(seen, LINE) + n0 // LINE
            key_at = keys + key_block * (LINES * LINE) + tl.multiple_of(n0 % LINE, KEYS) + tl.arange(0, KEYS)[None, :]
            for _ in range(0, LINES, UNROLL):
                if HALF:
                    few = _nothing(sums)
                for step in tl.static_range(UNROLL):
                    s, t = tl.load(query_at + step * LINE), tl.load(key_at + step * LINE)
                    if HALF:
                        few = _add_four(few, s, t, KIND)
                    else:
                        sums = _add_pair(sums, s, t, numbers, count, KIND)
                if HALF:
                    sums = _add_both(sums, few)
                query_at += UNROLL * LINE
                key_at += UNROLL * LINE
        else:
            for d_ in range(0, D):
                s = tl.load(query + at[:, None] * D + d_).to(tl.float32) / tau
                t = tl.load(key + (problem * seen + tl.minimum(n, seen - 1))[None, :] * D + d_).to(tl.float32) / tau
                sums = _add_pair(sums, s, t, numbers, count, KIND)
        if KIND == "riesz":
            other = _size(key, problem * seen + n, tau, n < seen, D)
            sums = size[:, None] + other[None, :] + D * epsilon - sums
        allowed = n[None, :] <= place[:, None]
        if MASKED:
            counted = tl.load(weight + problem * seen + n, mask=n < seen, other=0.0)
            allowed = allowed & (counted > 0)[None, :]
        sums = tl.where(allowed, sums, 0.0)
        total += tl.sum(sums, 1)
        row = tl.load(
            rows + (problem * seen + n)[:, None] * channels + channel[None, :],
            mask=(n < seen)[:, None] & has[None, :],
            other=0.0,
        )
        if HALF and row.dtype == tl.float16:
            found = tl.dot((sums * scale).to(tl.float16), row, found)
        else:
            found = tl.dot(sums, row.to(tl.float32), found, input_precision=PRECISION)
    if HALF and rows.dtype.element_ty == tl.float16:
        found /= scale
    tl.store(out + at[:, None] * channels + channel[None, :], found, mask=here[:, None] & has[None, :])
    tl.store(totals + at, total, mask=here)


@functools.lru_cache(maxsize=64)
def _zeros(device: torch.device) -> Tensor:
    """What `near_kernel` begins with."""
    return keep(torch.zeros(16 * 64, dtype=torch.float16).to(device))


def sum_near(
    grid: Grid,
    query: Tensor,
    key: Tensor,
    queries: Tensor,
    keys: Tensor,
    rows: Tensor,
    weight: Tensor | None,
    group: int,
    chunk: int,
) -> Causal:
    """What keys `(P, N, D)` with `rows (P, N, C)` give the queries `(P, group * M, D)` of their own chunk.

    `queries` and `keys` are their lines, see `locate`.
    """
    problems, seen, channels = rows.shape
    length = query.shape[1] // group
    out = empty(problems, group * length, channels, device=rows.device)
    totals = empty(problems, group * length, device=rows.device)
    found = Causal(out, totals, seen - length, seen, chunk)
    tall, keys_together, warps = _BLOCK
    tall, keys_together = min(tall, chunk), min(keys_together, chunk)
    wide = channel_block(channels)
    arguments = (
        query,
        key,
        queries,
        keys,
        grid.nodes,
        grid.bandwidth,
        rows,
        totals if weight is None else weight,
        grid.formula.numbers,
        _zeros(rows.device),
        out,
        totals,
        grid.formula.count,
        RIESZ_EPSILON,
        length,
        seen,
        found.offset,
        found.first(tall),
        channels,
    )
    # heads in float16, and those that are too far out for it; or all of them
    for half, far in ((True, False), (False, True)) if grid.halves else ((False, False),):
        quick(near_kernel, grid.launches, far)[(found.tiles(tall), problems, group * count_blocks(channels, wide))](
            *arguments,
            D=grid.dims,
            DIMS=power_of_two(grid.dims),
            G=grid.layout.count,
            GP=grid.layout.padded,
            GROUP=group,
            CHUNK=chunk,
            ROWS=tall,
            KEYS=keys_together,
            # loads in a row: of four dimensions, eight or sixteen of which are summed in float16, or of one
            UNROLL=(4 if grid.dims % 16 == 0 else 2) if half else (8 if grid.dims % 8 == 0 else 1),
            CHANNELS=wide,
            LINE=LINE,
            KIND=grid.formula.kind,
            HALF=half,
            FAR=far,
            MASKED=weight is not None,
            num_warps=warps,
            # three blocks a multiprocessor
            **registers(168),
            **grid.layout.precision,
        )
    return found
