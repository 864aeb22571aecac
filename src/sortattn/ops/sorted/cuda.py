"""The sorted backend on NVIDIA GPUs: the walker of walk.cu, launched for heads, blocks of channels and both sides."""

import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...cuda.compile import Defines
from ...cuda.launch import Kernel
from ...kernels import Terms
from .lines import Points

_WALK, _SORT, _ARRANGE = (Path(__file__).with_name(f"{name}.cu") for name in ("walk", "sort", "arrange"))
_REALS = {torch.float32: "float", torch.float64: "double"}
# keys of a thread of a block that sorts, at most: sixteen thousand in its shared memory
_ITEMS = 16
# as in walk.cu
_BLOCK, _WARPS = 256, 4
# sorted targets that one warp walks: at most, and at least where there are few of them
_LONG, _SHORT = 1024, 128
# warps that keep a large GPU busy
_BUSY = 8192
# bytes of moments that a launch may take; heads beyond wait for the next one
_WORKSPACE = 256 << 20


def sort(points: Tensor) -> Tensor:
    """The argsort `(P, D, N)`, int32, of every dimension of `points (P, N, D)`."""
    problems, count, dims = points.shape
    order = torch.empty(problems, dims, count, dtype=torch.int32, device=points.device)
    for some in _groups(problems, 16 * count * dims):
        _sort(points[some], order[some])
    return order


def forward(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, terms: Terms, bandwidth: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums of values and of weights for all queries, and the argsorts of queries and keys, see `cpu.forward`."""
    problems, _, dims = query.shape
    query_order, key_order = (
        torch.empty(problems, dims, points.shape[1], dtype=torch.int32, device=points.device) for points in (query, key)
    )
    walk = _Walk(_sides(terms, False), value, weight, bandwidth, query.shape[1:])
    out, out_extra = walk.nothing()
    for some in walk.groups():
        keys = _Lines(_sort(key[some], key_order[some]), key_order[some])
        queries = _Lines(_sort(query[some], query_order[some]), query_order[some])
        walk.run(some, keys, queries, out, out_extra, None)
    return out[..., : value.shape[2]], out_extra, query_order, key_order


def scatter(
    sources: Points, targets: Points, rows: Tensor, extra: Tensor, terms: Terms, bandwidth: Tensor, mirrored: bool
) -> tuple[Tensor, Tensor]:
    """Sum `rows (P, N, C)` and `extra (P, N)` of the sources for the targets, see `cpu.scatter`."""
    walk = _Walk(_sides(terms, mirrored), rows, extra, bandwidth, targets.points.shape[1:])
    out, out_extra = walk.nothing()
    for some in walk.groups():
        walk.run(some, _arrange(sources, some), _arrange(targets, some), out, out_extra, None)
    return out[..., : rows.shape[2]], out_extra


def dot(
    sources: Points,
    targets: Points,
    rows: Tensor,
    extra: Tensor,
    other: Tensor,
    other_extra: Tensor,
    terms: Terms,
    bandwidth: Tensor,
    mirrored: bool,
    factors: Tensor,
) -> Tensor:
    """The sums of `scatter` along each dimension by itself, multiplied with rows of the targets, see `cpu.dot`."""
    walk = _Walk(_sides(terms, mirrored), rows, extra, bandwidth, targets.points.shape[1:])
    products = torch.zeros(targets.points.shape, dtype=rows.dtype, device=rows.device)
    other, other_extra = walk.padded(other), other_extra.contiguous()
    for some in walk.groups():
        walk.run(some, _arrange(sources, some), _arrange(targets, some), other, other_extra, products)
    return products.mul_(factors.to(products.dtype)[:, None, None])


class _Lines(NamedTuple):
    """Sorted coordinates `(P, D, N)` of some heads, and the indices of the points they belong to."""

    places: Tensor
    order: Tensor


def _sort(points: Tensor, order: Tensor) -> Tensor:
    """Write the argsort of some heads to `order`; returns the sorted coordinates."""
    if points.dtype == torch.float32 and points.numel():
        return _sort_lines(points, order)
    # what is no finite number stands at zero, as in the kernels; adding zero turns -0.0 into 0.0
    lines = points.nan_to_num(0.0, 0.0, 0.0).add_(0.0).transpose(1, 2).contiguous()
    places, indices = lines.sort(dim=-1, stable=True)
    order.copy_(indices)
    return places


def _sort_lines(points: Tensor, order: Tensor) -> Tensor:
    heads, count, dims = points.shape
    items = next(items for items in (1, 2, 4, 8, _ITEMS) if count <= 1024 * items or items == _ITEMS)
    length = 1024 * items
    runs = math.ceil(count / length)
    defines = (("ITEMS", items),)
    shared = length * 6 + 32 * 256 * 2 + (256 + 32) * 4
    rounds = math.ceil(math.log2(runs))
    # sorted runs and merged ones take turns in two buffers, such that the last one is `order`
    spare = torch.empty_like(order) if rounds else order
    here, there = (order, spare) if rounds % 2 == 0 else (spare, order)
    places = torch.empty(order.shape, dtype=points.dtype, device=points.device)
    other_places = torch.empty_like(places) if rounds else places
    with torch.cuda.device(points.device):
        Kernel(_SORT, "sort_runs", defines)(
            (heads * dims * runs,), 1024, points, here, places, count, dims, runs, shared=shared
        )
        while length < count:
            grid = (math.ceil(heads * dims * math.ceil(count / 8) / 256),)
            Kernel(_SORT, "merge_runs", defines)(
                grid, 256, here, places, there, other_places, heads * dims, count, length
            )
            here, there, places, other_places = there, here, other_places, places
            length *= 2
    return places


def _arrange(points: Points, some: slice) -> _Lines:
    """The coordinates of some heads in their order."""
    coordinates, order = points.points[some], points.order[some]
    places = torch.empty(order.shape, dtype=coordinates.dtype, device=order.device)
    _, dims, count = order.shape
    with torch.cuda.device(order.device):
        grid = (min(math.ceil(places.numel() / 256), 1 << 20),)
        Kernel(_ARRANGE, "arrange", (("REAL", _REALS[coordinates.dtype]),))(
            grid, 256, coordinates, order, places, places.numel(), count, dims
        )
    return _Lines(places, order)


def _groups(problems: int, size: int) -> list[slice]:
    """As many heads at a time as the work space has room for, of `size` bytes each."""
    together = max(1, _WORKSPACE // max(size, 1))
    return [slice(first, min(first + together, problems)) for first in range(0, problems, together)]


class _Side:
    """The terms of one side: at which nodes a tie counts, and whether lines are walked from the other end for it."""

    def __init__(self, nodes: Tensor, below: Tensor, ties: list[bool], terms: Terms, mirrored: bool):
        self.numbers = (*nodes.tolist(), *below.flatten().tolist(), terms.rate)
        self.nodes, self.powers = below.shape
        self.ties = sum(1 << j for j, counts in enumerate(ties) if counts)
        self.rate, self.compact, self.mirrored = bool(terms.rate), terms.compact, mirrored


def _sides(terms: Terms, mirrored: bool) -> list[_Side]:
    nodes, below, above = terms.nodes, terms.below, terms.above
    if above.any():
        # of a tie both sides have half: that is all for one of them where they agree, and nothing where they cancel
        constants = below[:, 0], above[:, 0]
        whole = torch.equal(*constants)
        if whole or torch.equal(constants[0], -constants[1]):
            return [
                _Side(nodes, below, [False] * len(nodes), terms, mirrored),
                _Side(nodes, above, [whole] * len(nodes), terms, not mirrored),
            ]
        return [_halved(nodes, below, terms, mirrored), _halved(nodes, above, terms, not mirrored)]
    if below[:, 0].any():
        return [_halved(nodes, below, terms, mirrored)]
    return [_Side(nodes, below, [False] * len(nodes), terms, mirrored)]


def _halved(nodes: Tensor, below: Tensor, terms: Terms, mirrored: bool) -> _Side:
    """Every node twice with half the coefficients, once with and once without ties."""
    twice = below.repeat_interleave(2, 0) / 2
    return _Side(nodes.repeat_interleave(2), twice, [True, False] * len(nodes), terms, mirrored)


class _Walk:
    """A sum of rows `(P, N, C)` for `targets (M, D)`, taken some heads at a time."""

    def __init__(self, sides: list[_Side], rows: Tensor, extra: Tensor, bandwidth: Tensor, targets: tuple[int, int]):
        self.sides = sides
        self.width = _width(rows.shape[2], rows.dtype)
        self.rows, self.extra, self.bandwidth = self.padded(rows), extra.contiguous(), bandwidth.contiguous()
        self.number, self.dims = targets
        self.problems, self.count, self.stride = self.rows.shape
        self.blocks, self.parts = math.ceil(self.count / _BLOCK), self.stride // self.width
        # of one head
        self.size = max(side.powers for side in sides) * (self.width + 1) * self.blocks * self.dims * self.parts

    def padded(self, rows: Tensor) -> Tensor:
        """Rows with as many channels as warps take together."""
        missing = -rows.shape[2] % self.width
        return torch.nn.functional.pad(rows, (0, missing)) if missing else rows.contiguous()

    def nothing(self) -> tuple[Tensor, Tensor]:
        """Zeros to add the sums to."""
        out = self.rows.new_zeros(self.problems, self.number, self.stride)
        return out, self.rows.new_zeros(self.problems, self.number)

    def groups(self) -> list[slice]:
        """The heads that are taken together."""
        if not (self.number and self.count and self.dims and self.stride):
            return []
        return _groups(
            self.problems, 8 * self.size + 3 * self.rows.element_size() * (self.count + self.number) * self.dims
        )

    def run(
        self, some: slice, sources: _Lines, targets: _Lines, out: Tensor, out_extra: Tensor, products: Tensor | None
    ) -> None:
        """Walk along the lines of some heads, for all sides."""
        heads, count, number, dims = some.stop - some.start, self.count, self.number, self.dims
        lines, blocks, parts = heads * dims, self.blocks, self.parts
        length = _length(number, lines * parts)
        segments = math.ceil(number / length)
        row, extra, tau, out, out_extra = (
            part[some] for part in (self.rows, self.extra, self.bandwidth, out, out_extra)
        )
        products = None if products is None else products[some]
        moments = torch.empty(heads * self.size, dtype=torch.float64, device=row.device)
        ordered = torch.are_deterministic_algorithms_enabled()
        with torch.cuda.device(row.device):
            for side in self.sides:
                defines = _defines(side, row.dtype, self.width, products is not None, ordered)
                table, mirrored = _table(side.numbers, row.device), int(side.mirrored)
                Kernel(_WALK, "summarise", defines)(
                    (math.ceil(lines * blocks / _WARPS), parts), 32 * _WARPS, *sources, row, extra, table, tau, moments,
                    lines, count, dims, self.stride, mirrored,
                )  # fmt: skip
                Kernel(_WALK, "accumulate", defines)(
                    (math.ceil(lines / _WARPS), parts), 32 * _WARPS, *sources, table, tau, moments, lines, count, dims,
                    mirrored,
                )  # fmt: skip
                # without atomics, dimension by dimension: a target then has one warp at a time
                for start, some_dims in ((d, 1) for d in range(dims)) if ordered and products is None else ((0, dims),):
                    Kernel(_WALK, "walk", defines)(
                        (heads * some_dims * segments, parts), 32, *sources, *targets, row,
                        extra, table, tau, moments, out, out_extra, products, heads, count, number, dims, self.stride,
                        mirrored, length, start, some_dims,
                    )  # fmt: skip


def _defines(side: _Side, dtype: torch.dtype, width: int, products: bool, ordered: bool) -> Defines:
    # shared memory: rows of thirty-two items, and all items of a batch
    each = 32 * width * dtype.itemsize + 32 * (side.nodes + 1) * (side.powers + 6) * dtype.itemsize
    if each > 48 << 10:
        raise RuntimeError(f"the sorted backend has no room for {side.nodes} nodes on a GPU; use backend='tiled'")
    return (
        ("REAL", _REALS[dtype]),
        ("VEC", width // 32),
        ("NODES", side.nodes),
        ("POWERS", side.powers),
        ("TIES", side.ties),
        ("RATE", int(side.rate)),
        ("COMPACT", int(side.compact)),
        ("PRODUCTS", int(products)),
        ("ORDERED", int(ordered)),
    )


def _width(channels: int, dtype: torch.dtype) -> int:
    """Channels that a warp takes: 32, 64 or 128."""
    if channels <= 32:
        return 32
    return 64 if channels <= 64 or dtype == torch.float64 else 128


def _length(number: int, lines: int) -> int:
    """Targets of a warp, a multiple of 32."""
    wanted = number * lines / _BUSY
    return max(_SHORT, min(_LONG, math.ceil(wanted / 32) * 32))


@functools.lru_cache(maxsize=256)
def _table(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=device)
