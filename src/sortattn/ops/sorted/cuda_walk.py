"""The walker of walk.cu, launched for heads, blocks of channels and both sides."""

import functools
import itertools
import math
from pathlib import Path

import torch
from torch import Tensor

from ...cuda import launch
from ...cuda.compile import Defines
from ...cuda.constants import kept
from . import cuda_coil, cuda_relay, room
from .cuda_sort import Lines
from .lines import Bandwidth
from .quotient import look_at
from .tracks import GROUP, Tracks

SOURCE, MOMENTS = (Path(__file__).with_name(name) for name in ("walk.cu", "moments.cu"))
_REALS = {torch.float32: "float", torch.float64: "double"}
# of a block that sums moments, as in track.cu
_WARPS = 4
# rows that a warp has on their way at a time
_CHUNK = 8
# sorted targets that one warp walks, at least
_SHORT = 128
# sources of a short line
_FEW = 512
# warps of a multiprocessor that walk at a time
_RESIDENT = 24
# with so many, those of sums with several nodes take as much longer, for want of registers; yet of 2,048 points and 48
# heads, where two turns do in place of three, a forward pass takes 1.45 and not 1.54 ms
_CROWDED = 1.15
# of the second-level cache, what the rows may take that are read and written at random: as it holds some of them twice,
# less is faster (a walk of 16,384 targets takes 4.46 ms instead of 4.85 with twice the share); a compact kernel has
# twice as much, as its runs take longer to begin
_SHARE = 0.3
# rows that are summed at a time
_STEP = 128
# macros that moments do not depend on: the same are compiled for all walks
_UNUSED = ("HALVES", "PRODUCTS", "SLOPES", "ORDERED", "ALONG", "RESIDENT")


class Walk:
    """A sum of rows `(P, N, C)` for targets."""

    def __init__(
        self,
        tracks: Tracks,
        sources: Lines,
        targets: Lines,
        rows: Tensor,
        extra: Tensor | None,
        bandwidth: Bandwidth,
    ):
        self.tracks, self.sources, self.targets = tracks, sources, targets
        self.width = width_of(rows.shape[2], rows.dtype)
        self.rows, self.extra, self.dtype = self.padded(rows), extra, targets.places.dtype
        fixed = isinstance(bandwidth, float)
        self.bandwidth, self.tau = (None, bandwidth) if fixed else (bandwidth.contiguous(), 0.0)
        self.problems, self.count, self.stride = self.rows.shape
        self.dims, self.number = targets.order.shape[1:]
        self.parts = self.stride // self.width

    def padded(self, rows: Tensor) -> Tensor:
        """Rows with as many channels as warps take together, at an address that 16 divides, as they load so much."""
        missing = -rows.shape[2] % self.width
        if missing:
            return torch.nn.functional.pad(rows, (0, missing))
        rows = rows.contiguous()
        return rows.clone() if rows.data_ptr() % 16 else rows

    def moments(self, tracks: Tracks, walking: Defines) -> Tensor:
        """Those of blocks of sources, and of all before them, see moments.cu; `walking` are the macros of a walk."""
        defines = for_moments(walking)
        blocks, table = math.ceil(self.count / tracks.block), self.table(tracks)
        everything, shape = self.problems * tracks.number * self.dims, (tracks.number, self.count, self.dims)
        size = self.problems * tracks.number * tracks.moments(self.count, self.dims, self.width, self.stride)
        moments = torch.empty(size, dtype=self.rows.dtype, device=self.rows.device)
        launch.Kernel(MOMENTS, "summarise", defines)(
            (math.ceil(everything * blocks / _WARPS), self.parts), 32 * _WARPS, *self.sources[:2], self.rows,
            self.extra, table, self.bandwidth, self.tau, moments, everything, *shape, self.stride, tracks.mirrored,
            self.sources.windings,
        )  # fmt: skip
        jobs = everything * (math.ceil(blocks / GROUP) if tracks.compact else 1 + tracks.both)
        launch.Kernel(MOMENTS, "accumulate", defines)(
            (math.ceil(jobs / _WARPS), self.parts), 32 * _WARPS, *self.sources[:2], table, self.bandwidth, self.tau,
            moments, everything, *shape, tracks.mirrored, self.sources.windings,
        )  # fmt: skip
        return moments

    def room(self, out: Tensor) -> Tensor:
        """The rows that sums are added to: others than `out`, if these have fewer channels than warps take."""
        return out if out.shape[2] == self.stride else self.empty(self.number, self.stride)

    def begin(self, constant: float, out: Tensor, out_extra: Tensor) -> Tensor:
        """Fills what the sums are added to: with zeros, or the kernel's constant for every source and dimension."""
        # a rehearsal has nothing to sum
        constant *= self.dims * (not out.is_meta)
        if not constant:
            out_extra.zero_()
            return out.zero_()
        out.copy_(constant * _column_sums(self.rows))
        if self.extra is None:
            out_extra.fill_(constant * self.count)
        else:
            out_extra.copy_(constant * self.extra.sum(1, keepdim=True))
        return out

    def table(self, tracks: Tracks) -> Tensor:
        """Their numbers, where the kernels read them."""
        return _table(tracks.tables, self.rows.device)

    def empty(self, *shape: int) -> Tensor:
        """Room for sums of all heads."""
        return self.rows.new_empty(self.problems, *shape, dtype=self.dtype)

    def sum(self, constant: float, out: Tensor, out_extra: Tensor, unfit: Tensor | None = None) -> None:
        """Fills these with the sums for all targets, and the kernel's constant for every source and dimension.

        Heads whose rows are not all finite are marked in `unfit (P, group)`.
        """
        nothing = not (self.problems and self.number and self.count and self.dims and self.stride)
        if nothing or torch.are_deterministic_algorithms_enabled() or not cuda_relay.serves(self):
            self.begin(constant, out, out_extra)
            self.run(out, out_extra, None, None, None)
            if self.sources.windings is not None and not nothing:
                cuda_coil.run(self, self.defines(True, False, False), out, out_extra)
            if unfit is not None:
                look_at(self.rows, unfit)
            return
        with launch.on(self.rows.device):
            cuda_relay.run(self, self.defines(True, False, False), constant, out, out_extra, unfit)

    def defines(self, added: bool, multiplied: bool, ordered: bool, each: float = math.inf) -> Defines:
        """The macros of a walk; of its runs a multiprocessor has so many, one after the other."""
        passing = not self.tracks.compact and self.head() > room.device(self.rows.device).cache
        return defines_of(
            self.tracks, self.dtype, self.width, parts=self.parts, added=added, multiplied=multiplied, ordered=ordered,
            passing=passing, warps=resident(self.tracks, added, multiplied, each),
        )  # fmt: skip

    def run(
        self,
        out: Tensor | None,
        out_extra: Tensor | None,
        others: Tensor | None,
        other_extra: Tensor | None,
        products: Tensor | None,
    ) -> None:
        """Walk along all lines, with what is added to and multiplied with as in walk.cu."""
        if not (self.problems and self.number and self.count and self.dims and self.stride):
            return
        ordered = torch.are_deterministic_algorithms_enabled()
        # without atomics a target has one warp at a time: track by track; sums also dimension by dimension, and inner
        # products one block of channels after the other
        tracks = 1 if ordered else self.tracks.number
        dims = 1 if ordered and out is not None else self.dims
        parts = 1 if ordered and products is not None else self.parts
        length = self.length(self.number, self.head(), tracks, dims, _RESIDENT)
        # a walk of a whole track from its beginning needs no moments, unless sources above count
        whole = length >= self.number and not self.tracks.both
        runs = self.problems * tracks * dims * parts * math.ceil(self.number / length)
        each = math.inf if whole or ordered else runs / room.device(self.rows.device).processors
        defines = self.defines(out is not None, products is not None, ordered, each)
        outputs = (out, out_extra, others, other_extra, products)
        with launch.on(self.rows.device):
            for i in range(self.tracks.number) if ordered else (None,):
                self._run(i, defines, whole, length, dims, parts, outputs)

    def _run(self, i, defines, whole, length, some_dims, some_parts, outputs) -> None:
        """All tracks, or only track i."""
        tracks = self.tracks if i is None else self.tracks.only(i)
        number, flags = tracks.number, (tracks.mirrored, tracks.closed, tracks.negated)
        heads, runs = self.problems, math.ceil(self.number / length)
        table = self.table(tracks)
        moments = None if whole else self.moments(tracks, defines)
        for first, part in itertools.product(range(0, self.dims, some_dims), range(0, self.parts, some_parts)):
            launch.Kernel(SOURCE, "walk", defines)(
                (heads * number * some_dims * runs, some_parts), 32, *self.sources[:2], *self.targets[:2], self.rows,
                self.extra, table, self.bandwidth, self.tau, moments, *outputs, heads, number, self.count, self.number,
                self.dims, *flags, length, first, some_dims, part, self.sources.windings,
            )  # fmt: skip

    def head(self) -> int:
        """Bytes of the rows of one head and one block of channels, which are read and written at random."""
        return (self.count * self.rows.element_size() + self.number * self.dtype.itemsize) * self.width

    def length(self, number: int, head: int, tracks: int, dims: int, resident: int, share: float | None = None) -> int:
        """Of the points of a track, how many have a warp: so many that the GPU is busy and its cache large enough.

        A head's rows take `head` bytes.
        """
        processors, cache, *_ = room.device(self.rows.device)
        warps = processors * resident
        # warps of one head and one run of every track; of the halves of a line each has half the targets
        together = dims * (1 if self.tracks.folded else tracks)
        runs = warps / (together * self.problems * self.parts)
        # those whose rows are read and written at a time
        heads = min(warps / together, self.problems)
        if heads * head > cache:
            share = share or (2 * _SHARE if self.tracks.compact else _SHARE)
            runs = max(runs, warps * head / (share * cache * together))
        # of a short line, one that is not quite enough is better than the moments that a second one needs
        runs = max(1, round(runs) if self.count <= _FEW else math.ceil(runs))
        return max(_SHORT, math.ceil(number / runs / 32) * 32)


def _column_sums(rows: Tensor) -> Tensor:
    """The sums `(P, 1, C)` of rows `(P, N, C)`; by steps, as torch takes twice the room of the rows to sum so many."""
    even = rows.shape[1] // _STEP * _STEP
    steps = rows[:, :even].unflatten(1, (-1, _STEP)).sum(2)
    return steps.sum(1, keepdim=True) + rows[:, even:].sum(1, keepdim=True)


@functools.lru_cache(maxsize=256)
def for_moments(walking: Defines) -> Defines:
    """From the macros of a walk."""
    return tuple((name, 0 if name in _UNUSED else value) for name, value in walking)


@functools.lru_cache(maxsize=256)
def defines_of(
    tracks: Tracks,
    dtype: torch.dtype,
    width: int,
    *,
    added: bool,
    multiplied: bool,
    ordered: bool,
    parts: int = 1,
    passing: bool = False,
    along: bool = False,
    warps: int | None = None,
) -> Defines:
    # shared memory: lists of sources and targets, the side, and the rows of targets
    places = (32 * (1 + tracks.halves) if tracks.nodes == 1 else 64 * tracks.nodes) + 2 * _CHUNK
    each = places * (
        8 if dtype.itemsize * tracks.sums == 4 else 16 * math.ceil((dtype.itemsize * tracks.sums + 4) / 16)
    )
    each += (
        33 * 16 * (1 + tracks.sums) + tracks.nodes * (tracks.sums + 3) * 8 + 32 * width * dtype.itemsize * multiplied
    )
    if each > 48 << 10:
        raise RuntimeError(f"the sorted backend has no room for {tracks.nodes} nodes on a GPU; use backend='tiled'")
    return (
        ("REAL", _REALS[dtype]),
        ("VEC", width // 32),
        ("PARTS", parts),
        ("NODES", tracks.nodes),
        ("POWERS", tracks.powers),
        ("HALVES", int(tracks.halves)),
        ("RATE", int(tracks.rate)),
        ("BOTH", int(tracks.both)),
        ("COMPACT", int(tracks.compact)),
        ("FOLDED", tracks.folded),
        ("PRODUCTS", int(multiplied and not added)),
        ("SLOPES", int(multiplied and added)),
        ("ORDERED", int(ordered)),
        ("CHUNK", _CHUNK),
        ("PASSING", int(passing)),
        ("ALONG", int(along)),
        ("RESIDENT", warps or resident(tracks, added, multiplied)),
        ("WAY", 0 if tracks.number > 1 else -1 if tracks.mirrored else 1),
    )


def resident(tracks: Tracks, added: bool, multiplied: bool, each: float = math.inf) -> int:
    """Warps of a multiprocessor: fewer, where they need more registers.

    Sums with several nodes have more after all, if the last ones of `each` runs of a multiprocessor would be alone.
    """
    if tracks.nodes > 2:
        fewer = 16 if multiplied and not added else 20
        more = not multiplied and _CROWDED * _turns(each, _RESIDENT) < _turns(each, fewer)
        return _RESIDENT if more else fewer
    if tracks.both and multiplied:
        return 16
    return _RESIDENT - 4 * (added and multiplied)


def _turns(each: float, warps: int) -> float:
    """The time of `each` runs, for so many warps at a time, relative to that without a last turn that is not full."""
    return math.ceil(each / warps) * warps / each if 0 < each < math.inf else 1.0


def width_of(channels: int, dtype: torch.dtype) -> int:
    """Channels that a warp takes: 32, 64 or 128."""
    if channels <= 32:
        return 32
    return 64 if channels <= 64 or dtype == torch.float64 else 128


@kept
def _table(tables: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    return torch.tensor(tables, dtype=torch.float64, device=device)
