"""Where the nodes of a grid stand: as dense as the square root of the data's density, known from a sample.

A pair of points is in error only if both lie in one cell, by an amount that grows with its width h. With a density
`rho` of points and `1/h` of nodes the squared error is the integral of `rho^2 h^3`, least for `1/h ~ sqrt(rho)`:
between nodes at quantiles (`1/h ~ rho`) and equidistant ones. See docs/grid.md.
"""

import torch
from torch import Tensor

# points of a sample on each side, queries and keys, by node: fewer leave the density uncertain within a cell
_BY_NODE = 16
# stretches of the sequence whose extremes join the sample: it alone would know nothing of the tails beyond it
_STRETCHES = 8
# steps of the golden ratio: a sample with equal strides would see a periodic sequence always at the same phase
_GOLDEN = 0.6180339887498949


def place(query: Tensor, key: Tensor, weight: Tensor | None, bandwidth: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The nodes `(P, D, count)`, ascending, for `query (P, M, D)` and `key (P, N, D)`, and the sample `(P, D, S)`.

    Inner nodes are points of the data where these are dense, so that frequent values are met exactly; the first and
    the last node stand outside, so that every point has a cell on both sides. `weight (P, N)` is zero where a key does
    not count, `bandwidth (P,)`.
    """
    sides = [side for side in ((query, None), (key, weight)) if side[0].shape[1]]
    if not sides:
        line = torch.arange(count, dtype=query.dtype, device=query.device)
        return line.expand(query.shape[0], query.shape[2], count).contiguous(), query.new_empty(0)
    sample = torch.cat([_sample(*side, _BY_NODE * count) for side in sides], 2)
    line = torch.cat([sample, *(_extremes(points) for points, _ in sides)], 2).sort(2).values
    low, high = line[..., :1], line[..., -1:]
    inner = torch.cat([low, _snap(_spaced(line, count - 4), line), high], 2)
    # wide enough that a slope across it has digits, whatever the scale and the offset of the data
    margin = (high - low) / count + bandwidth[:, None, None] / 16 + torch.maximum(low.abs(), high.abs()) / 4096
    return torch.cat([low - margin, inner, high + margin], 2), sample


def _extremes(points: Tensor) -> Tensor:
    """The least and the largest point of every stretch, `(P, N, D) -> (P, D, 2 * stretches)`."""
    length = points.shape[1]
    step = -(-length // _STRETCHES)
    ends = [extreme(1) for part in points.split(step, 1) for extreme in (part.amin, part.amax)]
    return torch.stack(ends, 2)


def _sample(points: Tensor, weight: Tensor | None, most: int) -> Tensor:
    """Some of the points, `(P, N, D) -> (P, D, S)`: the same ones at every call, all of them if they are few."""
    length = points.shape[1]
    if length <= most:
        return points.transpose(1, 2)
    steps = torch.arange(most, dtype=torch.float64, device=points.device) * _GOLDEN % 1.0
    if weight is None:
        return points.index_select(1, (steps * length).long()).transpose(1, 2)
    # the key before which a given share of those that count stands
    counted = weight.to(torch.float64).cumsum(1)
    places = torch.searchsorted(counted, steps * counted[:, -1:], right=True).clamp(max=length - 1)
    return points.gather(1, places[..., None].expand(-1, -1, points.shape[2])).transpose(1, 2)


def _spaced(line: Tensor, count: int) -> Tensor:
    """Positions at equal steps of the integral of the square root of the density along a sorted line."""
    gaps = line.diff(dim=2)
    # of a gap g between two of S points, with mass 1/S, the root of the density times the width is sqrt(g / S)
    shares = gaps.sqrt()
    # about one node in a gap is enough, however wide it is: a far point does not draw half of the nodes towards it
    shares = torch.minimum(shares, shares.sum(2, keepdim=True) / count)
    reached = torch.nn.functional.pad(shares.cumsum(2), (1, 0))
    steps = torch.arange(1, count + 1, dtype=line.dtype, device=line.device) / (count + 1)
    targets = (reached[..., -1:] * steps).contiguous()
    piece = (torch.searchsorted(reached, targets, right=True) - 1).clamp(0, gaps.shape[2] - 1)
    share = shares.gather(2, piece)
    part = torch.where(share > 0, (targets - reached.gather(2, piece)) / share, 0.0).clamp(0.0, 1.0)
    return line.gather(2, piece) + part * gaps.gather(2, piece)


def _snap(positions: Tensor, line: Tensor) -> Tensor:
    """The nearest point of the line for each position that has one within half the way to its neighbours.

    So every value that is frequent has a node of its own, and between values that are rare the nodes stay spread.
    """
    after = torch.searchsorted(line, positions.contiguous()).clamp(1, line.shape[2] - 1)
    below, above = line.gather(2, after - 1), line.gather(2, after)
    rest = torch.cat([line[..., :1], positions, line[..., -1:]], 2).diff(dim=2) / 2
    falls = (positions - below < above - positions) & (positions - below <= rest[..., :-1])
    rises = (positions - below >= above - positions) & (above - positions <= rest[..., 1:])
    return torch.where(falls, below, torch.where(rises, above, positions))
