"""The cells between nodes, and how a point is shared between the two nodes of its cell.

For splines the weights are hats, `1 - a` and `a` with `a = (t - x_i) / h`: they reproduce linear functions. For
`e^-|u|` they are `sinh(h - z) / sinh(h)` and `sinh(z) / sinh(h)` with `z = (t - x_i) / tau` and `h` likewise divided by
the bandwidth tau: they reproduce `e^u` and `e^-u`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cells:
    """For points of any shape the index of the node below, and the weights of the nodes below and above."""

    index: Tensor
    below: Tensor
    above: Tensor


@dataclass(frozen=True)
class Slopes:
    """The derivatives of both weights by the point, in the cell that ends or the cell that begins at it."""

    index: Tensor
    below: Tensor
    above: Tensor


def cells(points: Tensor, nodes: Tensor, bandwidth: Tensor, exponential: bool) -> Cells:
    """The weights of `points (..., N)` between `nodes (..., G)`; `bandwidth (..., 1)`."""
    index, distance, width = _locate(points, nodes, right=True)
    if not exponential:
        share = distance / width
        return Cells(index, 1 - share, share)
    distance, width = distance / bandwidth, width / bandwidth
    return Cells(index, _sinh_ratio(width - distance, width), _sinh_ratio(distance, width))


def slopes(points: Tensor, nodes: Tensor, bandwidth: Tensor, exponential: bool) -> tuple[Slopes, Slopes]:
    """The one-sided derivatives left and right of every point; they differ only where a point is on a node."""
    return tuple(_slopes(points, nodes, bandwidth, exponential, right) for right in (False, True))


def _slopes(points: Tensor, nodes: Tensor, bandwidth: Tensor, exponential: bool, right: bool) -> Slopes:
    index, distance, width = _locate(points, nodes, right)
    if not exponential:
        rate = 1 / width
        return Slopes(index, -rate, rate)
    distance, width = distance / bandwidth, width / bandwidth
    return Slopes(
        index, -_cosh_ratio(width - distance, width) / bandwidth, _cosh_ratio(distance, width) / bandwidth
    )  # fmt: skip


def bandwidth_slopes(points: Tensor, nodes: Tensor, bandwidth: Tensor) -> Slopes:
    """The derivatives of the `sinh` weights by the bandwidth; hats do not depend on it."""
    index, distance, width = _locate(points, nodes, right=True)
    distance, width = distance / bandwidth, width / bandwidth
    # of sinh(z) / sinh(h) by tau, where z and h are both proportional to 1 / tau
    stretch = width / torch.tanh(width)

    def slope(z: Tensor) -> Tensor:
        return (stretch * _sinh_ratio(z, width) - z * _cosh_ratio(z, width)) / bandwidth

    return Slopes(index, slope(width - distance), slope(distance))


def _locate(points: Tensor, nodes: Tensor, right: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The node below, the distance from it and the width of the cell; on a node the cell right or left of it."""
    index = torch.searchsorted(nodes, points, right=right) - 1
    # only a NaN is outside; it must not read beyond the nodes
    index = index.clamp(0, nodes.shape[-1] - 2)
    start = nodes.gather(-1, index)
    return index, points - start, nodes.gather(-1, index + 1) - start


def _sinh_ratio(z: Tensor, width: Tensor) -> Tensor:
    """`sinh(z) / sinh(width)` for `0 <= z <= width`; no exponent is positive, so nothing overflows."""
    return (z - width).exp() * torch.expm1(-2 * z) / torch.expm1(-2 * width)


def _cosh_ratio(z: Tensor, width: Tensor) -> Tensor:
    """`cosh(z) / sinh(width)` for `0 <= z <= width`."""
    return -(z - width).exp() * (1 + (-2 * z).exp()) / torch.expm1(-2 * width)
