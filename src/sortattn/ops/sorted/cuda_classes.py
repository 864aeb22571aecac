"""Attention of 16-bit inputs on NVIDIA GPUs by classes of equal coordinates, see classes.cu, ascend.cu and gather.cu."""

import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from ...cuda import launch
from ...kernels import Terms
from . import room
from .lines import Bandwidth

_HERE = Path(__file__).parent
CLASSES, ASCEND, GATHER = (_HERE / f"{name}.cu" for name in ("classes", "ascend", "gather"))
RELAX = _HERE / "relax.cu"
BLOCKS = 1
# coordinates that there can be
_MOST = 1 << 16
# threads of a block that counts; classes that it counts at a time
_THREADS, _ROOM = 512, 40 << 10
# points of a tile, as in classes.cu
_TILE = 64
# of a block that walks: warps, and parts of a run; rows on their way; blocks of a multiprocessor
CREW, CELLS, RING, RESIDENT = 16, 4, 16, 1
SMALL = 0
# of a block that gathers: warps, and queries of each; blocks of a multiprocessor
WARPS, QUERIES, GATHERING = 8, 8, 4
_TYPES = {torch.float16: 0, torch.bfloat16: 1}


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    terms: Terms,
    bandwidth: Bandwidth,
    group: int,
    floor: float,
    space: int,
) -> Tensor:
    """Normalised sums `(P, M, C)`, of queries `(P, group * M, D)`."""
    (problems, number, dims), (_, count, channels) = query.shape, value.shape
    query, key, value = (part.contiguous() for part in (query, key, value))
    device = room.device(query.device)
    width = 32 if channels <= 32 else 64 if channels <= 64 else 128
    parts = math.ceil(channels / width)
    stride = parts * width
    rows = torch.nn.functional.pad(value, (0, stride - channels)) if stride > channels else value
    most, long = min(number, _MOST), int(count > _MOST)
    half = (("BFLOAT", _TYPES[query.dtype]), ("LONG", long), ("SMALL", SMALL))
    counting = (*half, ("THREADS", _THREADS))
    out = torch.empty(problems, number, channels, dtype=query.dtype, device=query.device)
    unfit = torch.zeros(problems, group, dtype=torch.int32, device=query.device)
    numbers = _table((*terms.nodes.tolist(), *terms.below.flatten().tolist(), terms.rate), query.device)
    walking = (*half, *_walking(terms, width, parts))
    gathering = (*half, ("VEC", width // 32), ("PARTS", parts), ("WARPS", WARPS), ("QUERIES", QUERIES))

    pitches = [math.ceil(n / _TILE) * _TILE for n in (number, count)]
    each = dims * (2 * sum(pitches) + 2 * most + count * (8 if long else 4))
    room_rows = (space // 2) // ((2 if SMALL else 4) * stride + 4)
    together = room_rows // (dims * most)
    if not together:
        raise RuntimeError("no room")
    for some in room.groups(problems, each, space // 2):
        heads = some.stop - some.start
        lines = heads * dims
        codes = [torch.empty(lines, pitch, dtype=torch.int16, device=query.device) for pitch in pitches]
        for points, code, pitch, share in zip((query, key), codes, pitches, (number // group, 0), strict=True):
            n = points.shape[1]
            launch.Kernel(CLASSES, "spread", counting)(
                (heads * math.ceil(n / _TILE) * math.ceil(dims / _TILE),), 256, points[some], code, unfit[some], n,
                dims, pitch, group, share,
            )  # fmt: skip
        slices = math.ceil(count * channels / (1 << 15))
        launch.Kernel(CLASSES, "look", counting)(
            (heads * slices,), 256, value[some], unfit[some], count * channels, group, slices
        )
        ranks, classes = codes[0], torch.empty(lines, most, dtype=torch.int16, device=query.device)
        counts = torch.empty(lines, dtype=torch.int32, device=query.device)
        launch.Kernel(CLASSES, "rank_classes", counting)(
            (lines,), _THREADS, ranks, classes, counts, number, pitches[0], most
        )
        entries = torch.empty(lines, count, dtype=torch.int64 if long else torch.int32, device=query.device)
        places = min(count, _ROOM)
        launch.Kernel(CLASSES, "arrange", counting)(
            (lines,), _THREADS, codes[1], entries, count, pitches[1], places, shared=4 * places
        )
        del codes
        rounds = math.ceil(heads / together)
        limits = torch.empty(rounds + 1, dtype=torch.int32, device=query.device)
        offsets = torch.empty(lines, dtype=torch.int64, device=query.device)
        capacity = min(room_rows, lines * most)
        launch.Kernel(CLASSES, "divide_rounds", counting)(
            (1,), _THREADS, counts, offsets, limits, heads, dims, capacity, rounds
        )
        table = torch.empty(capacity, stride, dtype=query.dtype if SMALL else torch.float32, device=query.device)
        extras = torch.empty(capacity, dtype=torch.float32, device=query.device)
        extra = None if weight is None else weight[some].contiguous()
        fixed = isinstance(bandwidth, float)
        taus, tau = (None, bandwidth) if fixed else (bandwidth[some].contiguous(), 0.0)
        notes = None
        if terms.rate and BLOCKS:
            powers = terms.below.shape[1]
            notes = torch.empty(min(lines, device.processors * RESIDENT) * parts * math.ceil(count / 32) * powers * (width + 1), dtype=torch.float32, device=query.device)
        for i in range(rounds):
            if notes is not None:
                launch.Kernel(RELAX, "relax", walking)(
                    (min(lines, device.processors * RESIDENT), parts), 32 * CREW, entries, classes, counts, offsets,
                    limits, rows[some], extra, numbers, taus, tau, notes, table, extras, i, count, dims, most)
            else:
              launch.Kernel(ASCEND, "ascend", walking)(
                (min(lines, device.processors * RESIDENT), parts), 32 * CREW, entries, classes, counts, offsets,
                limits, rows[some], extra, numbers, taus, tau, float(terms.constant), table, extras, i, count, dims,
                most, shared=_shared(terms, width),
            )  # fmt: skip
            launch.Kernel(GATHER, "gather", gathering)(
                (min(heads * math.ceil(number / WARPS / QUERIES), device.processors * GATHERING), parts), 32 * WARPS,
                ranks, offsets, limits, table, extras, unfit[some], out[some], i, number, dims, pitches[0], channels,
                number // group, floor,
            )  # fmt: skip
    return out


def _walking(terms: Terms, width: int, parts: int):
    nodes, powers = terms.below.shape
    return (
        ("REAL", "float"), ("VEC", width // 32), ("PARTS", parts), ("NODES", nodes), ("POWERS", powers), ("HALVES", 0),
        ("RATE", int(terms.rate > 0)), ("BOTH", 0), ("COMPACT", int(terms.compact)), ("FOLDED", terms.folded),
        ("PRODUCTS", 0), ("SLOPES", 0), ("ORDERED", 0), ("CHUNK", 8), ("PASSING", 0), ("RESIDENT", RESIDENT),
        ("CREW", CREW), ("CELLS", CELLS), ("RING", RING),
    )  # fmt: skip


def _shared(terms: Terms, width: int) -> int:
    """The shared memory of a block that walks, as in ascend.cu."""
    nodes, powers = terms.below.shape
    exponential = terms.rate > 0
    weights = 2 * powers if exponential else powers
    item = 8 if weights == 1 else 16 * math.ceil((4 * weights + 4) / 16)
    target = 16 * math.ceil((4 * powers + 4 * (powers if exponential else 1) + 4) / 16)
    station = (32 * nodes + 2 * RING) * item + 32 * target
    shelves = 2 * CREW if exponential else CREW * CELLS + 2
    return CREW * station + shelves * powers * (width + 1) * 8


@functools.lru_cache(maxsize=256)
def _table(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=device)
