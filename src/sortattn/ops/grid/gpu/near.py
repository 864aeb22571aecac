"""Inside a chunk of a causal call: the definition, pair by pair, with the earlier points of the same chunk."""

import triton
import triton.language as tl

from .matrix import exponential, spline


@triton.jit
def _add_pair(total, u, numbers, count, KIND: tl.constexpr):
    """`total` and the kernel of one dimension at `u`; of add_riesz the part that is not separable."""
    if KIND == "riesz":
        return total - tl.abs(u)
    elif KIND == "bump":
        return total + tl.maximum(1 - tl.abs(u), 0.0)
    elif KIND == "laplace":
        return total + tl.exp(-tl.abs(u))
    elif KIND == "exponential":
        return total + exponential(u, numbers, count)
    else:
        return total + spline(u, numbers, count)


@triton.jit
def near_kernel(
    queries,
    keys,
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
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UNROLL: tl.constexpr,
    CHANNELS: tl.constexpr,
    EVEN: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What `keys (P, D, seen)` of a chunk give its `queries (P, D, GROUP * length)`, both divided by the bandwidth.

    Query m of a head has the place `m + offset` among the keys and sees those up to there; `first` is the first block
    of such places. To `out (P, GROUP * length,
    C)` the sums of `rows (P, seen, C)`, to `totals (P, GROUP * length)` those of the weights. EVEN: blocks of keys are
    whole.
    """
    problem = tl.program_id(1).to(tl.int64)
    parts = tl.cdiv(channels, CHANNELS)
    head, part = tl.program_id(2) // parts, tl.program_id(2) % parts
    tile = first + tl.program_id(0)
    place = tile * ROWS + tl.arange(0, ROWS)
    own = place - offset
    here = (own >= 0) & (own < length)
    m = head * length + tl.minimum(tl.maximum(own, 0), length - 1)
    channel = part * CHANNELS + tl.arange(0, CHANNELS)
    has = channel < channels
    found = tl.zeros((ROWS, CHANNELS), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    # places before all keys see nothing
    start = tl.maximum(tile * ROWS // CHUNK * CHUNK, 0)
    stop = tl.minimum((tile + 1) * ROWS, seen)
    for n0 in range(start, stop, KEYS):
        n = n0 + tl.arange(0, KEYS)
        query_at = queries + problem * D * GROUP * length + m[:, None]
        key_at = keys + problem * D * seen + (n if EVEN else tl.minimum(n, seen - 1))[None, :]
        # loaded, so that a thread has four keys of some queries: as many columns as rows, and fewer loads than pairs
        sums = tl.load(zeros + tl.arange(0, ROWS)[:, None] * KEYS + tl.arange(0, KEYS)[None, :])
        if KIND == "riesz":
            sizes, others = tl.zeros((ROWS, 1), tl.float32), tl.zeros((1, KEYS), tl.float32)
        for d0 in range(0, D, UNROLL):
            for step in tl.static_range(UNROLL):
                s, t = tl.load(query_at + step * GROUP * length), tl.load(key_at + step * seen)
                sums = _add_pair(sums, s - t, numbers, count, KIND)
                if KIND == "riesz":
                    sizes += tl.abs(s)
                    others += tl.abs(t)
            query_at += UNROLL * GROUP * length
            key_at += UNROLL * seen
        if KIND == "riesz":
            sums += sizes + others + D * epsilon
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
    at = problem * GROUP * length + m
    tl.store(out + at[:, None] * channels + channel[None, :], found, mask=here[:, None] & has[None, :])
    tl.store(totals + at, total, mask=here)
