"""From nodes to points by looking up: a point takes the two rows of its cell, in every dimension."""

import triton
import triton.language as tl

from .grid import Grid
from .language import split_place
from .launch import quick
from .tables import Output, Places, Readable

# points of a block, warps, and dimensions in a row
_BLOCK = (32, 4, 4)


@triton.jit
def lookup_kernel(
    places,
    seconds,
    table,
    normaliser,
    unscale,
    flags,
    key_flags,
    out,
    totals,
    near,
    near_totals,
    length,
    rows,
    offset,
    start_tile,
    channels,
    D: tl.constexpr,
    GP: tl.constexpr,
    UNROLL: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPONENTIAL: tl.constexpr,
    NORMALISE: tl.constexpr,
    COUNT: tl.constexpr,
):
    """`out (P, length, C)` from `table (P, D, GP, C)`, what the nodes give, for a block of points of one head.

    With COUNT the sums of the weights, from `normaliser (P, D, GP, 2)`, go to `totals (P, length)`, by which NORMALISE
    divides; where there are none the output is zero, and NaN where a flag of `flags (P * GROUP)` or `key_flags (P)` is
    raised.

    With a CHUNK the call is causal: point m of a head, which has `rows` of them, has the place `m + offset` among the
    keys, of which `start_tile` is the first block; tables and normaliser are those of its chunk, and what `near_kernel`
    found, `near (P, length, C)` and `near_totals (P, length)`, is added.
    """
    problem = tl.program_id(1).to(tl.int64)
    parts = tl.cdiv(channels, CHANNELS)
    channel = tl.program_id(2) % parts * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    has = channel < channels
    lines = problem * D
    if CHUNK:
        tile = start_tile + tl.program_id(0)
        index = tile * ROWS + tl.arange(0, ROWS)[:, None] - offset
        here = (index >= 0) & (index < rows)
        m = tl.program_id(2) // parts * rows + (index if EVEN else tl.minimum(tl.maximum(index, 0), rows - 1))
        # places before all keys see nothing
        chunk = tl.maximum(tile * ROWS // CHUNK, 0)
        lines += chunk.to(tl.int64) * tl.num_programs(1) * D
    else:
        index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
        here = index < length
        m = index if EVEN else tl.minimum(index, length - 1)
    found = tl.zeros((ROWS, CHANNELS), tl.float32)
    total = tl.zeros((ROWS, 1), tl.float32)
    places_at, seconds_at = places + problem * D * length + m, seconds + problem * D * length + m
    rows_at, weights_at = table + lines * GP * channels + channel, normaliser + lines * GP * 2
    for _ in range(0, D, UNROLL):
        # a few dimensions in the type of the table: two numbers at a time, and fewer conversions
        some = tl.zeros((ROWS, CHANNELS), table.dtype.element_ty)
        for step in tl.static_range(UNROLL):
            cell, above = split_place(tl.load(places_at + step * length))
            if EXPONENTIAL:
                other, rest = split_place(tl.load(seconds_at + step * length))
                # rounded up to one, a share is in the next cell
                below = 1 - rest - (other - cell).to(tl.float32)
            else:
                below = 1 - above
            node = cell + step * GP
            spot = rows_at + node * channels
            if EVEN:
                low, high = tl.load(spot), tl.load(spot + channels)
            else:
                low, high = tl.load(spot, mask=has, other=0.0), tl.load(spot + channels, mask=has, other=0.0)
            some = tl.fma(above.to(low.dtype), high, tl.fma(below.to(low.dtype), low, some))
            if COUNT:
                total += below * tl.load(weights_at + node * 2) + above * tl.load(weights_at + node * 2 + 1)
        found += some.to(tl.float32)
        places_at += UNROLL * length
        seconds_at += UNROLL * length
        rows_at += UNROLL * GP * channels
        weights_at += UNROLL * GP * 2
    found *= tl.load(unscale + problem)
    at = problem * length + m
    spot = at * channels + channel
    if CHUNK:
        found += tl.load(near + spot, mask=here & has, other=0.0)
        total += tl.load(near_totals + at, mask=here, other=0.0)
    if COUNT:
        tl.store(totals + at, total, mask=here)
    if NORMALISE:
        empty = tl.abs(total) < 1.1754943508222875e-38
        found = tl.where(empty, 0.0, found / tl.where(empty, 1.0, total))
    flag = tl.load(flags + problem * GROUP + tl.minimum(m // rows, GROUP - 1)) + tl.load(key_flags + problem)
    found = tl.where(flag > 0, float("nan"), found)
    tl.store(out + spot, found.to(out.dtype.element_ty), mask=here & has)


def look_up(grid: Grid, places: Places, tables: Readable, output: Output) -> None:
    """What `read` does, for any number of nodes."""
    tall, warps, unroll = _BLOCK
    programs, arguments, constants = output.arranged(tall)
    quick(lookup_kernel, None)[programs](
        places.first,
        places.second,
        tables.rows,
        tables.normaliser,
        tables.unscale,
        *arguments,
        D=grid.dims,
        GP=grid.layout.padded,
        UNROLL=unroll if grid.dims % unroll == 0 else 1,
        EXPONENTIAL=grid.formula.exponential,
        num_warps=warps,
        **constants,
    )
