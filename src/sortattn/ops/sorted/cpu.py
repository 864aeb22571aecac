"""The sorted backend on the CPU: heads, blocks of channels and ranges of dimensions as tasks for threads.

Results do not depend on the number of threads: a scattered sum is one task per head and block of channels, which goes
through the dimensions in order; inner products are one task per head and range of dimensions, which goes through the
blocks of channels in order.
"""

import math

import numpy as np
import torch
from torch import Tensor

from ... import threads
from ...kernels import Terms
from .lines import Points

# channels that are walked together
_WIDTHS = (64, 32, 16)


def sort(points: Tensor) -> Tensor:
    """The argsort `(P, D, N)`, int32, of every dimension of `points (P, N, D)`."""
    from . import drive

    problems, count, dims = points.shape
    if points.dtype == torch.float64:
        # as in `transpose_columns`; adding zero turns -0.0 into 0.0
        lines = points.nan_to_num(0.0, 0.0, 0.0).add_(0.0).transpose(1, 2).contiguous()
        return lines.sort(dim=-1, stable=True).indices.int()
    order = torch.empty(problems, dims, count, dtype=torch.int32)
    lines, orders = points.numpy(), order.numpy()

    def task(p, start):
        drive.sort_head(lines[p], start, min(start + drive.COLUMNS, dims), orders[p])

    threads.run(task, [(p, start) for p in range(problems) for start in range(0, dims, drive.COLUMNS)])
    return order


def forward(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, terms: Terms, bandwidth: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums of values `(P, M, C)` and of weights `(P, M)` for all queries, and the argsorts of queries and keys."""
    queries, keys = (Points(points, sort(points)) for points in (query, key))
    return *scatter(keys, queries, value, weight, terms, bandwidth, mirrored=False), queries.order, keys.order


def scatter(
    sources: Points, targets: Points, rows: Tensor, extra: Tensor, terms: Terms, bandwidth: Tensor, mirrored: bool
) -> tuple[Tensor, Tensor]:
    """Sum `rows (P, N, C)` and `extra (P, N)` of the sources for the targets.

    The kernel is `f(target - source)`, or with `mirrored` `f(source - target)`, the transposed one.
    """
    from . import drive
    from .simd import Constant

    problems, channels = rows.shape[0], rows.shape[2]
    number, dims = targets.points.shape[1:]
    width = _width(channels)
    # with fewer heads than threads, narrower blocks; a channel's sum does not depend on the block it is in
    while width > _WIDTHS[-1] and problems * math.ceil(channels / width) < torch.get_num_threads():
        width //= 2
    out = torch.empty(problems, number, channels, dtype=rows.dtype)
    out_extra = torch.zeros(problems, number, dtype=rows.dtype)
    profiles = _profiles(terms, bandwidth, rows.numpy().dtype)
    lines = [part.numpy() for part in (*sources, *targets)]
    lanes, depth = Constant(width), Constant(terms.below.shape[1])

    def task(p, first):
        block = _block(rows[p], first, width)
        whole = width == channels
        target = out[p].zero_() if whole else torch.zeros(number, width, dtype=rows.dtype)
        # only the first block of a head carries the extra scalar
        scalars = (
            (extra[p], out_extra[p])
            if first == 0
            else (torch.zeros_like(extra[p]), torch.zeros(number, dtype=rows.dtype))
        )
        drive.walk_head(
            lanes, depth, *(line[p] for line in lines), 0, dims, mirrored, block.view(-1).numpy(), scalars[0].numpy(),
            profiles[p], target.view(-1).numpy(), scalars[1].numpy(), None,
        )  # fmt: skip
        if not whole:
            out[p, :, first : first + width] = target[:, : channels - first]

    threads.run(task, [(p, first) for p in range(problems) for first in range(0, max(channels, 1), width)])
    return out, out_extra


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
    """The sums of `scatter`, but along each dimension by itself and multiplied with rows of the targets: `(P, M, D)`.

    Entry `(m, d)` of problem p is `factors[p] sum_n f(t_md - s_nd) (<rows_n, other_m> + extra_n other_extra_m)`.
    """
    from . import drive
    from .simd import Constant

    problems, channels = rows.shape[0], rows.shape[2]
    number, dims = targets.points.shape[1:]
    width = _width(channels)
    out = torch.empty(problems, number, dims, dtype=rows.dtype)
    profiles = _profiles(terms, bandwidth, rows.numpy().dtype)
    lines = [part.numpy() for part in (*sources, *targets)]
    lanes, depth = Constant(width), Constant(terms.below.shape[1])
    scales = factors.tolist()

    def task(p, start):
        stop = min(start + drive.COLUMNS, dims)
        products = torch.zeros(stop - start, number, dtype=rows.dtype)
        for first in range(0, max(channels, 1), width):
            block, others = _block(rows[p], first, width), _block(other[p], first, width)
            scalars = (extra[p], other_extra[p])
            if first > 0:
                scalars = tuple(torch.zeros_like(part) for part in scalars)
            drive.walk_head(
                lanes, depth, *(line[p] for line in lines), start, stop, mirrored, block.view(-1).numpy(),
                scalars[0].numpy(), profiles[p], others.view(-1).numpy(), scalars[1].numpy(), products.numpy(),
            )  # fmt: skip
        out[p, :, start:stop] = products.mul_(scales[p]).T

    threads.run(task, [(p, start) for p in range(problems) for start in range(0, dims, drive.COLUMNS)])
    return out


def _width(channels: int) -> int:
    """The widest block of which at least half is used."""
    return next((width for width in _WIDTHS if width < 2 * channels), _WIDTHS[-1])


def _block(rows: Tensor, first: int, width: int) -> Tensor:
    """Channels `first ... first + width - 1` as contiguous rows, padded with zeros."""
    if rows.shape[1] == width:
        return rows.contiguous()
    block = torch.zeros(rows.shape[0], width, dtype=rows.dtype)
    block[:, : rows.shape[1] - first] = rows[:, first : first + width]
    return block


def _profiles(terms: Terms, bandwidth: Tensor, real: np.dtype) -> list:
    """One profile per problem; problems with the same bandwidth share it."""
    taus = bandwidth.tolist()
    distinct = {tau: _profile(terms, tau, real) for tau in set(taus)}
    return [distinct[tau] for tau in taus]


def _profile(terms: Terms, bandwidth: float, real: np.dtype):
    """The terms of `f(u / bandwidth)` in the form the walker reads."""
    from .plan import MAX_EXPONENT
    from .walk import Profile

    powers = terms.below.shape[1]
    pascal = np.array([[float(math.comb(k, i)) for i in range(powers)] for k in range(powers)])
    scale = bandwidth ** -np.arange(powers, dtype=np.float64)
    below, above = terms.below.numpy() * scale, terms.above.numpy() * scale
    # [j, l, i] = c_ji C(i, l): zero for i < l, as the binomial is
    spread_below, spread_above = (np.ascontiguousarray(side[:, None, :] * pascal.T) for side in (below, above))
    nodes = terms.nodes.numpy() * bandwidth
    rate = terms.rate / bandwidth
    span = math.inf
    if rate:
        span = MAX_EXPONENT / rate
    elif terms.compact:
        # a tile of a compact kernel is no wider than its support, so that its local sums do not cancel either
        span = float(nodes[-1] - nodes[0])
    # with a rate both sides are walked, also for the derivative with respect to the coefficients of one of them
    two_sided = bool(rate) or bool(above.any())
    tied = two_sided or bool(below[:, 0].any())
    return Profile(
        nodes, below.astype(real), above.astype(real), spread_below, spread_above, pascal, rate, span, two_sided, tied,
        terms.compact,
    )  # fmt: skip
