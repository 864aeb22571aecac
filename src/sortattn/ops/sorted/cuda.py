"""The sorted backend on NVIDIA GPUs: what the operators ask for, by groups of heads."""

import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from ...cuda import launch
from ...kernels import Terms
from ...validation import working_type
from . import cuda_coil, cuda_mutual, cuda_reel, cuda_relay, cuda_trade, room
from .cuda_sort import Lines, sort_both, sort_lines
from .cuda_walk import Walk, width_of
from .lines import Bandwidth
from .quotient import _unfit, divide_on_gpu
from .tracks import Tracks, tracks_of

# weights may be None, for ones, and a bandwidth for all heads a number
WANTS_TENSORS = False
# the backward pass sorts again: argsorts are as large as queries and keys, and take 1.5 ms of 27 at 16,384 points
KEEPS_ORDER = False
_DELIVER = Path(__file__).with_name("deliver.cu")
# points of a thread, as in deliver.cu
_EACH = 4


def points(points: Tensor, order: Tensor | None = None) -> Lines:
    """Points `(P, N, D)` in the order of every dimension, which is not kept."""
    return sort_lines(points)


def both(
    query: Tensor,
    key: Tensor,
    query_order: Tensor,
    key_order: Tensor,
    value: Tensor,
    weight: Tensor | None,
    terms: Terms,
    bandwidth: Bandwidth,
    wound: bool,
) -> tuple[Lines, Lines]:
    """Those of queries and keys, for `gradients`; lines that are better `wound` are, if they may be."""
    tracks = tracks_of(terms, mirrored=True, slopes=True)
    around = None
    if wound and cuda_trade.serves(tracks, value.dtype) and cuda_reel.serves(tracks, query, key, value):
        around = cuda_coil.wind(cuda_reel.plain(tracks), key, query, weight, bandwidth, slopes=True)
    keys, queries = sort_both(key, query, None, around)
    return queries, keys


def groups(
    query: Tensor, key: Tensor, value: Tensor, terms: Terms, *, backward: bool = False, kept: bool = True
) -> list[slice]:
    """Heads to sort and walk at a time: all that is there beside inputs and results takes no more room than the inputs.

    Beside what a group needs, that is the sums of a forward pass, which the output is a quotient of, or their gradient.
    Where these leave little of it, as with many queries and few keys, a group still has its share. Sums that are not
    `kept` for a backward pass become the output.
    """
    return _groups_for(query, value, tracks_of(terms, False), backward, kept)


def _groups_for(query: Tensor, value: Tensor, tracks: Tracks, backward: bool, kept: bool) -> list[slice]:
    return _groups(
        query.shape, value.shape, working_type(query.dtype), tracks, backward, kept, room.WORKSPACE,
        room.device(query.device).cache,
    )  # fmt: skip


# next to a short call it takes its time
@functools.lru_cache(maxsize=256)
def _groups(
    points: torch.Size,
    values: torch.Size,
    dtype: torch.dtype,
    tracks: Tracks,
    backward: bool,
    kept: bool,
    least: int,
    cache: int,
) -> list[slice]:
    (problems, rows, dims), (_, columns, channels) = points, values
    size, width = dtype.itemsize, width_of(channels, dtype)
    stride = math.ceil(channels / width) * width
    # those of both kinds, if all gradients are walked together
    together = backward and cuda_mutual.serves(tracks, dtype)
    traded = backward and cuda_trade.serves(tracks, dtype)
    # indices, coordinates and, if gradients stand along lines first, these
    along = (together or traded) and _stands_along(rows, columns, dims, width, cache)
    lines = (rows + columns) * dims * (4 + size + size * along)
    sources = rows + columns if together else max(rows, columns) if backward else columns
    moments = size * tracks.number * tracks.moments(sources, dims, width, stride)
    if tracks.folded > 0:
        # or the sums of all rows on either side of zero, of both kinds if they are walked together
        halves = cuda_relay.totals_of(columns, dims, width, stride)
        moments = max(moments, size * (halves + together * cuda_relay.totals_of(rows, dims, width, stride)))
    if traded:
        moments += size * cuda_trade.totals_of(columns, dims, width, stride)
        # what wound lines need is gone before
        if cuda_coil.pitch(tracks):
            moments = max(moments, size * cuda_reel.room_of(rows, columns, dims, width))
    if not backward and cuda_coil.pitch(tracks):
        moments += size * cuda_coil.room_of(dims, width, stride)
    # rows are copied where warps take more channels than there are
    copies = (stride > channels) * (rows + 2 * columns if backward else rows + columns)
    inputs = problems * ((rows + columns) * dims + columns * channels) * size
    sums = kept * problems * rows * (channels + 1) * size
    # less what is small and what an allocator adds
    left = max(max(least, inputs * 15 // 16) - sums, least // 4)
    return room.groups(problems, lines + moments + copies * stride * size, left)


def forward(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, terms: Terms, bandwidth: Bandwidth, kept: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums of values and of weights for all queries, see `cpu.forward`, and no argsorts."""
    sums = _sums(query, key, value, weight, terms, bandwidth, kept)
    nothing = (query.new_empty(query.shape[0], query.shape[2], 0, dtype=torch.int32) for _ in range(2))
    return *sums, *nothing


def _sums(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    terms: Terms,
    bandwidth: Bandwidth,
    kept: bool,
    unfit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What is no finite number is counted in `unfit (P, group)`, but for float64."""
    # once, as next to a short call it takes its time
    tracks = tracks_of(terms, False)
    parts = _groups_for(query, value, tracks, False, kept)
    wound = cuda_coil.serves(tracks, query, key, value)

    def sort(some: slice, looked: Tensor | None, extra: Tensor | None, tau: Bandwidth) -> tuple[Lines, Lines]:
        around = cuda_coil.wind(tracks, key[some], query[some], extra, tau) if wound else None
        return sort_both(key[some], query[some], looked, around)

    # at once, so that the GPU is busy while the host goes on
    lines = sort(slice(None), unfit, weight, bandwidth) if len(parts) == 1 else None
    dtype, (problems, rows, _) = working_type(query.dtype), query.shape
    sums = torch.empty(problems, rows, value.shape[2], dtype=dtype, device=query.device)
    total = torch.empty(problems, rows, dtype=dtype, device=query.device)
    if lines:
        _sum(Walk(tracks, *lines, value, weight, bandwidth), terms.constant, sums, total, unfit)
        return sums, total
    for some in parts:
        looked = None if unfit is None else unfit[some]
        extra = None if weight is None else weight[some]
        tau = bandwidth if isinstance(bandwidth, float) else bandwidth[some]
        # without a name they are gone before the next group is sorted
        _sum(
            Walk(tracks, *sort(some, looked, extra, tau), value[some], extra, tau), terms.constant, sums[some],
            total[some], looked,
        )  # fmt: skip
    return sums, total


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
    """Normalised sums `(P, M, C)` of queries `(P, group * M, D)`, NaN in heads that are not all finite; no gradients.

    All are float32, or of 16 bits where rows are taken as they are.
    """
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    looked = None
    if query.dtype == torch.float64:
        unfit = _unfit(query, key, value, group)
    else:
        unfit = looked = torch.zeros(query.shape[0], group, dtype=torch.int32, device=query.device)
    sums, total = _sums(query, key, value, weight, terms, bandwidth, False, looked)
    rows = sums if query.dtype == sums.dtype else torch.empty(sums.shape, dtype=query.dtype, device=sums.device)
    return divide_on_gpu(sums, total, unfit, floor, rows)


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
    walk = Walk(tracks_of(terms, mirrored), sources, targets, rows, extra, bandwidth)
    if into is None:
        into = walk.empty(walk.number, rows.shape[2]), walk.empty(walk.number)
    _sum(walk, terms.constant, *into, None)
    return into


def _sum(walk: Walk, constant: float, sums: Tensor, total: Tensor, unfit: Tensor | None) -> None:
    """Fills `sums` and `total`; heads whose rows are not all finite are marked in `unfit (P, group)`."""
    out = walk.room(sums)
    walk.sum(constant, out, total, unfit)
    _deliver(out, sums)


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
    walk = Walk(tracks_of(terms, mirrored), sources, targets, rows, extra, bandwidth)
    products = (walk.empty(walk.number, walk.dims) if into is None else into).zero_()
    walk.run(None, None, walk.padded(other), other_extra, products)
    return products.mul_(factors if isinstance(factors, float) else factors.to(products.dtype)[:, None, None])


def gradients(
    queries: Lines,
    keys: Lines,
    grad: Tensor,
    grad_extra: Tensor,
    value: Tensor,
    weight: Tensor | None,
    terms: Terms,
    slope: Terms,
    bandwidth: Bandwidth,
    into: tuple[Tensor, Tensor, Tensor, Tensor],
    ties: bool = False,
) -> None:
    """All of them, see `cpu.gradients`; one walk does for those of keys, values and weights, or for all.

    Where many queries are equal to keys, settling these by themselves takes longer than a walk more.
    """
    by_query, by_key, by_value, by_weight = into
    ordered = torch.are_deterministic_algorithms_enabled()
    tracks = tracks_of(terms, mirrored=False, slopes=True)
    together = cuda_mutual.serves(tracks, value.dtype) and not (ordered or ties)
    traded = cuda_trade.serves(tracks, value.dtype) and not (ordered or ties)
    if not (together or traded):
        dot(
            keys, queries, value, weight, grad, grad_extra, slope, bandwidth, mirrored=False, factors=1.0 / bandwidth,
            into=by_query,
        )  # fmt: skip
    if not together:
        tracks = tracks_of(terms, mirrored=True, slopes=True)
    walk = Walk(tracks, queries, keys, grad, grad_extra, bandwidth)
    out = walk.begin(terms.constant, walk.room(by_value), by_weight)
    if together or traded:
        along = _stands_along(walk.count, walk.number, walk.dims, walk.width, room.device(value.device).cache)
        products = (
            [torch.zeros_like(lines.places) for lines in (keys, queries)]
            if along
            else [by_key.zero_(), by_query.zero_()]
        )
        if together:
            there = Walk(tracks, keys, queries, value, weight, bandwidth)
            cuda_mutual.run(there, walk, along, out, by_weight, *products)
        else:
            cuda_trade.run(walk, walk.padded(value), weight, along, out, by_weight, *products)
        if along:
            for part, lines, into in zip(products, (keys, queries), (by_key, by_query), strict=True):
                _from_lines(part, lines, into)
    else:
        walk.run(out, by_weight, walk.padded(value), weight, by_key.zero_())
    _deliver(out, by_value)


def _stands_along(rows: int, columns: int, dims: int, width: int, cache: int) -> bool:
    """Whether gradients of queries and keys are made in the order of their lines, and put to their places afterwards.

    Added to at random they take room in the second-level cache, which may be too small for them and the rows of a head:
    of queries, keys, and the gradients of values.
    """
    return 4 * ((rows + 2 * columns) * width + (rows + columns) * dims) > cache


def _from_lines(along: Tensor, lines: Lines, into: Tensor) -> None:
    """Numbers `(P, D, N)` in the order of their lines, to where their points are, `(P, N, D)`; see deliver.cu."""
    problems, dims, count = along.shape
    blocks = problems * dims * math.ceil(count / (256 * _EACH))
    with launch.on(along.device):
        launch.Kernel(_DELIVER, "deliver", (("EACH", _EACH),))(
            (blocks,), 256, along, lines.order, into.zero_(), count, dims
        )


def _deliver(out: Tensor, into: Tensor) -> None:
    """Sums to where they are wanted, if they are not there: without what was padded."""
    if out is not into:
        into.copy_(out[..., : into.shape[2]])
