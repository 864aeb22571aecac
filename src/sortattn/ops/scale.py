"""Rows times numbers, with a derivative that keeps the product and not the rows.

`y = x f` row by row. The derivative by `f` is `<grad, x>`, and `x = y / f`: as whoever asked for `y` holds it anyway,
the rows `x` are free as soon as they are scaled.
"""

import torch
from torch import Tensor

from .batching import map_rule

# rows that are multiplied together: no tensor of the size of all of them is made
_BLOCK = 1 << 14


@torch.library.custom_op("sortattn::scale_rows", mutates_args=())
def scale_rows(rows: Tensor, factors: Tensor) -> Tensor:
    """`(P, M, C)`: the rows times `factors (P, M)`, or `(P, 1)` for all rows of a problem."""
    return rows.detach() * factors.detach()[..., None]


@torch.library.custom_op("sortattn::dot_rows", mutates_args=())
def dot_rows(left: Tensor, right: Tensor) -> Tensor:
    """`(P, M)`: the inner products of rows `(P, M, C)`."""
    left, right = left.detach(), right.detach()
    if left.device.type != "cpu":
        return (left * right).sum(-1)
    out = left.new_empty(left.shape[:2])
    blocks = (part.flatten(0, 1).split(_BLOCK) for part in (left, right, out))
    for one, other, products in zip(*blocks, strict=True):
        torch.sum(one * other, -1, out=products)
    return out


@scale_rows.register_fake
def _(rows, factors):
    return rows.new_empty(rows.shape)


@dot_rows.register_fake
def _(left, right):
    return left.new_empty(left.shape[:2])


def _setup_scale(ctx, inputs, output):
    ctx.save_for_backward(inputs[1], output)


def _scale_backward(ctx, grad):
    factors, scaled = ctx.saved_tensors
    wants = ctx.needs_input_grad
    grad_factors = None
    if wants[1]:
        # where the factor is zero nothing is known of the row; whoever sets it to zero wants no gradient
        products = dot_rows(grad, scaled)
        grad_factors = torch.where(factors == 0, 0.0, products / torch.where(factors == 0, 1.0, factors))
        if factors.shape[1] != products.shape[1]:
            grad_factors = grad_factors.sum(1, keepdim=True)
    return scale_rows(grad, factors) if wants[0] else None, grad_factors


def _setup_dot(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _dot_backward(ctx, grad):
    left, right = ctx.saved_tensors
    wants = ctx.needs_input_grad
    return scale_rows(right, grad) if wants[0] else None, scale_rows(left, grad) if wants[1] else None


scale_rows.register_autograd(_scale_backward, setup_context=_setup_scale)
dot_rows.register_autograd(_dot_backward, setup_context=_setup_dot)

for _operator in (scale_rows, dot_rows):
    _operator.register_vmap(map_rule(_operator))
