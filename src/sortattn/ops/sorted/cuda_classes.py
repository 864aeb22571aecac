"""Attention of 16-bit inputs on NVIDIA GPUs by classes of equal coordinates, see classes.cu.

Their lines are walked by fade.cu, relax.cu, spool.cu or ascend.cu.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...cuda import launch
from ...cuda.compile import Defines
from ...cuda.constants import kept
from ...kernels import Terms
from . import cuda_spool, room
from .lines import Bandwidth

CLASSES, RELAX, FADE, ASCEND, GATHER = (
    Path(__file__).with_name(f"{name}.cu") for name in ("classes", "relax", "fade", "ascend", "gather")
)
# points whose indices have 16 bits
_SHORT = 1 << 16
# threads of a block that counts, classes that it counts and points that it puts in order at a time
_THREADS, _ROOM, _STAGE = 1024, 16 << 10, 16 << 10
# points of a tile, as in classes.cu
_TILE = 64
# keys of a stretch and powers of a polynomial, at most, as in relax.cu
_KEYS, _POWERS = 32, 8
# rows of values and of sums on their way in a walk
VALUES, RING = 16, 8
# of a block that gathers: warps, and queries of each; blocks of a multiprocessor
WARPS, QUERIES, GATHERING = 8, 16, 2
# bytes of shared memory that blocks have apart from what is asked for, at most
_FIXED = 17 << 10
# channels of a warp, at most, and of one with tensor cores; words of values that a block looks at
_WIDEST, _TENSOR, _LOOK = 128, 64, 1 << 14
# how much room there is beside inputs and results, compared to the inputs in float32; and of that, for sums
_SPACE, _SHARE = 2, 0.7


class Plan(NamedTuple):
    """How much there is room for."""

    # heads whose points are counted and ordered at a time
    groups: list[slice]
    # rows for classes that are there at a time, and for how many heads at least
    rows: int
    together: int


def plan(query: Tensor, value: Tensor, terms: Terms) -> Plan | None:
    """By the sizes of a call alone, as the number of classes stays on the GPU; None, if there is no room."""
    (problems, number, dims), (_, count, channels) = query.shape, value.shape
    stride = _stride(channels)
    if terms.rate and terms.below.shape[1] > _POWERS:
        return None
    shared = room.device(query.device).shared
    if _shared(terms, _width(terms, stride), shared) > shared - _FIXED:
        return None
    most, key_most = min(number, cuda_spool.MOST), min(count, cuda_spool.MOST)
    points = dims * (2 * (_pitch(number) + _pitch(count) + most + key_most) + count * _entry(count).itemsize)
    space = max(room.WORKSPACE, 4 * problems * ((number + count) * dims + count * channels)) * _SPACE
    # a row of sixteen bits, and an extra number, beside what a walk leaves on its way
    rows = int((space * _SHARE - 4 * _notes(terms, stride, problems * dims, count, query.device)) / (2 * stride + 4))
    # where there is an exponential, those of keys are read as they are
    together = rows // (dims * (most + (0 if terms.rate else key_most)))
    if together < 1:
        return None
    return Plan(room.groups(problems, points, int(space * (1 - _SHARE))), rows, together)


@launch.foreseen
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    terms: Terms,
    bandwidth: Bandwidth,
    group: int,
    floor: float,
) -> Tensor:
    """Normalised sums `(P, M, C)` of queries `(P, group * M, D)`, NaN in heads that are not all finite."""
    query, key, value = (_aligned(part) for part in (query, key, value))
    problems, number, _ = query.shape
    out = torch.empty(problems, number, value.shape[2], dtype=query.dtype, device=query.device)
    planned = plan(query, value, terms)
    given = (query, key, value, weight, bandwidth, out)
    with launch.on(query.device):
        for some in planned.groups:
            parts = (part[some].contiguous() if isinstance(part, Tensor) else part for part in given)
            _attend(*parts, terms, group, floor, planned)
    return out


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bandwidth: Bandwidth,
    out: Tensor,
    terms: Terms,
    group: int,
    floor: float,
    planned: Plan,
) -> None:
    """The same for some heads, into `out`."""
    (heads, number, dims), (_, count, channels) = query.shape, value.shape
    lines, most, key_most = heads * dims, min(number, cuda_spool.MOST), min(count, cuda_spool.MOST)
    stride = _stride(channels)
    width = _width(terms, stride)
    parts = stride // width
    processors, _, shared, *_ = room.device(query.device)
    half = (("BFLOAT", int(query.dtype == torch.bfloat16)), ("LONG", int(count > _SHORT)))
    counting = (*half, ("THREADS", _THREADS))

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=query.device)

    unfit = torch.zeros(heads, group, dtype=torch.int32, device=query.device)
    values = torch.nn.functional.pad(value, (0, stride - channels)) if stride > channels else value
    words = count * stride // 2
    slices = math.ceil(words / _LOOK)
    launch.Kernel(CLASSES, "look", counting)((heads * slices,), 256, values, unfit, words, group, slices)

    def codes(points: Tensor, each: int) -> Tensor:
        found = empty(lines, _pitch(points.shape[1]), dtype=torch.int16)
        launch.Kernel(CLASSES, "spread", counting)(
            (heads * math.ceil(points.shape[1] / _TILE) * math.ceil(dims / _TILE),), 256, points, found, unfit,
            points.shape[1], dims, found.shape[1], group, each,
        )  # fmt: skip
        return found

    def lists(most: int) -> tuple[Tensor, Tensor]:
        """The classes of every line, and how many there are."""
        return empty(lines, most, dtype=torch.int16), empty(lines, dtype=torch.int32)

    macros = walking(terms, width, parts, shared)
    spool = windings = turned = None
    if cuda_spool.pitch_of(value, value.dtype, terms, bandwidth):
        spool = cuda_spool.Spool(query, key, values, weight, terms, bandwidth, half, macros)
        windings, turned = spool.windings, spool.turned

    # the numbers of their classes take the place of the codes
    ranks, (classes, counts) = codes(query, number // group), lists(most)
    launch.Kernel(CLASSES, "rank_classes", counting)(
        (lines,), _THREADS, ranks, classes, counts, windings, turned, number, ranks.shape[1], most
    )
    points, (key_classes, key_counts) = codes(key, 0), lists(key_most)
    entries = empty(lines, count, dtype=_entry(count))
    places, stage = (min(count, n) for n in (_ROOM, _STAGE))
    # less of both, where shared memory is small
    few = min(1.0, (shared - _FIXED) / (4 * places + stage * entries.element_size()))
    places, stage = int(few * places), int(few * stage)
    launch.Kernel(CLASSES, "arrange", counting)(
        (lines,), _THREADS, points, entries, key_classes, key_counts, windings, turned, count, points.shape[1],
        key_most, places, stage, shared=4 * places + stage * entries.element_size(),
    )  # fmt: skip
    del points
    rounds = math.ceil(heads / planned.together)
    capacity = min(planned.rows, lines * (most + (0 if terms.rate else key_most)))
    limits, offsets = empty(rounds + 1, dtype=torch.int32), empty(lines, dtype=torch.int64)
    key_offsets = None if terms.rate else empty(lines, dtype=torch.int64)
    crew, resident, _ = crew_of(terms, shared)
    wave = processors * (cuda_spool.RESIDENT if spool else resident)
    launch.Kernel(CLASSES, "divide_rounds", counting)(
        (1,), _THREADS, counts, None if terms.rate else key_counts, windings, offsets, key_offsets, limits, heads, dims,
        capacity, rounds, wave, planned.together,
    )  # fmt: skip
    table, extras = empty(capacity, stride, dtype=query.dtype), empty(capacity, dtype=torch.float32)
    blocks = min(lines, processors * resident)
    tau = bandwidth if isinstance(bandwidth, float) else 0.0
    keys, queries = (entries, key_classes), (classes, counts, offsets)
    given = limits, values, weight, _table(terms, query.device), None if tau else bandwidth, tau
    if terms.rate:
        source, entry, others = *walk_of(terms), ("WEIGHED", int(weight is not None))
        notes = empty(_notes(terms, stride, lines, count, query.device), dtype=torch.float32)
        walked = *keys, *queries, *given, notes
    else:
        source, entry, others = ASCEND, "ascend", ("TURNED", int(spool is not None))
        walked = *keys, key_counts, key_offsets, *queries, *given, float(terms.constant), windings
    walk = launch.Kernel(source, entry, (*half, *macros, others))
    wide = min(stride, _WIDEST)
    gathers = gathering(wide, stride // wide, terms.rate > 0 or spool is not None, spool is not None)
    gather = launch.Kernel(GATHER, "gather", (*half, *gathers))
    unsure, enough = (spool.unsure, spool.enough) if spool else (None, 0.0)
    for i in range(rounds):
        sums = table, extras, i, count, dims, most, key_most
        if spool:
            spool.walk((*keys, *queries), limits, *sums)
        walk((blocks, parts), 32 * crew, *walked, *sums, shared=_shared(terms, width, shared))
        gather(
            (min(heads * math.ceil(number / WARPS / QUERIES), processors * GATHERING), stride // wide), 32 * WARPS,
            ranks, offsets, limits, table, extras, unfit, out, unsure, i, number, dims, ranks.shape[1], channels,
            number // group, floor, enough,
        )  # fmt: skip
    if spool:
        spool.mend(out)


def _aligned(part: Tensor) -> Tensor:
    """At an address that 16 divides, as several numbers are read at a time."""
    part = part.contiguous()
    return part.clone() if part.data_ptr() % 16 else part


def _pitch(points: int) -> int:
    """Room for the codes of a line: whole tiles."""
    return _whole(points, _TILE)


def _stride(channels: int) -> int:
    """Channels of a row of sums: 32, or 64, or so many times 128."""
    return 32 if channels <= 32 else 64 if channels <= 64 else _whole(channels, _WIDEST)


def _entry(count: int) -> torch.dtype:
    """For the number of a class and an index."""
    return torch.int64 if count > _SHORT else torch.int32


def crew_of(terms: Terms, shared: int) -> tuple[int, int, int]:
    """Warps of a block that walks, blocks of a multiprocessor, and runs, or cells, of a line for each warp."""
    if terms.rate:
        # as many runs as there is shared memory for: they are taken one by one, and none is waited for long
        return 8 if shared >= cuda_spool.LARGE else 4, 2, max(1, 6 // terms.below.shape[1])
    return (8, 4, 4) if terms.folded else (6, 4, 4)


def walk_of(terms: Terms) -> tuple[Path, str]:
    """The walk of a kernel with an exponential, alone or with a polynomial."""
    return (FADE, "fade") if terms.below.shape[1] == 1 else (RELAX, "relax")


def walking(terms: Terms, width: int, parts: int, shared: int) -> Defines:
    """The macros of relax.cu, fade.cu and ascend.cu."""
    (nodes, powers), (crew, resident, cells) = terms.below.shape, crew_of(terms, shared)
    return (
        ("REAL", "float"), ("VEC", width // 32), ("PARTS", parts), ("NODES", nodes), ("POWERS", powers), ("HALVES", 0),
        ("RATE", int(terms.rate > 0)), ("BOTH", 0), ("COMPACT", int(terms.compact)), ("FOLDED", terms.folded),
        ("PRODUCTS", 0), ("SLOPES", 0), ("ORDERED", 0), ("CHUNK", 8), ("PASSING", 0), ("ALONG", 0),
        ("RESIDENT", resident), ("WAY", 0), ("CREW", crew), ("CELLS", cells), ("VALUES", VALUES), ("RING", RING),
    )  # fmt: skip


def gathering(width: int, parts: int, turned: bool, marked: bool) -> Defines:
    """The macros of gather.cu."""
    return (
        ("WIDTH", width), ("PARTS", parts), ("WARPS", WARPS), ("QUERIES", QUERIES), ("RESIDENT", GATHERING),
        ("TURNED", int(turned)), ("MARKED", int(marked)),
    )  # fmt: skip


def _shared(terms: Terms, width: int, shared: int) -> int:
    """The shared memory of a block that walks: stations and shelves, as in relax.cu, fade.cu and ascend.cu."""
    (nodes, powers), (crew, _, cells) = terms.below.shape, crew_of(terms, shared)
    if terms.rate:
        sums = 4 * _sum(terms, width)
        station = 2 * _KEYS * width * 2 + 4 * _KEYS
        station += 2 * sums + 2 * _KEYS * 4 if powers == 1 else 5 * sums + 2 * _KEYS * (2 * powers + 1)
        return crew * _whole(station, 128) + 2 * crew * cells * sums
    numbers = powers * (width + 1)
    item = 8 if powers == 1 else _whole(4 * powers + 4, 16)
    station = (32 * nodes + 2 * RING) * item + 32 * _whole(4 * powers + 4, 8) + 64 * 4
    return crew * _whole(station, 16) + (crew * cells + 2) * 8 * numbers


def _notes(terms: Terms, stride: int, lines: int, count: int, device: torch.device) -> int:
    """Numbers that relax.cu or fade.cu leaves for itself, for every block and stretch."""
    if not terms.rate:
        return 0
    processors, _, shared, *_ = room.device(device)
    width, blocks = _width(terms, stride), min(lines, processors * crew_of(terms, shared)[1])
    return blocks * (stride // width) * math.ceil(count / _KEYS) * _sum(terms, width)


def _sum(terms: Terms, width: int) -> int:
    """Numbers of a sum of relax.cu or fade.cu."""
    return terms.below.shape[1] * (width + 8)


def _width(terms: Terms, stride: int) -> int:
    """Channels of a warp that walks."""
    return min(stride, _TENSOR if terms.rate else _WIDEST)


def _whole(size: int, unit: int) -> int:
    return math.ceil(size / unit) * unit


def _table(terms: Terms, device: torch.device) -> Tensor:
    return _numbers((*terms.nodes.tolist(), *terms.below.flatten().tolist(), terms.rate), device)


@kept
def _numbers(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=device)
