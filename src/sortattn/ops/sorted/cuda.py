"""The sorted backend on NVIDIA GPUs: the walker of walk.cu, launched for heads, blocks of channels and both sides."""

import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from ...cuda.launch import Kernel
from ...kernels import Terms
from .lines import Points

_SOURCE = Path(__file__).with_name("walk.cu")
# as in walk.cu
_BLOCK = 128
# sorted targets that one warp walks: at most, and at least where there are few of them
_LONG, _SHORT = 1024, 128
# warps that keep a large GPU busy
_BUSY = 8192
# bytes of moments that a launch may take; heads beyond wait for the next one
_WORKSPACE = 256 << 20
_STRICT, _HALF, _INCLUSIVE = range(3)


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
    """The terms of one side, and whether lines are walked from the other end for it."""

    def __init__(self, nodes: Tensor, below: Tensor, rate: float, compact: bool, ties: int, mirrored: bool):
        self.numbers = (*nodes.tolist(), *below.flatten().tolist(), rate)
        self.nodes, self.powers = below.shape
        self.rate, self.compact, self.ties, self.mirrored = bool(rate), compact, ties, mirrored


def _sides(terms: Terms, mirrored: bool) -> list[_Side]:
    jumps = bool(terms.below[:, 0].any() or terms.above[:, 0].any())
    if not terms.above.any():
        ties = _HALF if jumps else _STRICT
        return [_Side(terms.nodes, terms.below, terms.rate, terms.compact, ties, mirrored)]
    # where both sides give a tie the same, one of them has it whole
    agreed = torch.equal(terms.below[:, 0], terms.above[:, 0])
    ties = (_STRICT, _INCLUSIVE) if agreed else (_HALF, _HALF)
    return [
        _Side(terms.nodes, terms.below, terms.rate, terms.compact, ties[0], mirrored),
        _Side(terms.nodes, terms.above, terms.rate, terms.compact, ties[1], not mirrored),
    ]


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
    if not (problems and number and dims and stride):
        return
    ordered = torch.are_deterministic_algorithms_enabled()
    defines = _defines(side, rows.dtype, width, products is not None, ordered)
    table = _table(side.numbers, rows.device)
    blocks, parts = math.ceil(count / _BLOCK), stride // width
    size = side.powers * (width + 1) * blocks * dims * parts
    together = min(problems, max(1, _WORKSPACE // (8 * max(size, 1))))
    moments = torch.empty(together * size, dtype=torch.float64, device=rows.device)
    warps = dict(defines)["WARPS"]
    mirrored = int(side.mirrored)
    with torch.cuda.device(rows.device):
        for first in range(0, problems, together):
            heads = min(together, problems - first)
            some = slice(first, first + heads)
            pieces = (sources.points, sources.order, targets.points, targets.order, rows, extra, bandwidth)
            points, order, places, target_order, row, weight, tau = (piece[some] for piece in pieces)
            if count:
                Kernel(_SOURCE, "summarise", defines)(
                    (math.ceil(heads * dims * blocks / warps), parts), 32 * warps, points, order, row, weight, table,
                    tau, moments, heads, count, dims, stride, mirrored,
                )  # fmt: skip
                Kernel(_SOURCE, "accumulate", defines)(
                    (math.ceil(heads * dims / warps), parts), 32 * warps, points, order, table, tau, moments, heads,
                    count, dims, mirrored,
                )  # fmt: skip
            length = _length(number, heads * dims * parts)
            segments = math.ceil(number / length)
            # without atomics, dimension by dimension: a target then has one warp at a time
            for start, some_dims in ((d, 1) for d in range(dims)) if ordered and products is None else ((0, dims),):
                Kernel(_SOURCE, "walk", defines)(
                    (math.ceil(heads * some_dims * segments / warps), parts), 32 * warps, points, order, places,
                    target_order, row, weight, table, tau, moments, out[some], out_extra[some],
                    None if products is None else products[some], heads, count, number, dims, stride, mirrored, length,
                    start, some_dims,
                )  # fmt: skip


def _defines(side: _Side, dtype: torch.dtype, width: int, products: bool, ordered: bool):
    real = "float" if dtype == torch.float32 else "double"
    row = width * dtype.itemsize
    # shared memory: a ring of rows for every node, and one for the targets
    ring = 8
    while (side.nodes + products) * ring * row > 48 << 10:
        ring //= 2
    if ring < 2:
        raise RuntimeError(f"the sorted backend takes kernels of up to {(24 << 10) // row - 1} nodes, got {side.nodes}")
    warps = 4
    while warps * (side.nodes + products) * ring * row > 48 << 10:
        warps //= 2
    return (
        ("REAL", real),
        ("VEC", width // 32),
        ("NODES", side.nodes),
        ("POWERS", side.powers),
        ("RATE", int(side.rate)),
        ("COMPACT", int(side.compact)),
        ("TIES", side.ties),
        ("PRODUCTS", int(products)),
        ("WEIGHTED", 1),
        ("ORDERED", int(ordered)),
        ("WARPS", warps),
        ("RING", ring),
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
