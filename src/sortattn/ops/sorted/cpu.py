"""The sorted backend on the CPU: heads, blocks of channels and ranges of dimensions as tasks for threads.

Results do not depend on the number of threads: a scattered sum is one task per head and block of channels, which goes
through the dimensions in order; inner products are one task per head and range of dimensions, which goes through the
blocks of channels in order.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import threads
from ...kernels import Terms
from . import lent

# weights and bandwidths are always there
WANTS_TENSORS = True
# argsorts take more time than room
KEEPS_ORDER = True
# channels that are walked together
_WIDTHS = (64, 32, 16)


class Points(NamedTuple):
    """Points `(P, N, D)` and their argsort `(P, D, N)` along every dimension."""

    points: Tensor
    order: Tensor


def points(points: Tensor, order: Tensor | None = None) -> Points:
    """Points along their argsort, if they have one."""
    return Points(points, sort(points) if order is None or order.shape[2] < points.shape[1] else order)


def both(query: Tensor, key: Tensor, query_order: Tensor, key_order: Tensor, *_) -> tuple[Points, Points]:
    """Those of queries and keys."""
    return points(query, query_order), points(key, key_order)


def groups(query: Tensor, key: Tensor, value: Tensor, terms: Terms, *, backward: bool = False) -> list[slice]:
    """Heads to walk at a time: all, as each needs hardly any room beside its results."""
    return [slice(0, query.shape[0])]


def unsorted(points: Tensor, kept: bool) -> Points:
    """Points whose argsort is still to be found, and if it is not `kept` has no rows."""
    problems, count, dims = points.shape
    return Points(points, lent.empty((problems, dims if kept else 0, count), torch.int32))


def sort(points: Tensor) -> Tensor:
    """The argsort `(P, D, N)`, int32, of every dimension of `points (P, N, D)`."""
    from . import drive

    problems, count, dims = points.shape
    if points.dtype == torch.float64:
        # as in `transpose_columns`; adding zero turns -0.0 into 0.0
        lines = points.nan_to_num(0.0, 0.0, 0.0).add_(0.0).transpose(1, 2).contiguous()
        return lines.sort(dim=-1, stable=True).indices.int()
    order = lent.empty((problems, dims, count), torch.int32)
    lines, orders = points.numpy(), order.numpy()

    def task(p, start):
        drive.sort_head(lines[p], start, min(start + drive.COLUMNS, dims), orders[p])

    threads.run(task, [(p, start) for p in range(problems) for start in range(0, dims, drive.COLUMNS)])
    return order


def forward(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, terms: Terms, bandwidth: Tensor, kept: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums of values `(P, M, C)` and of weights `(P, M)` for all queries, and the argsorts of queries and keys.

    Argsorts that are not `kept` are empty.
    """
    # every block of channels would sort anew, and the compiled sort is one for float32
    apart = _scattered_width(*value.shape[::2]) < value.shape[2] or value.dtype == torch.float64
    queries, keys = (points(part) if apart else unsorted(part, kept) for part in (query, key))
    sums = scatter(keys, queries, value, weight, terms, bandwidth, mirrored=False, unsorted=not apart)
    orders = (part.order if kept else part.order.new_empty(*part.points.shape[::2], 0) for part in (queries, keys))
    return *sums, *orders


def scatter(
    sources: Points,
    targets: Points,
    rows: Tensor,
    extra: Tensor,
    terms: Terms,
    bandwidth: Tensor,
    mirrored: bool,
    unsorted: bool = False,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum `rows (P, N, C)` and `extra (P, N)` of the sources for the targets; written `into` tensors, if given.

    The kernel is `f(target - source)`, or with `mirrored` `f(source - target)`, the transposed one. The argsorts of
    `unsorted` points are written, not read.
    """
    from . import drive

    problems, channels = rows.shape[0], rows.shape[2]
    number, dims = targets.points.shape[1:]
    width = _scattered_width(problems, channels)
    if into is None:
        into = (lent.empty((problems, number, *part), rows.dtype) for part in ((channels,), ()))
    out, out_extra = into
    out_extra.zero_()
    profiles = _profiles(terms, bandwidth, rows.numpy().dtype)
    lines = [part.numpy() for part in (*sources, *targets)]
    constants = _constants(terms, width)

    def task(p, first):
        block = _block(rows[p], first, width)
        whole = width == channels
        target = out[p].zero_() if whole else rows.new_zeros(number, width)
        # only the first block of a head carries the extra scalar
        scalars = (extra[p], out_extra[p]) if first == 0 else (torch.zeros_like(extra[p]), rows.new_zeros(number))
        drive.walk_head(
            *constants, *(line[p] for line in lines), 0, dims, mirrored, unsorted, block.view(-1).numpy(),
            scalars[0].numpy(), *profiles[p], target.view(-1).numpy(), scalars[1].numpy(), None,
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
    into: Tensor | None = None,
) -> Tensor:
    """The sums of `scatter`, but along each dimension by itself and multiplied with rows of the targets: `(P, M, D)`.

    Entry `(m, d)` of problem p is `factors[p] sum_n f(t_md - s_nd) (<rows_n, other_m> + extra_n other_extra_m)`.
    """
    from . import drive

    problems, channels = rows.shape[0], rows.shape[2]
    number, dims = targets.points.shape[1:]
    width = _width(channels)
    out = lent.empty((problems, number, dims), rows.dtype) if into is None else into
    profiles = _profiles(terms, bandwidth, rows.numpy().dtype)
    lines = [part.numpy() for part in (*sources, *targets)]
    constants = _constants(terms, width)
    scales = factors.tolist()

    def task(p, start):
        stop = min(start + drive.COLUMNS, dims)
        products = rows.new_zeros(stop - start, number)
        for first in range(0, max(channels, 1), width):
            block, others = _block(rows[p], first, width), _block(other[p], first, width)
            scalars = (extra[p], other_extra[p])
            if first > 0:
                scalars = tuple(torch.zeros_like(part) for part in scalars)
            drive.walk_head(
                *constants, *(line[p] for line in lines), start, stop, mirrored, False, block.view(-1).numpy(),
                scalars[0].numpy(), *profiles[p], others.view(-1).numpy(), scalars[1].numpy(), products.numpy(),
            )  # fmt: skip
        out[p, :, start:stop] = products.mul_(scales[p]).T

    threads.run(task, [(p, start) for p in range(problems) for start in range(0, dims, drive.COLUMNS)])
    return out


def gradients(
    queries: Points,
    keys: Points,
    grad: Tensor,
    grad_extra: Tensor,
    value: Tensor,
    weight: Tensor,
    terms: Terms,
    slope: Terms,
    bandwidth: Tensor,
    into: tuple[Tensor, Tensor, Tensor, Tensor],
    ties: bool = False,
) -> None:
    """The gradients of queries, keys, values and weights, `into` tensors; `slope` are the terms of the derivative."""
    by_query, by_key, *by_values = into
    rates = 1.0 / bandwidth
    dot(
        keys, queries, value, weight, grad, grad_extra, slope, bandwidth, mirrored=False, factors=rates, into=by_query
    )  # fmt: skip
    scatter(queries, keys, grad, grad_extra, terms, bandwidth, mirrored=True, into=by_values)
    dot(queries, keys, grad, grad_extra, value, weight, slope, bandwidth, mirrored=True, factors=-rates, into=by_key)


def _width(channels: int) -> int:
    """The widest block of which at least half is used."""
    return next((width for width in _WIDTHS if width < 2 * channels), _WIDTHS[-1])


def _scattered_width(problems: int, channels: int) -> int:
    """That of a scattered sum: with fewer heads than threads, narrower blocks."""
    width = _width(channels)
    # a channel's sum does not depend on the block it is in
    while width > _WIDTHS[-1] and problems * math.ceil(channels / width) < torch.get_num_threads():
        width //= 2
    return width


def _block(rows: Tensor, first: int, width: int) -> Tensor:
    """Channels `first ... first + width - 1` as contiguous rows, padded with zeros."""
    if rows.shape[1] == width:
        return rows.contiguous()
    block = rows.new_zeros(rows.shape[0], width)
    block[:, : rows.shape[1] - first] = rows[:, first : first + width]
    return block


def _profiles(terms: Terms, bandwidth: Tensor, real: np.dtype) -> list[tuple]:
    """The profiles of each problem, for the line and for the negative half of a folded one.

    Problems with the same bandwidth share them.
    """
    nodes = tuple(terms.nodes.tolist())
    below, opposite, above = (
        tuple(map(tuple, side.tolist())) for side in (terms.below, terms.below * (terms.folded or 1), terms.above)
    )
    rest = (above, terms.rate, terms.compact, terms.folded, terms.constant)
    return [tuple(_profile(nodes, side, *rest, tau, real) for side in (below, opposite)) for tau in bandwidth.tolist()]


# the same for every call of a layer: next to short sequences it takes its time
@functools.lru_cache(maxsize=128)
def _profile(
    nodes: tuple, below: tuple, above: tuple, rate: float, compact: bool, folded: int, constant: float,
    bandwidth: float, real: np.dtype,
):  # fmt: skip
    """The terms of `f(u / bandwidth)` in the form the walker reads."""
    from .plan import MAX_EXPONENT
    from .walk import Profile

    powers = len(below[0])
    pascal = np.array([[float(math.comb(k, i)) for i in range(powers)] for k in range(powers)])
    scale = bandwidth ** -np.arange(powers, dtype=np.float64)
    below, above = np.array(below) * scale, np.array(above) * scale
    # slopes of one or two: sums of them are exact
    largest = float(np.abs(below[:, -1]).max()) or 1.0
    # [j, l, i] = c_ji C(i, l): zero for i < l, as the binomial is
    shares_below, shares_above = (
        np.ascontiguousarray((_rounded(side / largest, real)[:, None, :] * pascal.T).astype(real))
        for side in (below, above)
    )
    nodes = np.array(nodes) * bandwidth
    rate = rate / bandwidth
    span = math.inf
    if rate:
        span = MAX_EXPONENT / rate
    elif compact:
        # a tile of a compact kernel is no wider than its support, so that its local sums do not cancel either
        span = float(nodes[-1] - nodes[0])
    tied = bool((below[:, 0] != above[:, 0]).any())
    return Profile(
        nodes, below.astype(real), above.astype(real), shares_below, shares_above, -shares_above, real.type(largest),
        pascal, rate, span, tied, compact, folded, shares_below.diagonal(0, 1, 2)[0].astype(np.float64),
        constant / largest,
    )  # fmt: skip


def _rounded(coefficients: np.ndarray, real: np.dtype) -> np.ndarray:
    """Coefficients `(J, powers)` in the working precision, such that what cancels over the nodes still does."""
    # sums over the nodes up to each one, as multiples of a number so large that their differences are exact
    totals = coefficients.cumsum(0)
    unit = np.finfo(real).eps * 2.0 ** np.ceil(np.log2(np.abs(totals).max(0, initial=1e-300)) + 1)
    return np.diff(np.round(totals / unit) * unit, axis=0, prepend=0.0).astype(real)


def _constants(terms: Terms, width: int) -> tuple:
    """What the walker is compiled for: channels, coefficients of a polynomial, and of those on all sides."""
    from ...cpu.simd import Constant

    powers = terms.below.shape[1]
    # with a rate both sides are walked, also for the derivative with respect to the coefficients of one of them
    two_sided = bool(terms.rate) or bool(terms.above.any())
    return Constant(width), Constant(powers), Constant(2 * powers if two_sided else powers)
