"""The nodes for queries and keys: a sample of both, sorted, and nodes along it."""

import torch
from torch import Tensor

from .formula import Formula
from .grid import Grid
from .language import STATS
from .launch import Known, quick
from .layout import FAST, INTERPRETED, Layout, count_blocks, power_of_two
from .nodes import nodes_kernel
from .order import sort_lines
from .record import empty
from .survey import ROWS, survey_kernel
from .tables import Flags

# points of the sample for every node, of which some are extremes of stretches
_BY_NODE = 8
# stretches of the sequence whose extremes stand in the sample
_STRETCHES = 16


def plan(
    query: Tensor,
    key: Tensor,
    weight: Tensor | None,
    bandwidth: Tensor,
    kernel: Formula,
    count: int,
    flags: Flags,
    launches: Known | None = None,
    chunked: bool = False,
) -> Grid:
    """The nodes for queries and keys; raises the flags of heads that are not finite."""
    layout = Layout(count, query.dtype)
    problems, _, dims = query.shape
    wanted = _BY_NODE * count
    group = flags.group
    stretches = max(1, _STRETCHES // group)
    # extremes are never most of the line, however many heads a group has
    sampled, key_sampled = (max(wanted - 2 * parts, wanted // 2) for parts in (stretches * group, _STRETCHES))
    used = sampled + key_sampled + 2 * (stretches * group + _STRETCHES)
    power = (used - 1).bit_length()
    # room for as many numbers again, see `nodes_kernel`
    width = 2 << power
    line = empty(problems, dims, width, device=query.device)
    length, seen = query.shape[1], key.shape[1]
    chosen = None if weight is None or seen <= key_sampled else _chosen(weight, key_sampled)
    parts, key_parts = stretches + count_blocks(sampled, ROWS), _STRETCHES + count_blocks(key_sampled, ROWS)
    quick(survey_kernel, launches)[(parts + key_parts, problems, group)](
        query,
        key,
        key if chosen is None else chosen,
        line,
        flags.rows,
        flags.shared,
        length,
        seen,
        sampled,
        key_sampled,
        width,
        parts,
        D=dims,
        DIMS=max(16, power_of_two(dims)),
        GROUP=group,
        CHOSEN=chosen is not None,
        STRETCHES=stretches,
        KEY_STRETCHES=_STRETCHES,
        ROWS=ROWS,
        AHEAD=1 if INTERPRETED else 8 if max(length, seen) >= 8192 else 4,
        FAST=FAST,
    )
    if INTERPRETED:
        # which takes minutes for a sort
        line[..., :used] = line[..., :used].sort(-1).values
        in_order = True
    else:
        in_order = sort_lines(line, used, power, launches)
    nodes = empty(problems, dims, layout.padded, device=query.device)
    stats = empty(problems, dims, STATS.value, layout.padded, device=query.device)
    quick(nodes_kernel, launches)[(problems * dims,)](
        line,
        bandwidth,
        nodes,
        stats,
        used,
        width,
        D=dims,
        G=count,
        POWER=power,
        NODES_POWER=layout.padded.bit_length() - 1,
        ANCHOR=kernel.riesz,
        EXPONENTIAL=kernel.exponential,
        SORT=not in_order,
        # one warp needs no barriers: 0.08 instead of 0.13 ms with 64 nodes
        num_warps=1,
    )
    return Grid(nodes, stats, bandwidth, layout, kernel, launches, chunked)


def _chosen(weight: Tensor, sampled: int) -> Tensor:
    """The keys of a sample: those before which given shares of the keys that count stand."""
    steps = torch.arange(sampled, device=weight.device) * 2654435769 % (1 << 32) / float(1 << 32)
    counted = weight.double().cumsum(1)
    places = torch.searchsorted(counted, steps * counted[:, -1:], right=True)
    return places.clamp(max=weight.shape[1] - 1)
