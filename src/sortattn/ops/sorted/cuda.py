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

_SOURCE = Path(__file__).with_name("walk.cu")
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
    for first in range(0, problems, together):
        some = slice(first, first + together)
        # what is no finite number stands at zero, as in walk.cu; adding zero turns -0.0 into 0.0
        lines = points[some].nan_to_num(0.0, 0.0, 0.0).add_(0.0).transpose(1, 2).contiguous()
        order[some] = lines.sort(dim=-1).indices
    return order


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
    for side in _sides(terms, mirrored):
        _walk(side, sources, targets, rows, extra, bandwidth, out, out_extra, None)
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
    for side in _sides(terms, mirrored):
        _walk(side, sources, targets, rows, extra, bandwidth, other, other_extra, products)
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
    side: _Side,
    sources: Points,
    targets: Points,
    rows: Tensor,
    extra: Tensor,
    bandwidth: Tensor,
    out: Tensor,
    out_extra: Tensor,
    products: Tensor | None,
) -> None:
    problems, count, dims = sources.points.shape
    number, stride = targets.points.shape[1], rows.shape[2]
    width = _width(stride, rows.dtype)
    if not (problems and number and count and dims and stride):
        return
    ordered = torch.are_deterministic_algorithms_enabled()
    defines = _defines(side, rows.dtype, width, products is not None, ordered)
    table = _table(side.numbers, rows.device)
    warps, mirrored = dict(defines)["WARPS"], int(side.mirrored)
    blocks, parts = math.ceil(count / _BLOCK), stride // width
    size = side.powers * (width + 1) * blocks * dims * parts
    together = min(problems, max(1, _WORKSPACE // (8 * size + rows.element_size() * (count + number) * dims)))
    moments = torch.empty(together * size, dtype=torch.float64, device=rows.device)
    with torch.cuda.device(rows.device):
        for first in range(0, problems, together):
            heads = min(together, problems - first)
            some = slice(first, first + heads)
            order, target_order, row, weight, tau = (
                part[some] for part in (sources.order, targets.order, rows, extra, bandwidth)
            )
            places, target_places = (
                _arrange(*(part[some] for part in points), defines) for points in (sources, targets)
            )
            Kernel(_SOURCE, "summarise", defines)(
                (math.ceil(heads * dims * blocks / warps), parts), 32 * warps, places, order, row, weight, table, tau,
                moments, heads * dims, count, dims, stride, mirrored,
            )  # fmt: skip
            Kernel(_SOURCE, "accumulate", defines)(
                (math.ceil(heads * dims / warps), parts), 32 * warps, places, order, table, tau, moments, heads * dims,
                count, dims, mirrored,
            )  # fmt: skip
            length = _length(number, heads * dims * parts)
            segments = math.ceil(number / length)
            # without atomics, dimension by dimension: a target then has one warp at a time
            for start, some_dims in ((d, 1) for d in range(dims)) if ordered and products is None else ((0, dims),):
                Kernel(_SOURCE, "walk", defines)(
                    (math.ceil(heads * some_dims * segments / warps), parts), 32 * warps, places, order, target_places,
                    target_order, row, weight, table, tau, moments, out[some], out_extra[some],
                    None if products is None else products[some], heads, count, number, dims, stride, mirrored, length,
                    start, some_dims,
                )  # fmt: skip


def _arrange(points: Tensor, order: Tensor, defines: Defines) -> Tensor:
    places = torch.empty(order.shape, dtype=points.dtype, device=points.device)
    _, dims, count = order.shape
    grid = (min(math.ceil(places.numel() / 256), 1 << 20),)
    Kernel(_SOURCE, "arrange", defines)(grid, 256, points, order, places, places.numel(), count, dims)
    return places


def _defines(side: _Side, dtype: torch.dtype, width: int, products: bool, ordered: bool) -> Defines:
    # shared memory: a batch of rows for every warp
    warps = 4 if width * dtype.itemsize <= 256 else 2
    return (
        ("REAL", "float" if dtype == torch.float32 else "double"),
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
