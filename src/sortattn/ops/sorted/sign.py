"""Sign sums by sorting: the operator behind `weighted_sign_sum`."""

import torch
from torch import Tensor

from ...kernels import Terms
from ..batching import map_rule
from ..direct import differentiated_once
from .lines import walker


def _sign_terms() -> Terms:
    # sign(u) = H(u) - H(-u)
    one = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    return Terms(one.new_zeros(1), one, -one, rate=0.0, compact=False)


@torch.library.custom_op("sortattn::sign_dot", mutates_args=())
def sign_dot(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """`(P, M, D)`: `sum_n sign(q_md - k_nd) <v_n, weight_m>`."""
    walk = walker(query.device.type)
    query, key, value, weight = (part.detach().contiguous() for part in (query, key, value, weight))
    tau = torch.ones(query.shape[0], dtype=torch.float64, device=query.device)
    nothing = [value.new_zeros(part.shape[:2]) for part in (value, weight)]
    products = torch.empty_like(query)

    def fill(some: slice) -> None:
        queries, keys = walk.points(query[some]), walk.points(key[some])
        parts = (part[some] for part in (value, nothing[0], weight, nothing[1]))
        products[some] = walk.dot(keys, queries, *parts, _sign_terms(), tau[some], False, tau[some])

    for some in walk.groups(query, key, value, _sign_terms(), backward=True):
        fill(some)
    return products


@sign_dot.register_fake
def _(query, key, value, weight):
    return query.new_empty(query.shape)


@differentiated_once
@torch.library.custom_op("sortattn::sign_dot_backward", mutates_args=())
def sign_dot_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of value and weight, one dimension at a time: each has factors of its own."""
    walk = walker(query.device.type)
    parts = (grad, query, key, value, weight)
    grad, query, key, value, weight = (part.detach().contiguous() for part in parts)
    tau = torch.ones(query.shape[0], dtype=torch.float64, device=query.device)
    empty = [value.new_zeros(part.shape[:2]) for part in (value, weight)]
    grad_value, grad_weight = torch.zeros_like(value), torch.zeros_like(weight)
    for d in range(query.shape[2]):
        lines = [points[..., d : d + 1].contiguous() for points in (query, key)]
        queries, keys = (walk.points(line) for line in lines)
        factor = grad[..., d : d + 1]
        grad_value += walk.scatter(queries, keys, factor * weight, empty[1], _sign_terms(), tau, mirrored=True)[0]
        grad_weight += factor * walk.scatter(keys, queries, value, empty[0], _sign_terms(), tau, mirrored=False)[0]
    return grad_value, grad_weight


@sign_dot_backward.register_fake
def _(grad, query, key, value, weight):
    return value.new_empty(value.shape), weight.new_empty(weight.shape)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    grad_value, grad_weight = sign_dot_backward(grad, *ctx.saved_tensors)
    # piecewise constant in the points: zeros, so that asking for these gradients is no error
    query, key, *_ = ctx.saved_tensors
    zeros = [
        torch.zeros_like(part) if wanted else None
        for part, wanted in zip((query, key), ctx.needs_input_grad, strict=False)
    ]
    return *zeros, grad_value, grad_weight


sign_dot.register_autograd(_backward, setup_context=_setup)


sign_dot.register_vmap(map_rule(sign_dot))
