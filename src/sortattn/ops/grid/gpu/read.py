"""From nodes to points: weights times tables on tensor cores, summed over the dimensions, and normalised."""

import triton
import triton.language as tl

from .grid import Grid
from .language import factor_of, factored_ramp, load_pair, product, ramp, split_place, unit
from .launch import quick
from .layout import FAST
from .lookup import look_up
from .tables import Output, Places, Readable


@triton.jit
def _weights_seen(places, seconds, pairs, line, m, length, HATS: tl.constexpr):
    """Of one dimension, the sum of the weights that points m see, float32: its cell looked up."""
    at = line * length + tl.minimum(m, length - 1)
    place = tl.load(places + at)
    cell, share = split_place(place)
    level, next_ = load_pair(pairs, cell)
    if HATS:
        other, rest = split_place(tl.load(seconds + at))
        # rounded up to one, a share is in the next cell
        below = 1 - rest - (other - cell).to(tl.float32)
        return below * level + share * next_
    elif place.dtype == tl.int32:
        return (level + share * next_) * (factor_of(place, 9).to(tl.float32) * 2.0**-15)
    else:
        return level + share * next_


@triton.jit
def read_kernel(
    places,
    seconds,
    shifts,
    table,
    base,
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
    BLOCK: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    HATS: tl.constexpr,
    NORMALISE: tl.constexpr,
    COUNT: tl.constexpr,
    PRECISION: tl.constexpr,
    EMULATED: tl.constexpr,
    FAST: tl.constexpr,
):
    """`out (P, length, C)` from what `transform_kernel` made, for a block of points of one head.

    With COUNT the sums of the weights go to `totals (P, length)`, by which NORMALISE divides; where there are none the
    output is zero, and NaN where a flag of `flags (P * GROUP)` or `key_flags (P)` is raised.

    With a CHUNK the call is causal: point m of a head, which has `rows` of them, has the place `m + offset` among the
    keys, of which `start_tile` is the first block; tables and normaliser are those of its chunk as `walk_kernel` made
    them, and what `near_kernel` found, `near (P, length, C)` and `near_totals (P, length)`, is added.
    """
    problem = tl.program_id(1).to(tl.int64)
    parts = tl.cdiv(channels, CHANNELS)
    channel = tl.program_id(2) % parts * CHANNELS + tl.arange(0, CHANNELS)
    has = channel < channels
    lines = problem * D
    if CHUNK:
        tile = start_tile + tl.program_id(0)
        index = tile * ROWS + tl.arange(0, ROWS) - offset
        here = (index >= 0) & (index < rows)
        m = tl.program_id(2) // parts * rows + (index if EVEN else tl.minimum(tl.maximum(index, 0), rows - 1))
        # places before all keys see nothing
        chunk = tl.maximum(tile * ROWS // CHUNK, 0)
        lines += chunk.to(tl.int64) * tl.num_programs(1) * D
    else:
        m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        here = m < length
    total = tl.zeros((ROWS,), tl.float32)
    found = tl.zeros((ROWS, CHANNELS), tl.float32)
    # also of the first chunk, though no key is before it: with a number of steps that is not a constant, NVIDIA's
    # compiler would wait for every product
    for first in range(0, D * (GP // BLOCK), TOGETHER):
        line = first * BLOCK + tl.arange(0, TOGETHER * BLOCK)
        spot = table + (lines * GP + line)[:, None] * channels + channel[None, :]
        block = first + tl.arange(0, TOGETHER)[None, :, None]
        node = tl.arange(0, BLOCK)[None, None, :]
        if GP > BLOCK:
            node += block % (GP // BLOCK) * BLOCK
        if EVEN:
            values = tl.load(spot)
            at = (problem * D + block // (GP // BLOCK)) * length + m[:, None, None]
            place = tl.load(places + at)
        else:
            values = tl.load(spot, mask=(line < D * GP)[:, None] & has[None, :], other=0.0)
            own = tl.minimum(block // (GP // BLOCK), D - 1)
            at = (problem * D + own) * length + tl.minimum(m, length - 1)[:, None, None]
            place = tl.load(places + at)
        if HATS:
            weight = ramp(place, tl.load(shifts + node), FAST)
            weight -= ramp(tl.load(seconds + at), tl.load(shifts + node + 1), FAST)
        elif place.dtype == tl.int32:
            weight = factored_ramp(place, tl.load(shifts + GP + 2 + node), 9, FAST)
        elif CHUNK:
            # the last ramp is one everywhere, and what it multiplies is F at the first node
            weight = ramp(place, tl.load(shifts + GP + 2 + node), FAST)
        else:
            weight = ramp(place, tl.load(shifts + node + 1), FAST)
        weight = tl.reshape(weight, (ROWS, TOGETHER * BLOCK))
        found = product(weight, values, found, PRECISION, EMULATED)
        if COUNT:
            for turn in tl.static_range(TOGETHER):
                dim = (first + turn) // (GP // BLOCK)
                dim_ = tl.minimum(dim, D - 1)
                pairs = normaliser + (lines + dim_) * (GP * 2)
                number = _weights_seen(places, seconds, pairs, problem * D + dim_, m, length, HATS)
                # once for every dimension, though it may have several blocks
                once = ((first + turn) % (GP // BLOCK) == 0) & (dim < D)
                total += tl.where(once, number, 0.0)
    found *= tl.load(unscale + problem) * unit(places)
    if CHUNK:
        at = problem * length + m
        spot = near + at[:, None] * channels + channel[None, :]
        found += tl.load(spot, mask=here[:, None] & has[None, :], other=0.0)
        total += tl.load(near_totals + at, mask=here, other=0.0)
    elif not HATS and places.dtype.element_ty != tl.int32:
        start = tl.zeros((CHANNELS,), tl.float32)
        for d0 in range(0, D, 16):
            d = d0 + tl.arange(0, 16)
            part = tl.load(
                base + (problem * D + d)[:, None] * channels + channel[None, :],
                mask=(d < D)[:, None] & has[None, :],
                other=0.0,
            )
            start += tl.sum(part, 0)
        found += start[None, :]
    if COUNT:
        tl.store(totals + problem * length + m, total, mask=here)
    if NORMALISE:
        empty = tl.abs(total) < 1.1754943508222875e-38
        found = tl.where(empty[:, None], 0.0, found / tl.where(empty, 1.0, total)[:, None])
    flag = tl.load(flags + problem * GROUP + tl.minimum(m // rows, GROUP - 1)) + tl.load(key_flags + problem)
    found = tl.where((flag > 0)[:, None], float("nan"), found)
    spot = out + (problem * length + m)[:, None] * channels + channel[None, :]
    tl.store(spot, found.to(out.dtype.element_ty), mask=here[:, None] & has[None, :])


def read(grid: Grid, places: Places, tables: Readable, output: Output) -> None:
    """The sums at the places, to the output."""
    way = look_up if grid.looks_up else _multiply
    way(grid, places, tables, output)


def _multiply(grid: Grid, places: Places, tables: Readable, output: Output) -> None:
    padded, block = grid.layout.padded, grid.layout.block
    together = max(1, 64 // block)
    tall = _tall(grid, places)
    programs, arguments, constants = output.arranged(tall)
    constants["EVEN"] = constants["EVEN"] and grid.dims * padded // block % together == 0
    quick(read_kernel, grid.launches)[programs](
        places.first,
        places.second,
        grid.shifts(places.first),
        tables.rows,
        tables.base,
        tables.normaliser,
        tables.unscale,
        *arguments,
        D=grid.dims,
        GP=padded,
        BLOCK=block,
        TOGETHER=together,
        HATS=grid.hats,
        num_warps=4,
        num_stages=3,
        **constants,
        FAST=FAST,
        **grid.layout.precision,
    )


def _tall(grid: Grid, places: Places) -> int:
    """How many points a program takes: as measured on one H200."""
    if not grid.layout.narrow:
        return 64
    block = grid.layout.block
    return 256 if not grid.hats and (block == 64 or (places.codes and block == 32)) else 128
