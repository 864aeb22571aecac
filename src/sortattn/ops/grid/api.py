"""The operators behind the grid, with their fake kernels and derivatives.

`grid_plan` finds the nodes, `grid_collect` brings values from keys to nodes, `grid_read` sums from nodes to queries.
The last two are transposes of each other, so each is the derivative of the other by the rows; the derivative of both
by points and bandwidth is `grid_weights_backward`. Nodes are constants: no gradient goes through them.
"""

import torch
from torch import Tensor

from ..batching import fold, unfold
from ..direct import differentiated_once
from . import sums
from .correction import correct
from .nodes import place

# numbers in a block of tables while they are corrected
_BLOCK = 1 << 21


@torch.library.custom_op("sortattn::grid_plan", mutates_args=())
def grid_plan(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    bandwidth: Tensor,
    kinks: Tensor,
    jumps: Tensor,
    exponential: bool,
    masked: bool,
    count: int,
) -> tuple[Tensor, Tensor]:
    """The nodes `(P, D, G)` and what is added to the kernel between them, `(P, D, G, G)`; see `correction`."""
    query, key, weight, bandwidth = (part.detach() for part in (query, key, weight, bandwidth))
    nodes, sample = place(query, key, weight if masked else None, bandwidth, count)
    extra = query.new_zeros(*nodes.shape, count)
    step = max(1, _BLOCK // max(1, extra[:1].numel()))
    for p in range(0, query.shape[0] if sample.numel() else 0, step):
        some = slice(p, p + step)
        extra[some] = correct(sample[some], nodes[some], bandwidth[some], kinks, jumps, exponential)
    return nodes, extra


@grid_plan.register_fake
def _(query, key, weight, bandwidth, kinks, jumps, exponential, masked, count):
    shape = (query.shape[0], query.shape[2], count)
    return query.new_empty(shape), query.new_empty(*shape, count)


# nodes are constants, which torch has to be told
grid_plan.register_autograd(
    lambda ctx, *_: (None,) * 9, setup_context=lambda ctx, inputs, output: ctx.mark_non_differentiable(*output)
)


@grid_plan.register_vmap
def _(info, in_dims, *inputs):
    """A mapped dimension becomes more problems."""
    folded = [fold(info.batch_size, inputs[i], in_dims[i]) for i in range(4)]
    return unfold(info.batch_size, grid_plan(*folded, *inputs[4:]))


@torch.library.custom_op("sortattn::grid_collect", mutates_args=())
def grid_collect(points: Tensor, rows: Tensor, nodes: Tensor, bandwidth: Tensor, exponential: bool) -> Tensor:
    """`S_dg = sum_n w_g(t_nd) v_n`: `(P, N, D)`, `(P, N, C)`, `(P, D, G)`, `(P,)` give `(P, D, G, C)`."""
    return sums.collect(points.detach(), rows.detach(), nodes, bandwidth.detach(), exponential)


@grid_collect.register_fake
def _(points, rows, nodes, bandwidth, exponential):
    return rows.new_empty(*nodes.shape, rows.shape[2])


@torch.library.custom_op("sortattn::grid_read", mutates_args=())
def grid_read(points: Tensor, table: Tensor, nodes: Tensor, bandwidth: Tensor, exponential: bool) -> Tensor:
    """`z_m = sum_d sum_g w_g(s_md) F_dg`: `(P, M, D)`, `(P, D, G, C)`, `(P, D, G)`, `(P,)` give `(P, M, C)`."""
    return sums.read(points.detach(), table.detach().contiguous(), nodes, bandwidth.detach(), exponential)


@grid_read.register_fake
def _(points, table, nodes, bandwidth, exponential):
    return table.new_empty(*points.shape[:2], table.shape[3])


@differentiated_once
@torch.library.custom_op("sortattn::grid_weights_backward", mutates_args=())
def grid_weights_backward(
    points: Tensor, rows: Tensor, table: Tensor, nodes: Tensor, bandwidth: Tensor, exponential: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of `sum_nd sum_g w_g(t_nd) <v_n, F_dg>` by points `(P, N, D)` and bandwidth `(P,)`."""
    return sums.differentiate(points, rows, table, nodes, bandwidth, exponential)


@grid_weights_backward.register_fake
def _(points, rows, table, nodes, bandwidth, exponential):
    return points.new_empty(points.shape), bandwidth.new_empty(bandwidth.shape)


def _setup(ctx, inputs, output):
    *tensors, exponential = inputs
    ctx.save_for_backward(*tensors)
    ctx.exponential = exponential


def _collect_backward(ctx, grad):
    points, rows, nodes, bandwidth = ctx.saved_tensors
    return _gradients(ctx, points, rows, grad, nodes, bandwidth, lambda: grid_read(*_with(ctx, points, grad)))


def _read_backward(ctx, grad):
    points, table, nodes, bandwidth = ctx.saved_tensors
    return _gradients(ctx, points, grad, table, nodes, bandwidth, lambda: grid_collect(*_with(ctx, points, grad)))


def _with(ctx, points: Tensor, rows: Tensor):
    return points, rows, *ctx.saved_tensors[2:], ctx.exponential


def _gradients(ctx, points, rows, table, nodes, bandwidth, transposed):
    wants = ctx.needs_input_grad
    by_points = by_bandwidth = None
    if wants[0] or wants[3]:
        by_points, by_bandwidth = grid_weights_backward(points, rows, table, nodes, bandwidth, ctx.exponential)
    return by_points, transposed() if wants[1] else None, None, by_bandwidth, None


grid_collect.register_autograd(_collect_backward, setup_context=_setup)
grid_read.register_autograd(_read_backward, setup_context=_setup)


def _mapped(operator):
    def mapped(info, in_dims, *inputs):
        """A mapped dimension becomes more problems."""
        *tensors, exponential = inputs
        folded = [fold(info.batch_size, part, dim) for part, dim in zip(tensors, in_dims, strict=False)]
        (out,), (dim,) = unfold(info.batch_size, (operator(*folded, exponential),))
        return out, dim

    return mapped


for _operator in (grid_collect, grid_read):
    _operator.register_vmap(_mapped(_operator))
