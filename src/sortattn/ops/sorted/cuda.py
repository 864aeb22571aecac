"""The sorted backend on NVIDIA GPUs: the walker of walk.cu, launched for heads, blocks of channels and both sides."""

import functools
import math
from pathlib import Path

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
_BLOCK = 256
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
    together = max(1, _WORKSPACE // max(1, 16 * count * dims))
    with torch.cuda.device(points.device):
        for first in range(0, problems, together):
            some = slice(first, first + together)
            lines = points[some].transpose(1, 2).contiguous()
            if points.dtype == torch.float32:
                _sort_lines(lines, order[some])
            else:
                # what is no finite number stands at zero, as in the kernels; adding zero turns -0.0 into 0.0
                order[some] = lines.nan_to_num_(0.0, 0.0, 0.0).add_(0.0).sort(dim=-1, stable=True).indices
    return order


def _sort_lines(lines: Tensor, order: Tensor) -> None:
    """Write the argsort of every line of `lines (P, D, N)` to `order`; the lines are work space afterwards."""
    count = lines.shape[2]
    number = lines.numel() // max(count, 1)
    if not lines.numel():
        return
    items = next(items for items in (1, 2, 4, 8, _ITEMS) if count <= 1024 * items or items == _ITEMS)
    length = 1024 * items
    runs = math.ceil(count / length)
    defines = (("ITEMS", items),)
    shared = length * 6 + 32 * 256 * 2 + (256 + 32) * 4
    rounds = max(0, math.ceil(math.log2(runs)))
    # sorted runs and merged ones take turns in two buffers, such that the last one is `order`
    spare = torch.empty_like(order) if rounds else order
    places = torch.empty_like(lines)
    here, there = (order, spare) if rounds % 2 == 0 else (spare, order)
    Kernel(_SORT, "sort_runs", defines)((number * runs,), 1024, lines, here, places, count, runs, shared=shared)
    while length < count:
        jobs = number * math.ceil(count / 8)
        Kernel(_SORT, "merge_runs", defines)(
            (math.ceil(jobs / 256),), 256, here, places, there, lines, number, count, length
        )
        here, there, places, lines = there, here, lines, places
        length *= 2


def scatter(
    sources: Points, targets: Points, rows: Tensor, extra: Tensor, terms: Terms, bandwidth: Tensor, mirrored: bool
) -> tuple[Tensor, Tensor]:
    """Sum `rows (P, N, C)` and `extra (P, N)` of the sources for the targets, see `cpu.scatter`."""
    problems, number, _ = targets.points.shape
    channels = rows.shape[2]
    width = _width(channels, rows.dtype)
    rows = _padded(rows, width)
    out = torch.zeros(problems, number, rows.shape[2], dtype=rows.dtype, device=rows.device)
    out_extra = torch.zeros(problems, number, dtype=rows.dtype, device=rows.device)
    _walk(_sides(terms, mirrored), sources, targets, rows, extra, bandwidth, out, out_extra, None)
    return out[..., :channels], out_extra


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
    problems, number, dims = targets.points.shape
    width = _width(rows.shape[2], rows.dtype)
    rows, other = _padded(rows, width), _padded(other, width)
    products = torch.zeros(problems, number, dims, dtype=rows.dtype, device=rows.device)
    _walk(_sides(terms, mirrored), sources, targets, rows, extra, bandwidth, other, other_extra, products)
    return products.mul_(factors.to(products.dtype)[:, None, None])


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


def _walk(
    sides: list[_Side],
    sources: Points,
    targets: Points,
    rows: Tensor,
    extra: Tensor,
    bandwidth: Tensor,
    out: Tensor,
    out_extra: Tensor,
    products: Tensor | None,
) -> None:
    """Walk along all lines for all sides, as many heads at a time as the work space has room for."""
    problems, count, dims = sources.points.shape
    number, stride = targets.points.shape[1], rows.shape[2]
    width = _width(stride, rows.dtype)
    if not (problems and number and count and dims and stride):
        return
    bandwidth, extra, out_extra = (part.contiguous() for part in (bandwidth, extra, out_extra))
    ordered = torch.are_deterministic_algorithms_enabled()
    blocks, parts = math.ceil(count / _BLOCK), stride // width
    size = max(side.powers for side in sides) * (width + 1) * blocks * dims * parts
    together = min(problems, max(1, _WORKSPACE // (8 * size + rows.element_size() * (count + number) * dims)))
    moments = torch.empty(together * size, dtype=torch.float64, device=rows.device)
    with torch.cuda.device(rows.device):
        for first in range(0, problems, together):
            heads = min(together, problems - first)
            some = slice(first, first + heads)
            lines, length = heads * dims, _length(number, heads * dims * parts)
            segments = math.ceil(number / length)
            row, weight, tau, into, into_extra = (part[some] for part in (rows, extra, bandwidth, out, out_extra))
            into_products = None if products is None else products[some]
            order, target_order = sources.order[some], targets.order[some]
            places, target_places = (_arrange(part.points[some], part.order[some]) for part in (sources, targets))
            for side in sides:
                defines = _defines(side, rows.dtype, width, products is not None, ordered)
                table, mirrored, warps = _table(side.numbers, rows.device), int(side.mirrored), dict(defines)["WARPS"]
                Kernel(_WALK, "summarise", defines)(
                    (math.ceil(lines * blocks / warps), parts), 32 * warps, places, order, row, weight, table, tau,
                    moments, lines, count, dims, stride, mirrored,
                )  # fmt: skip
                Kernel(_WALK, "accumulate", defines)(
                    (math.ceil(lines / warps), parts), 32 * warps, places, order, table, tau, moments, lines, count,
                    dims, mirrored,
                )  # fmt: skip
                # without atomics, dimension by dimension: a target then has one warp at a time
                for start, some_dims in ((d, 1) for d in range(dims)) if ordered and products is None else ((0, dims),):
                    Kernel(_WALK, "walk", defines)(
                        (math.ceil(heads * some_dims * segments / warps), parts), 32 * warps, places, order,
                        target_places, target_order, row, weight, table, tau, moments, into, into_extra, into_products,
                        heads, count, number, dims, stride, mirrored, length, start, some_dims,
                    )  # fmt: skip


def _arrange(points: Tensor, order: Tensor) -> Tensor:
    """The coordinates of `points (P, N, D)` in the order `(P, D, N)`."""
    places = torch.empty(order.shape, dtype=points.dtype, device=points.device)
    _, dims, count = order.shape
    grid = (min(math.ceil(places.numel() / 256), 1 << 20),)
    Kernel(_ARRANGE, "arrange", (("REAL", _REALS[points.dtype]),))(
        grid, 256, points, order, places, places.numel(), count, dims
    )
    return places


def _defines(side: _Side, dtype: torch.dtype, width: int, products: bool, ordered: bool) -> Defines:
    # shared memory: rows of thirty-two items for every warp, and the items of a batch
    each = 32 * width * dtype.itemsize + 32 * (side.nodes + 1) * (side.powers + 5) * dtype.itemsize
    warps = 4
    while warps > 1 and warps * each > 48 << 10:
        warps //= 2
    if each > 48 << 10:
        raise RuntimeError(f"the sorted backend has no room for {side.nodes} nodes on this device; use backend='tiled'")
    return (
        ("REAL", _REALS[dtype]),
        ("VEC", width // 32),
        ("NODES", side.nodes),
        ("POWERS", side.powers),
        ("TIES", side.ties),
        ("RATE", int(side.rate)),
        ("COMPACT", int(side.compact)),
        ("PRODUCTS", int(products)),
        ("WEIGHTED", 1),
        ("ORDERED", int(ordered)),
        ("WARPS", warps),
    )


def _width(channels: int, dtype: torch.dtype) -> int:
    """Channels that a warp takes: 32, 64 or 128."""
    if channels <= 32:
        return 32
    return 64 if channels <= 64 or dtype == torch.float64 else 128


def _padded(rows: Tensor, width: int) -> Tensor:
    missing = -rows.shape[2] % width
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows.contiguous()


def _length(number: int, lines: int) -> int:
    """Targets of a warp, a multiple of 32."""
    wanted = number * lines / _BUSY
    return max(_SHORT, min(_LONG, math.ceil(wanted / 32) * 32))


@functools.lru_cache(maxsize=256)
def _table(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=device)
