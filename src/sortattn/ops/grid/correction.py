"""The mean error inside the cells that a kink crosses, taken off the kernel between the nodes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .weights import cells


def correct(
    sample: Tensor, nodes: Tensor, bandwidth: Tensor, kinks: Tensor, jumps: Tensor, exponential: bool
) -> Tensor:
    """What is added to `Phi_gg`, `(P, D, G, G)`, for slopes that change by `jumps` at `u = kinks`.

    Between four nodes the kernel is bilinear, where it truly has a kink along the line `s - t = y`. The mean of the
    difference over the rectangle is known; it goes to those corners that are near the line. For `y = 0` that is the
    diagonal, with `jump h / 12`. `sample (P, D, S)` says how the data lie: if they are all on nodes, there is nothing
    to correct.
    """
    # widths may differ by many orders of magnitude, and the mean is a difference of cubes
    sample, nodes = sample.double(), nodes.double()
    places = nodes / bandwidth.double()[:, None, None]
    data = _occupation(sample, nodes)
    total = torch.zeros(*nodes.shape, nodes.shape[2], dtype=torch.float64, device=nodes.device)
    for kink, jump in zip(kinks.tolist(), jumps.tolist(), strict=True):
        if jump and kink:
            _add_beside(total, places, data, kink, jump)
        elif jump:
            _add_on_diagonal(total, places, data, jump, exponential)
    return total


@dataclass(frozen=True)
class _Data:
    """Of every cell, `(P, D, G - 1)`: how far inside its points lie, and their part of what its two nodes hold.

    `inside` is `6 mean(a (1 - a))`, one if the points are spread evenly and zero if they are all on nodes.
    """

    inside: Tensor
    at_start: Tensor
    at_end: Tensor


def _occupation(sample: Tensor, nodes: Tensor) -> _Data:
    shape = (*nodes.shape[:2], nodes.shape[2] - 1)
    found = cells(sample.contiguous(), nodes.contiguous(), nodes.new_ones(1), exponential=False)

    def by_cell(numbers: Tensor) -> Tensor:
        return numbers.new_zeros(shape).scatter_add_(2, found.index, numbers)

    points = by_cell((found.above > 0).double())
    spread = by_cell(found.below * found.above) / points.clamp(min=1)
    held = torch.nn.functional.pad(by_cell(found.below), (0, 1)) + torch.nn.functional.pad(by_cell(found.above), (1, 0))
    held = held.clamp(min=1e-9)
    parts = ((points / held[..., some]).clamp(max=1) for some in (slice(None, -1), slice(1, None)))
    return _Data((6 * spread).clamp(max=1), *parts)


def _add_on_diagonal(total: Tensor, places: Tensor, data: _Data, jump: float, exponential: bool) -> None:
    """The kink at zero: squares on the diagonal, each with a mean error of `jump h / 12` shared by two corners."""
    width = places.diff(dim=2)
    if exponential:
        # inside a wide cell the error is bounded, as e^-|u| is at most one
        width = 2 * torch.tanh(width / 2)
    error = -jump * width / 12 * data.inside
    diagonal = total.diagonal(dim1=2, dim2=3)
    diagonal[..., :-1] += error / 2 * data.at_start**2
    diagonal[..., 1:] += error / 2 * data.at_end**2


def _add_beside(total: Tensor, places: Tensor, data: _Data, kink: float, jump: float) -> None:
    """A kink elsewhere: all rectangles that the line `s - t = kink` crosses."""
    error, shares = _rectangles(places[..., :, None] - places[..., None, :] - kink, places.diff(dim=2))
    error *= jump * (data.inside[..., :, None] * data.inside[..., None, :]).sqrt()
    ends = ((slice(None, -1), data.at_start), (slice(1, None), data.at_end))
    corners = [(row, column) for column in ends for row in ends]
    for share, ((rows, row_part), (columns, column_part)) in zip(shares, corners, strict=True):
        total[..., rows, columns] += error * share * row_part[..., :, None] * column_part[..., None, :]


def _rectangles(z: Tensor, width: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Mean minus mean of the interpolation of `max(z, 0)` on every rectangle, and the shares of its four corners.

    `z (..., G, G)` is `s - t - y` on the nodes.
    """
    across, along = width[..., :, None], width[..., None, :]
    scale = (across + along).clamp(min=1e-300)
    # relative to the rectangle: where the line crosses it, all four are between -1 and 1
    corners = [part / scale for part in (z[..., :-1, :-1], z[..., 1:, :-1], z[..., :-1, 1:], z[..., 1:, 1:])]
    crossed = (corners[1] > 0) & (corners[2] < 0) & (across > 0) & (along > 0)
    corners = [torch.where(crossed, part, 0.0) for part in corners]
    cubes = [part.clamp(min=0) ** 3 / 6 for part in corners]
    area = torch.where(crossed, across * along / scale**2, 1.0)
    mean = (cubes[1] - cubes[0] - cubes[3] + cubes[2]) / area
    plain = sum(part.clamp(min=0) for part in corners) / 4
    # the interpolation is above the convex function; a rounding error of very uneven cells must not turn that round
    error = torch.where(crossed, (mean - plain).clamp(-0.25, 0.0) * scale, 0.0)
    shares = [(1 - 2 * part.abs()).clamp(min=0) for part in corners]
    whole = sum(shares).clamp(min=1e-9)
    return error, [share / whole for share in shares]
