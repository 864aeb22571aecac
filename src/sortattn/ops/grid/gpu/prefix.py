"""From nodes to nodes in a causal call: what the keys before every chunk have left becomes what its queries read."""

import triton
import triton.language as tl


@triton.jit
def prefix_kernel(
    table,
    counts,
    seconds,
    whole,
    phi,
    phi_largest,
    largest,
    out,
    normaliser,
    unscale,
    chunks,
    problems,
    channels,
    D: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    HATS: tl.constexpr,
    MASKED: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """From `table (chunks, P, D, GP, C)` of ramps, or of HATS, to `out` of the same shape, for one dimension.

    Of a chunk, `out` holds what the keys of all chunks before give, as that of `transform_kernel`: F at the nodes with
    HATS, otherwise its changes, and in the last row F at the first node. `normaliser (chunks, P, D, GP, 2)` is the same
    for the sums of the weights, from `counts` and `seconds (chunks, P, D, GP)`, and `whole (chunks, P)`, the number of
    keys before a chunk that count, where not all do (MASKED).
    """
    at = tl.program_id(0).to(tl.int64)
    problem = at // D
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    has = channel < channels
    size = tl.load(phi_largest + problem).to(tl.float32, bitcast=True)
    size *= tl.load(largest + problem).to(tl.float32, bitcast=True) * chunks * (2.0 * GP)
    if SCALED:
        scale = tl.exp2(tl.floor(14.0 - tl.log2(tl.maximum(size, 1e-30))))
    else:
        scale = 1.0 + 0.0 * size
    # infinities and NaN
    scale = tl.where(size < float("inf"), scale, float("nan"))
    i, j = tl.arange(0, GP), tl.arange(0, GP)
    matrix = phi + at * GP * GP
    here = tl.load(matrix + i[:, None] * GP + j[None, :])
    there = tl.load(matrix + tl.minimum(i + 1, G - 1)[:, None] * GP + j[None, :])
    if HATS:
        change = here
    else:
        first = tl.load(matrix + j)[None, :]
        change = tl.where((i == GP - 1)[:, None], first, there - here)
    before = tl.where(j > 0, j - 1, GP - 1)
    rows = (i < G) | (i == GP - 1)
    running = tl.zeros((GP, CHANNELS), tl.float32)
    number = tl.zeros((GP,), tl.float32)
    line = at
    for chunk in range(0, chunks):
        found = tl.dot(change, running, input_precision=PRECISION) * scale
        spot = (line * GP + i)[:, None] * channels + channel[None, :]
        tl.store(out + spot, tl.where(rows[:, None], found, 0.0).to(out.dtype.element_ty), mask=has[None, :])
        if tl.program_id(1) == 0:
            known = number
            if MASKED:
                known += tl.where(j == 0, tl.load(whole + chunk * problems + problem), 0.0)
            else:
                known += tl.where(j == 0, chunk * CHUNK * 1.0, 0.0)
            level, other = tl.sum(here * known[None, :], 1), tl.sum(there * known[None, :], 1)
            pair = normaliser + (line * GP + i) * 2
            tl.store(pair, level)
            tl.store(pair + 1, other if HATS else other - level)
        rows_at = table + line * GP * channels + channel[None, :]
        inside = (j < G)[:, None] & has[None, :]
        if HATS:
            running += tl.load(rows_at + j[:, None] * channels, mask=inside, other=0.0)
        else:
            running += tl.load(rows_at + before[:, None] * channels, mask=inside, other=0.0)
            inner = (j < G - 1)[:, None] & has[None, :]
            running -= tl.load(rows_at + j[:, None] * channels, mask=inner, other=0.0)
        # all ramps at the first node are one: they are counted as `whole`
        number += tl.load(counts + line * GP + before, mask=(j > 0) & (j < G), other=0.0)
        number -= tl.load(seconds + line * GP + j, mask=j < G - 1, other=0.0)
        line += problems * D
    if (tl.program_id(1) == 0) & (at % D == 0):
        tl.store(unscale + problem, 1.0 / scale)
