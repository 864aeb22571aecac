"""The nodes for queries and keys: a sample of both, sorted, and nodes along it."""

import torch
from torch import Tensor

from .formula import Formula
from .grid import Grid
from .layout import INTERPRETED, Layout, count_blocks, power_of_two
from .nodes import nodes_kernel
from .survey import ROWS, survey_kernel
from .tables import Flags

# points of the sample for every node, of which some are extremes of stretches
_BY_NODE = 8
_STRETCHES = 16


def plan(
    query: Tensor,
    key: Tensor,
    weight: Tensor | None,
    bandwidth: Tensor,
    kernel: Formula,
    count: int,
    flags: Flags,
) -> Grid:
    """The nodes for queries and keys; raises the flags of heads that are not finite."""
    layout = Layout(count, query.dtype)
    problems, _, dims = query.shape
    wanted = _BY_NODE * count
    group = flags.group
    sides = [(query, None, flags.rows, group, max(1, _STRETCHES // group)), (key, weight, flags.shared, 1, _STRETCHES)]
    # extremes are never most of the line, however many heads a group has
    samples = [max(wanted - 2 * parts * heads, wanted // 2) for *_, heads, parts in sides]
    used = sum(samples) + sum(2 * parts * heads for *_, heads, parts in sides)
    width = power_of_two(used)
    line = torch.empty(problems, dims, width, device=query.device)
    first = 0
    for (points, counted, flag, heads, parts), sampled in zip(sides, samples, strict=True):
        length = points.shape[1]
        chosen = None if counted is None or length <= sampled else _chosen(counted, sampled)
        survey_kernel[(parts + count_blocks(sampled, ROWS), problems, heads)](
            points,
            points if chosen is None else chosen,
            line,
            flag,
            length,
            length // heads,
            sampled,
            first,
            width,
            D=dims,
            DIMS=max(16, power_of_two(dims)),
            GROUP=heads,
            CHOSEN=chosen is not None,
            STRETCHES=parts,
            ROWS=ROWS,
            AHEAD=1 if INTERPRETED else 4,
        )
        first += sampled + 2 * parts * heads
    if INTERPRETED:
        # which takes minutes for a sort
        line[..., :used] = line[..., :used].sort(-1).values
    nodes = torch.empty(problems, dims, layout.padded, device=query.device)
    stats = torch.empty(problems, dims, 3, layout.padded, device=query.device)
    nodes_kernel[(problems * dims,)](
        line,
        bandwidth,
        nodes,
        stats,
        used,
        width,
        D=dims,
        G=count,
        POWER=width.bit_length() - 1,
        NODES_POWER=layout.padded.bit_length() - 1,
        ANCHOR=kernel.riesz,
        SORT=not INTERPRETED,
        num_warps=4,
    )
    return Grid(nodes, stats, bandwidth, layout, kernel)


def _chosen(weight: Tensor, sampled: int) -> Tensor:
    """The keys of a sample: those before which given shares of the keys that count stand."""
    steps = torch.arange(sampled, device=weight.device) * 2654435769 % (1 << 32) / float(1 << 32)
    counted = weight.double().cumsum(1)
    places = torch.searchsorted(counted, steps * counted[:, -1:], right=True)
    return places.clamp(max=weight.shape[1] - 1)
