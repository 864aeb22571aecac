"""Inside a chunk of a causal call: the definition, pair by pair, with the earlier points of the same chunk."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....kernels import RIESZ_EPSILON
from .grid import Grid
from .layout import LINE, channel_block, count_blocks, power_of_two, registers
from .matrix import exponential, spline
from .tables import Causal

# queries and keys of a block, warps, and dimensions in a row
_BLOCK = (64, 64, 4, 8)


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
def _add_two_pairs(total, s, t, KIND: tl.constexpr):
    """The same in float16, two pairs in one instruction; of add_laplace for points that are multiplied with log2(e)."""
    s, t = tl.broadcast(s, t)
    if KIND == "riesz":
        return tl.inline_asm_elementwise(
            "{.reg .b32 u; sub.f16x2 u, $1, $2; abs.f16x2 u, u; add.f16x2 $0, $3, u;}",
            "=r,r,r,r",
            [s, t, total],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    elif KIND == "bump":
        return tl.inline_asm_elementwise(
            "{.reg .b32 u, one; mov.b32 one, 0x3C003C00; sub.f16x2 u, $1, $2; abs.f16x2 u, u; "
            "sub.sat.f16x2 u, one, u; add.f16x2 $0, $3, u;}",
            "=r,r,r,r",
            [s, t, total],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 u; sub.f16x2 u, $1, $2; abs.f16x2 u, u; neg.f16x2 u, u; "
            "ex2.approx.f16x2 u, u; add.f16x2 $0, $3, u;}",
            "=r,r,r,r",
            [s, t, total],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def _nothing(sums):
    """Zeros in float16, in the registers of the sums: only the last compiler sees that this is a constant."""
    bits = sums.to(tl.uint32, bitcast=True)
    return ((bits >> 31) >> 1).to(tl.uint16).to(tl.float16, bitcast=True)


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
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """What `key (P, seen, D)` of a chunk gives its `query (P, GROUP * length, D)`.

    `queries` and `keys (P, blocks, D, LINE)` are the same points, divided by the bandwidth. Query m of a head has the
    place `m + offset` among the keys and sees those up to there; `first` is the first block of places. To `out (P,
    GROUP * length, C)` go the sums of `rows (P, seen, C)`, to `totals (P, GROUP * length)` the sums of the weights.
    HALF: a few dimensions at a time are summed in float16, if no point is too far out for that, which the `nodes (P, D,
    GP)` tell.
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
    narrow = True
    if HALF:
        d = tl.arange(0, DIMS)
        line = nodes + (problem * D + tl.minimum(d, D - 1)) * GP
        far = tl.maximum(tl.abs(tl.load(line + 1)), tl.abs(tl.load(line + G - 2)))
        # twice that, UNROLL times, is a number in float16
        narrow = tl.max(far, 0) < 2048 * tau
    found = tl.zeros((ROWS, CHANNELS), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if KIND == "riesz":
        size = _size(query, at, tau, here, D)
    # places before all keys see nothing
    start = tl.maximum(tile * ROWS // CHUNK * CHUNK, 0)
    stop = tl.minimum((tile + 1) * ROWS, seen)
    for n0 in range(start, stop, KEYS):
        n = n0 + tl.arange(0, KEYS)
        # a product of nothing: the sums then lie in registers as those of tensor cores, with few loads for many pairs
        left = tl.load(zeros + tl.arange(0, ROWS)[:, None] * 16 + tl.arange(0, 16)[None, :])
        right = tl.load(zeros + tl.arange(0, 16)[:, None] * KEYS + tl.arange(0, KEYS)[None, :])
        sums = tl.dot(left.to(tl.float32), right.to(tl.float32)) if EMULATED else tl.dot(left, right)
        if narrow:
            query_block = problem * tl.cdiv(GROUP * length, LINE) + m // LINE
            query_at = queries + (query_block * (D * LINE) + m % LINE)[:, None]
            key_block = problem * tl.cdiv(seen, LINE) + n0 // LINE
            key_at = keys + key_block * (D * LINE) + tl.multiple_of(n0 % LINE, KEYS) + tl.arange(0, KEYS)[None, :]
            for _ in range(0, D, UNROLL):
                if HALF:
                    few = _nothing(sums)
                for step in tl.static_range(UNROLL):
                    s, t = tl.load(query_at + step * LINE), tl.load(key_at + step * LINE)
                    if HALF:
                        few = _add_two_pairs(few, s, t, KIND)
                    else:
                        sums = _add_pair(sums, s, t, numbers, count, KIND)
                if HALF:
                    sums += few.to(tl.float32)
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
        found = tl.dot(sums, row.to(tl.float32), found, input_precision=PRECISION)
    tl.store(out + at[:, None] * channels + channel[None, :], found, mask=here[:, None] & has[None, :])
    tl.store(totals + at, total, mask=here)


@functools.lru_cache(maxsize=64)
def _zeros(device: torch.device) -> Tensor:
    """What `near_kernel` begins with."""
    return torch.zeros(16 * 64, dtype=torch.float16, device=device)


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
    out = torch.empty(problems, group * length, channels, device=rows.device)
    totals = torch.empty(problems, group * length, device=rows.device)
    found = Causal(out, totals, seen - length, seen, chunk)
    tall, keys_together, warps, unroll = _BLOCK
    tall, keys_together = min(tall, chunk), min(keys_together, chunk)
    wide = channel_block(channels)
    near_kernel[(found.tiles(tall), problems, group * count_blocks(channels, wide))](
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
        D=grid.dims,
        DIMS=power_of_two(grid.dims),
        G=grid.layout.count,
        GP=grid.layout.padded,
        GROUP=group,
        CHUNK=chunk,
        ROWS=tall,
        KEYS=keys_together,
        UNROLL=unroll if grid.dims % unroll == 0 else 1,
        CHANNELS=wide,
        LINE=LINE,
        KIND=grid.formula.kind,
        HALF=grid.halves,
        MASKED=weight is not None,
        num_warps=warps,
        # three blocks a multiprocessor: the rare other way would have taken all registers
        **registers(168),
        **grid.layout.precision,
    )
    return found
