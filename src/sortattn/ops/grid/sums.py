"""The three sums of a grid, in torch operations: from points to nodes, from nodes to points, and derivatives.

Points `(P, N, D)`, rows `(P, N, C)`, nodes `(P, D, G)`, bandwidth `(P,)`, tables `(P, D, G, C)`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .weights import Cells, Slopes, bandwidth_slopes, cells, slopes

# numbers in the largest intermediate
_BLOCK = 1 << 22


def collect(points: Tensor, rows: Tensor, nodes: Tensor, bandwidth: Tensor, exponential: bool) -> Tensor:
    """`S_dg = sum_n w_g(t_nd) v_n`, a table: what the keys leave on the nodes."""
    problems, dims, count = nodes.shape
    length, channels = rows.shape[1:]
    table = rows.new_zeros(problems, dims, count, channels)
    for some in _dims(dims, problems * length * channels):
        found = cells(*_lines(points, nodes, bandwidth, some), exponential)
        part = rows.new_zeros(found.index.shape[0] * found.index.shape[1] * count, channels)
        for place, share in _flat(found, count):
            part.index_add_(0, place.flatten(), (share[..., None] * rows[:, None]).flatten(0, 2))
        table[:, some] = part.view(problems, found.index.shape[1], count, channels)
    return table


def read(points: Tensor, table: Tensor, nodes: Tensor, bandwidth: Tensor, exponential: bool) -> Tensor:
    """`z_m = sum_d sum_g w_g(s_md) F_dg`, `(P, M, C)`: what the queries read off the nodes."""
    problems, rows, dims = points.shape
    count, channels = table.shape[2:]
    if not problems * rows:
        return table.new_zeros(problems, rows, channels)
    step = max(1, _BLOCK // (4 * problems * dims))
    parts = []
    for m in range(0, rows, step):
        lines = _lines(points[:, m : m + step], nodes, bandwidth, slice(None))
        places, shares = zip(*_flat(cells(*lines, exponential), count), strict=True)
        # (P, D, M) twice -> a bag of 2 D table rows for every query
        bags, factors = (
            torch.stack(both, -1).permute(0, 2, 1, 3).flatten(2).flatten(0, 1) for both in (places, shares)
        )
        found = torch.nn.functional.embedding_bag(bags, table.flatten(0, 2), mode="sum", per_sample_weights=factors)
        parts.append(found.view(problems, -1, channels))
    return torch.cat(parts, 1)


def differentiate(
    points: Tensor, rows: Tensor, table: Tensor, nodes: Tensor, bandwidth: Tensor, exponential: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of `sum_nd sum_g w_g(t_nd) <v_n, F_dg>` by the points `(P, N, D)` and the bandwidth `(P,)`.

    On a node the derivative is the mean of those of both sides.
    """
    problems, dims, count = nodes.shape
    by_points = torch.empty_like(points, memory_format=torch.contiguous_format)
    by_bandwidth = bandwidth.new_zeros(problems, dtype=torch.float64)
    for some in _dims(dims, problems * rows.shape[1] * count):
        lines = _lines(points, nodes, bandwidth, some)
        # <v_n, F_dg> for all nodes: a product of matrices, of which each point takes what it needs
        products = rows[:, None] @ table[:, some].transpose(2, 3)
        left, right = (_dot(products, part) for part in slopes(*lines, exponential))
        by_points[:, :, some] = ((left + right) / 2).transpose(1, 2)
        if exponential:
            # first over the points, so that the number of threads does not change the rounding
            by_bandwidth += _dot(products, bandwidth_slopes(*lines)).sum(2, dtype=torch.float64).sum(1)
    return by_points, by_bandwidth.to(bandwidth.dtype)


def _dims(dims: int, each: int) -> Iterator[slice]:
    """Slices of the dimensions such that `each` numbers for every one of them make a block."""
    step = max(1, min(dims, _BLOCK // max(each, 1)))
    for d in range(0, dims, step):
        yield slice(d, d + step)


def _lines(points: Tensor, nodes: Tensor, bandwidth: Tensor, some: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Points `(P, D, N)`, nodes and bandwidths of some dimensions."""
    return points[:, :, some].transpose(1, 2).contiguous(), nodes[:, some].contiguous(), bandwidth[:, None, None]


def _flat(found: Cells, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For the node below, then for the one above: its row in the flattened table, and its weight."""
    problems, dims, _ = found.index.shape
    first = torch.arange(problems * dims, device=found.index.device).view(problems, dims, 1) * count
    yield found.index + first, found.below
    yield found.index + first + 1, found.above


def _dot(products: Tensor, part: Slopes) -> Tensor:
    """`(P, D, N, G)` products with the nodes, of which the two of each point's cell are taken: `(P, D, N)`."""
    below = products.gather(3, part.index[..., None])[..., 0]
    above = products.gather(3, part.index[..., None] + 1)[..., 0]
    return below * part.below + above * part.above
