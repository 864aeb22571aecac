"""The sorted backend on NVIDIA GPUs: the walker of walk.cu, launched for heads, blocks of channels and both sides."""

import functools
import itertools
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...cuda.compile import Defines
from ...cuda.launch import Kernel
from ...kernels import Terms
from .lines import Bandwidth

_WALK, _SORT = (Path(__file__).with_name(f"{name}.cu") for name in ("walk", "sort"))
# weights may be None, for ones, and a bandwidth for all heads a number
WANTS_TENSORS = False
# the backward pass sorts again: argsorts are as large as queries and keys, and take 1.7 ms of 28 at 16,384 points
KEEPS_ORDER = False
_REALS = {torch.float32: "float", torch.float64: "double"}
# keys of a thread of a block that sorts, at most: sixteen thousand in its shared memory, if there is as much
_ITEMS = 16
# places that a block merges, and lines that one splits, as in sort.cu
_MERGED, _SPLIT = 2048, 4
# of a stretch of a long line, how much is filled on average, and how many keys of a sample it has: with as many, none
# is too long but for ties
_FILLED, _SAMPLED = 0.7, 350
# indices and coordinates
_PAIR = (torch.int32, torch.float32)
# as in walk.cu
_WARPS, _GROUP = 4, 16
# rows that a warp has on their way at a time
_CHUNK = 8
# sorted targets that one warp walks, at least
_SHORT = 128
# sources of a short line
_FEW = 512
# warps of a multiprocessor that walk at a time
_RESIDENT = 24
# of the second-level cache, what the rows may take that are read and written at random: as it holds some of them twice,
# less is faster (a walk of 16,384 targets takes 4.46 ms instead of 4.85 with twice the share); a compact kernel has
# twice as much, as its runs take longer to begin
_SHARE = 0.3
# rows that are summed at a time
_STEP = 128
# bytes of work space that is always to be had: heads of a few thousand points fill a GPU only if there are many of them
_WORKSPACE = 512 << 20


class Lines(NamedTuple):
    """Sorted coordinates `(P, D, N)`, and the indices of the points they belong to."""

    places: Tensor
    order: Tensor


def points(points: Tensor, order: Tensor | None = None) -> Lines:
    """Points `(P, N, D)` in the order of every dimension, which is not kept."""
    return sort_lines(points)


def groups(query: Tensor, key: Tensor, value: Tensor, terms: Terms, *, backward: bool = False) -> list[slice]:
    """Heads to sort and walk at a time: all that is there beside inputs and results takes no more room than the inputs.

    Beside what a group needs, that is the sums of a forward pass, which the output is a quotient of, or their gradient.
    Where these leave little of it, as with many queries and few keys, a group still has its share.
    """
    (problems, rows, dims), (_, columns, channels) = query.shape, value.shape
    size, tracks, width = query.element_size(), _tracks(terms, False), _width(channels, query.dtype)
    stride = math.ceil(channels / width) * width
    lines = (rows + columns) * dims * (4 + size)
    moments = size * tracks.number * _moments(tracks, max(rows, columns) if backward else columns, dims, width, stride)
    # rows are copied where warps take more channels than there are
    copies = (stride > channels) * (rows + 2 * columns if backward else rows + columns)
    inputs = problems * ((rows + columns) * dims + columns * channels) * size
    kept = problems * rows * (channels + 1) * size
    # less what is small and what an allocator adds
    room = max(max(_WORKSPACE, inputs * 15 // 16) - kept, _WORKSPACE // 4)
    return _groups(problems, lines + moments + copies * stride * size, room)


def forward(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, terms: Terms, bandwidth: Bandwidth, kept: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums of values and of weights for all queries, see `cpu.forward`, and no argsorts."""
    sums, total = query.new_empty(*query.shape[:2], value.shape[2]), query.new_empty(query.shape[:2])
    for some in groups(query, key, value, terms):
        extra = None if weight is None else weight[some]
        tau = bandwidth if isinstance(bandwidth, float) else bandwidth[some]
        # without a name they are gone before the next group is sorted
        scatter(
            sort_lines(key[some]), sort_lines(query[some]), value[some], extra, terms, tau, False,
            into=(sums[some], total[some]),
        )  # fmt: skip
    nothing = (query.new_empty(query.shape[0], query.shape[2], 0, dtype=torch.int32) for _ in range(2))
    return sums, total, *nothing


def scatter(
    sources: Lines,
    targets: Lines,
    rows: Tensor,
    extra: Tensor | None,
    terms: Terms,
    bandwidth: Bandwidth,
    mirrored: bool,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum `rows (P, N, C)` and `extra (P, N)` of the sources for the targets, see `cpu.scatter`."""
    walk = _Walk(_tracks(terms, mirrored), sources, targets, rows, extra, bandwidth)
    if into is None:
        into = walk.empty(walk.number, rows.shape[2]), walk.empty(walk.number)
    out = walk.begin(terms.constant, *into)
    walk.run(out, into[1], None, None, None)
    _deliver(out, into[0])
    return into


def dot(
    sources: Lines,
    targets: Lines,
    rows: Tensor,
    extra: Tensor | None,
    other: Tensor,
    other_extra: Tensor | None,
    terms: Terms,
    bandwidth: Bandwidth,
    mirrored: bool,
    factors: Bandwidth,
    into: Tensor | None = None,
) -> Tensor:
    """The sums of `scatter` along each dimension by itself, multiplied with rows of the targets, see `cpu.dot`."""
    walk = _Walk(_tracks(terms, mirrored), sources, targets, rows, extra, bandwidth)
    products = (walk.empty(walk.number, walk.dims) if into is None else into).zero_()
    walk.run(None, None, walk.padded(other), other_extra, products)
    return products.mul_(factors if isinstance(factors, float) else factors.to(products.dtype)[:, None, None])


def towards_keys(
    queries: Lines,
    keys: Lines,
    grad: Tensor,
    grad_extra: Tensor,
    value: Tensor,
    weight: Tensor | None,
    terms: Terms,
    slope: Terms,
    bandwidth: Bandwidth,
    into: tuple[Tensor, Tensor, Tensor],
) -> None:
    """The gradients of values, weights and keys, see `cpu.towards_keys`; one walk does for all of them."""
    walk = _Walk(_tracks(terms, mirrored=True, slopes=True), queries, keys, grad, grad_extra, bandwidth)
    by_value, by_weight, by_key = into
    out = walk.begin(terms.constant, by_value, by_weight)
    walk.run(out, by_weight, walk.padded(value), weight, by_key.zero_())
    _deliver(out, by_value)


def _deliver(out: Tensor, into: Tensor) -> None:
    """Sums to where they are wanted, if they are not there: without what was padded."""
    if out is not into:
        into.copy_(out[..., : into.shape[2]])


def sort_lines(points: Tensor) -> Lines:
    """Every dimension of `points (P, N, D)` in order."""
    problems, count, dims = points.shape
    order = torch.empty(problems, dims, count, dtype=torch.int32, device=points.device)
    places = torch.empty(order.shape, dtype=points.dtype, device=points.device)
    # a short line is sorted in shared memory, a long one needs room for its stretches
    short = points.dtype == torch.float32 and count <= 1024 * _items(count, points.device)
    each = 0 if short else 4 * points.element_size() * count * dims
    for some in _groups(problems, each, max(_WORKSPACE // 4, points.numel() * points.element_size())):
        if points.dtype == torch.float32 and points.numel():
            _launch_sort(points[some], order[some], places[some])
            continue
        # what is no finite number stands at zero, as in the kernels; adding zero turns -0.0 into 0.0
        lines = points[some].nan_to_num(0.0, 0.0, 0.0).add_(0.0).transpose(1, 2).contiguous()
        places[some], order[some] = lines.sort(dim=-1, stable=True)
    return Lines(places, order)


def _items(count: int, device: torch.device) -> int:
    """Keys of a thread of a block that sorts so many, or as many as the device has room for."""
    room = _device(device).shared
    fitting = [items for items in (1, 2, 4, 8, _ITEMS) if _sort_bytes(1024 * items) <= room]
    return next((items for items in fitting if count <= 1024 * items), fitting[-1])


def _sort_bytes(length: int) -> int:
    """The shared memory of a block that sorts so many keys, as in sort.cu."""
    # keys and indices; then counts, cells and totals, or digits of all warps and starts
    return length * 6 + max(length * 2 + 1024 * 8 + 32 * 4, 32 * 256 * 2 + (256 + 32) * 4)


def _launch_sort(points: Tensor, order: Tensor, places: Tensor) -> None:
    heads, count, dims = points.shape
    items = _items(count, points.device)
    length = 1024 * items
    runs, shared = math.ceil(count / length), _sort_bytes(length)
    defines = (("ITEMS", items),)
    with torch.cuda.device(points.device):
        if runs == 1:
            Kernel(_SORT, "sort_runs", defines)(
                (heads * dims,), 1024, points, order, places, None, count, dims, 1, shared=shared
            )
            return
        # for the sake of bitwise equal sums equal keys keep their order, which takes merges where there are many
        stable = int(torch.are_deterministic_algorithms_enabled())
        parts = math.ceil(count / (_FILLED * length))
        sample = points[:, :: math.ceil(count / min(length, _SAMPLED * parts))].contiguous()
        shape = (heads, dims, sample.shape[1])
        indices, bounds = (torch.empty(shape, dtype=dtype, device=points.device) for dtype in _PAIR)
        _launch_sort(sample, indices, bounds)
        pairs = torch.empty(heads * dims * parts, length, 2, dtype=torch.int32, device=points.device)
        sizes, done = (torch.empty(heads * dims * n, dtype=torch.int32, device=points.device) for n in (parts, 1))
        Kernel(_SORT, "split", defines)(
            (heads * math.ceil(dims / _SPLIT),), 1024, points, bounds, pairs, sizes, done, count, dims, parts,
            sample.shape[1], stable, shared=8 * parts * _SPLIT,
        )  # fmt: skip
        Kernel(_SORT, "sort_parts", defines)(
            (heads * dims * parts,), 1024, pairs, sizes, done, order, places, count, parts, stable, shared=shared
        )
        # for lines that are not sorted yet, runs and merged ones take turns in two pairs of buffers, such that the last
        # one is the result
        other = [part.view(dtype)[: order.numel()] for part, dtype in zip(pairs.view(2, -1), _PAIR, strict=True)]
        here, there = (order, places), other
        if math.ceil(math.log2(runs)) % 2:
            here, there = there, here
        Kernel(_SORT, "sort_runs", defines)(
            (heads * dims * runs,), 1024, points, *here, done, count, dims, runs, shared=shared
        )
        while length < count:
            grid = (heads * dims * math.ceil(count / _MERGED),)
            Kernel(_SORT, "merge_runs", defines)(grid, 256, *here, *there, done, count, length)
            here, there = there, here
            length *= 2


def _groups(problems: int, size: int, room: int) -> list[slice]:
    """As many heads at a time as there is room for, of `size` bytes each, and at least one."""
    together = max(1, room // max(size, 1))
    # all alike, as a small one would leave the GPU half empty
    together = math.ceil(problems / math.ceil(problems / together)) if problems else 1
    return [slice(first, min(first + together, problems)) for first in range(0, max(problems, 1), together)]


def _moments(tracks: "_Tracks", count: int, dims: int, width: int, stride: int) -> int:
    """Numbers that the moments of a head take, for one track of each dimension."""
    blocks = math.ceil(count / tracks.block)
    places = blocks + 1 + tracks.compact * math.ceil(blocks / _GROUP)
    return tracks.sums * (width + 1) * places * dims * (stride // width)


class _Tracks(NamedTuple):
    """What is walked along every line: a table for each, and in bits which of them are mirrored and so on."""

    # nodes, coefficients below and, if any count, above, and rate, one behind the other
    tables: tuple[tuple[float, ...], ...]
    nodes: int
    powers: int
    rate: bool
    # whether sources above count too
    both: bool
    compact: bool
    folded: int
    # whether ties count half
    halves: bool
    mirrored: int
    closed: int
    negated: int

    @property
    def number(self) -> int:
        return len(self.tables)

    @property
    def sums(self) -> int:
        """Numbers that the walk keeps for a channel."""
        return self.powers * (1 + self.both)

    @property
    def block(self) -> int:
        """Sources whose moments are summed, as in walk.cu."""
        return 128 if self.both or self.compact else 256

    def only(self, i: int) -> "_Tracks":
        """One of them alone."""
        flags = (flag >> i & 1 for flag in (self.mirrored, self.closed, self.negated))
        return self._replace(
            tables=(self.tables[i],), **dict(zip(("mirrored", "closed", "negated"), flags, strict=True))
        )


def _tracks(terms: Terms, mirrored: bool, slopes: bool = False) -> _Tracks:
    """The tracks of a kernel; with `slopes`, of one whose slopes at the targets are wanted too."""
    tables = (tuple(map(tuple, table.tolist())) for table in (terms.below, terms.above))
    return _make_tracks(tuple(terms.nodes.tolist()), *tables, terms.rate, terms.compact, terms.folded, mirrored, slopes)


# the same for every call of a layer: next to a short one it takes its time
@functools.lru_cache(maxsize=256)
def _make_tracks(
    nodes: tuple, below: tuple, above: tuple, rate: float, compact: bool, folded: int, mirrored: bool, slopes: bool
) -> _Tracks:
    constants = [tuple(row[0] for row in side) for side in (below, above)]
    both = any(any(row) for row in above)
    coefficients = [number for side in ((below, above) if both else (below,)) for row in side for number in row]
    # a folded line is walked in two halves, its kernel being its own transpose
    flipped = [False, True] if folded else [mirrored]
    # where both sides agree a tie may count for either as a whole
    whole = both and constants[0] == constants[1]
    halves = slopes or (not whole and any(any(side) for side in constants))
    if slopes:
        # a slope is by the target, which a mirrored track has negated
        negated = flipped
    else:
        # an odd kernel changes its sign with the half
        negated = [folded < 0 and half != mirrored for half in flipped]
    tables = ((*nodes, *coefficients, rate),) * len(flipped)
    flags = (_bits(bits) for bits in (flipped, [whole], negated))
    return _Tracks(tables, len(nodes), len(below[0]), bool(rate), both, compact, folded, halves, *flags)


def _bits(flags) -> int:
    return sum(1 << i for i, flag in enumerate(flags) if flag)


class _Walk:
    """A sum of rows `(P, N, C)` for targets."""

    def __init__(
        self,
        tracks: _Tracks,
        sources: Lines,
        targets: Lines,
        rows: Tensor,
        extra: Tensor | None,
        bandwidth: Bandwidth,
    ):
        self.tracks, self.sources, self.targets = tracks, sources, targets
        self.width = _width(rows.shape[2], rows.dtype)
        self.rows, self.extra = self.padded(rows), extra
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

    def moments(self, tracks: _Tracks, defines: Defines) -> Tensor:
        """Those of blocks of sources, and of all before them, see walk.cu."""
        blocks, table = math.ceil(self.count / tracks.block), _table(tracks.tables, self.rows.device)
        everything, shape = self.problems * tracks.number * self.dims, (tracks.number, self.count, self.dims)
        size = self.problems * tracks.number * _moments(tracks, self.count, self.dims, self.width, self.stride)
        moments = torch.empty(size, dtype=self.rows.dtype, device=self.rows.device)
        Kernel(_WALK, "summarise", defines)(
            (math.ceil(everything * blocks / _WARPS), self.parts), 32 * _WARPS, *self.sources, self.rows, self.extra,
            table, self.bandwidth, self.tau, moments, everything, *shape, self.stride, tracks.mirrored,
        )  # fmt: skip
        jobs = everything * (math.ceil(blocks / _GROUP) if tracks.compact else 1 + tracks.both)
        Kernel(_WALK, "accumulate", defines)(
            (math.ceil(jobs / _WARPS), self.parts), 32 * _WARPS, *self.sources, table, self.bandwidth, self.tau,
            moments, everything, *shape, tracks.mirrored,
        )  # fmt: skip
        return moments

    def begin(self, constant: float, out: Tensor, out_extra: Tensor) -> Tensor:
        """Fills what the sums are added to: with zeros, or the kernel's constant for every source and dimension.

        Returns the rows, which are others than `out` if these have fewer channels than warps take.
        """
        if out.shape[2] != self.stride:
            out = self.empty(self.number, self.stride)
        constant *= self.dims
        if not constant:
            out_extra.zero_()
            return out.zero_()
        out.copy_(constant * _column_sums(self.rows))
        if self.extra is None:
            out_extra.fill_(constant * self.count)
        else:
            out_extra.copy_(constant * self.extra.sum(1, keepdim=True))
        return out

    def empty(self, *shape: int) -> Tensor:
        """Room for sums of all heads."""
        return self.rows.new_empty(self.problems, *shape)

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
        runs = self._runs(tracks, dims)
        length = max(_SHORT, math.ceil(self.number / runs / 32) * 32)
        # a walk of a whole track from its beginning needs no moments, unless sources above count
        whole = length >= self.number and not self.tracks.both
        defines = _defines(
            self.tracks,
            self.rows.dtype,
            self.width,
            parts=self.parts,
            added=out is not None,
            multiplied=products is not None,
            ordered=ordered,
        )
        outputs = (out, out_extra, others, other_extra, products)
        with torch.cuda.device(self.rows.device):
            for i in range(self.tracks.number) if ordered else (None,):
                self._run(i, defines, whole, length, dims, parts, outputs)

    def _run(self, i, defines, whole, length, some_dims, some_parts, outputs) -> None:
        """All tracks, or only track i."""
        tracks = self.tracks if i is None else self.tracks.only(i)
        number, flags = tracks.number, (tracks.mirrored, tracks.closed, tracks.negated)
        heads, runs = self.problems, math.ceil(self.number / length)
        table = _table(tracks.tables, self.rows.device)
        moments = None if whole else self.moments(tracks, defines)
        for first, part in itertools.product(range(0, self.dims, some_dims), range(0, self.parts, some_parts)):
            Kernel(_WALK, "walk", defines)(
                (heads * number * some_dims * runs, some_parts), 32, *self.sources, *self.targets, self.rows,
                self.extra, table, self.bandwidth, self.tau, moments, *outputs, heads, number, self.count, self.number,
                self.dims, *flags, length, first, some_dims, part,
            )  # fmt: skip

    def _runs(self, tracks: int, dims: int) -> int:
        """Into how many runs of targets a track is cut: as few as keep the GPU busy and its cache large enough."""
        processors, cache, _ = _device(self.rows.device)
        warps = processors * _RESIDENT
        # warps of one head and one run of every track; of the halves of a line each has half the targets
        together = dims * (1 if self.tracks.folded else tracks)
        runs = warps / (together * self.problems * self.parts)
        # rows of the heads that are walked at a time, read and written at random
        head = (self.count + self.number) * self.width * self.rows.element_size()
        heads = min(warps / together, self.problems)
        if heads * head > cache:
            share = 2 * _SHARE if self.tracks.compact else _SHARE
            runs = max(runs, warps * head / (share * cache * together))
        # of a short line, one that is not quite enough is better than the moments that a second one needs
        return max(1, round(runs) if self.count <= _FEW else math.ceil(runs))


def _column_sums(rows: Tensor) -> Tensor:
    """The sums `(P, 1, C)` of rows `(P, N, C)`; by steps, as torch takes twice the room of the rows to sum so many."""
    even = rows.shape[1] // _STEP * _STEP
    steps = rows[:, :even].unflatten(1, (-1, _STEP)).sum(2)
    return steps.sum(1, keepdim=True) + rows[:, even:].sum(1, keepdim=True)


@functools.lru_cache(maxsize=256)
def _defines(
    tracks: _Tracks,
    dtype: torch.dtype,
    width: int,
    *,
    added: bool,
    multiplied: bool,
    ordered: bool,
    parts: int = 1,
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
        ("RESIDENT", _resident(tracks, added, multiplied)),
    )


def _resident(tracks: _Tracks, added: bool, multiplied: bool) -> int:
    """Warps of a multiprocessor: fewer, where they need more registers."""
    if tracks.both and multiplied:
        return 16
    return _RESIDENT - 4 * (tracks.nodes > 2) - 4 * (added and multiplied)


class _Device(NamedTuple):
    """The number of multiprocessors, and the bytes of the second-level cache and of the shared memory of a block."""

    processors: int
    cache: int
    shared: int


@functools.lru_cache
def _device(device: torch.device) -> _Device:
    properties = torch.cuda.get_device_properties(device)
    return _Device(properties.multi_processor_count, properties.L2_cache_size, properties.shared_memory_per_block_optin)


def _width(channels: int, dtype: torch.dtype) -> int:
    """Channels that a warp takes: 32, 64 or 128."""
    if channels <= 32:
        return 32
    return 64 if channels <= 64 or dtype == torch.float64 else 128


@functools.lru_cache(maxsize=256)
def _table(tables: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    return torch.tensor(tables, dtype=torch.float64, device=device)
