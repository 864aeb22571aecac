"""Inside a chunk of a causal call: the definition, pair by pair, with the earlier points of the same chunk.

In float32; see `pairs` for 16 bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....cuda.constants import kept
from ....kernels import RIESZ_EPSILON
from .grid import Grid
from .launch import quick
from .layout import LINE, channel_block, count_blocks, power_of_two, registers
from .matrix import exponential, spline
from .pairs import QUERIES, pairs_kernel, reach
from .record import empty
from .tables import Causal

# queries and keys of a block, and warps
_BLOCK = (64, 64, 4)
# queries of a block in 16 bits
_TALL = 64


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
    tiles,
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
    FAR: tl.constexpr,
    WHOLE: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """What `key (P, seen, D)` of a chunk gives its `query (P, GROUP * length, D)`.

    `queries` and `keys` are the lines of the same points, see `Places`. Query m of a head has the place `m + offset`
    among the keys and sees those up to there; `first` is the first of `tiles` blocks of places. To `out (P, GROUP *
    length, C)` go the sums of `rows (P, seen, C)`, to `totals (P, GROUP * length)` the sums of the weights.

    FAR: those heads that `pairs_kernel` leaves out, without lines.
    """
    problem = tl.program_id(1).to(tl.int64)
    parts = tl.cdiv(channels, CHANNELS)
    head, part = tl.program_id(2) // parts, tl.program_id(2) % parts
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    has = channel < channels
    tau = tl.load(bandwidth + problem)
    if FAR:
        _, near = reach(nodes, problem, tau, D, DIMS, G, GP, WHOLE)
        tiles = tl.where(near, 0, tiles)
    for tile in range(first + tl.program_id(0), first + tiles, tl.num_programs(0)):
        place = tile * ROWS + tl.arange(0, ROWS)
        own = place - offset
        here = (own >= 0) & (own < length)
        m = head * length + tl.minimum(tl.maximum(own, 0), length - 1)
        at = problem * GROUP * length + m
        # places before all keys see nothing
        start = tl.maximum(tile * ROWS // CHUNK * CHUNK, 0)
        stop = tl.minimum((tile + 1) * ROWS, seen)
        found = tl.zeros((ROWS, CHANNELS), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        if KIND == "riesz":
            size = _size(query, at, tau, here, D)
        for n0 in range(start, stop, KEYS):
            n = n0 + tl.arange(0, KEYS)
            # a product of nothing: sums then lie in registers as those of tensor cores, with few loads for many pairs
            left = tl.load(zeros + tl.arange(0, ROWS)[:, None] * 16 + tl.arange(0, 16)[None, :])
            right = tl.load(zeros + tl.arange(0, 16)[:, None] * KEYS + tl.arange(0, KEYS)[None, :])
            sums = tl.dot(left.to(tl.float32), right.to(tl.float32)) if EMULATED else tl.dot(left, right)
            if not FAR:
                query_block = problem * tl.cdiv(GROUP * length, LINE) + m // LINE
                query_at = queries + (query_block * (D * LINE) + m % LINE)[:, None]
                key_block = problem * tl.cdiv(seen, LINE) + n0 // LINE
                key_at = keys + key_block * (D * LINE) + tl.multiple_of(n0 % LINE, KEYS) + tl.arange(0, KEYS)[None, :]
                for _ in range(0, D, UNROLL):
                    for step in tl.static_range(UNROLL):
                        s, t = tl.load(query_at + step * LINE), tl.load(key_at + step * LINE)
                        sums = _add_pair(sums, s, t, numbers, count, KIND)
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


@kept
def _zeros(device: torch.device) -> Tensor:
    """What `near_kernel` begins with."""
    return torch.zeros(16 * 64, dtype=torch.float16, device="cpu").to(device)


def sum_near(
    grid: Grid,
    query: Tensor,
    key: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    rows: Tensor,
    weight: Tensor | None,
    group: int,
    chunk: int,
) -> Causal:
    """What keys `(P, N, D)` with `rows (P, N, C)` give the queries `(P, group * M, D)` of their own chunk.

    `queries` and `keys` are their lines, see `locate`, or None where the points themselves are taken.
    """
    problems, seen, channels = rows.shape
    length = query.shape[1] // group
    out = empty(problems, group * length, channels, device=rows.device)
    totals = empty(problems, group * length, device=rows.device)
    found = Causal(out, totals, seen - length, seen, chunk)
    queries, keys = (query, key) if queries is None else (queries, keys)
    wide = channel_block(channels)
    counted = totals if weight is None else weight
    last = (RIESZ_EPSILON, length, seen, found.offset)
    constants = {
        "D": grid.dims,
        "DIMS": power_of_two(grid.dims),
        "G": grid.layout.count,
        "GP": grid.layout.padded,
        "GROUP": group,
        "CHUNK": chunk,
        "CHANNELS": wide,
        "KIND": grid.formula.kind,
        "WHOLE": grid.whole,
        "MASKED": weight is not None,
    }
    if grid.halves:
        tall = min(_TALL, chunk)
        programs = (found.tiles(tall), problems, group * count_blocks(channels, wide))
        quick(pairs_kernel, grid.launches)[programs](
            queries,
            keys,
            grid.nodes,
            grid.bandwidth,
            rows,
            counted,
            out,
            totals,
            *last,
            found.first(tall),
            channels,
            **constants,
            ROWS=tall,
            EVEN=seen % tall == 0,
            PRECISION=grid.layout.precision["PRECISION"],
            num_warps=tall // QUERIES,
            **registers(168),
            num_stages=1,
        )
    tall, keys_together, warps = _BLOCK
    tall, keys_together = min(tall, chunk), min(keys_together, chunk)
    tiles = found.tiles(tall)
    # few programs where most heads have been summed
    programs = min(tiles, 8) if grid.halves else tiles
    quick(near_kernel, grid.launches)[(programs, problems, group * count_blocks(channels, wide))](
        query,
        key,
        queries,
        keys,
        grid.nodes,
        grid.bandwidth,
        rows,
        counted,
        grid.formula.numbers,
        _zeros(rows.device),
        out,
        totals,
        grid.formula.count,
        *last,
        found.first(tall),
        tiles,
        channels,
        **constants,
        ROWS=tall,
        KEYS=keys_together,
        # loads in a row
        UNROLL=8 if grid.dims % 8 == 0 else 1,
        LINE=LINE,
        # of the heads in float16 those that are too far out for it
        FAR=grid.halves,
        num_warps=warps,
        # three blocks a multiprocessor
        **registers(168),
        **grid.layout.precision,
    )
    return found
