"""Attention of ordinary eager calls on CUDA devices, as one node of autograd without a view: each of these takes the
host a good part of the time that the GPU takes for a short sequence."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...kernels import KERNELS, Kernel
from ...validation import DTYPES, Problem, autocast, working_type
from ..direct import plain, several
from ..repeated import Again
from . import cuda, cuda_kernels, short
from .api import tiled_sum_backward
from .inputs import Inputs


def problem(
    query: object,
    key: object,
    value: object,
    kernel: Kernel,
    bandwidth: object,
    key_mask: object,
    is_causal: bool,
    enable_gqa: bool,
) -> Problem | None:
    """The call with its leading dimensions as they are, if nothing in it needs care; None says nothing against it."""
    if key_mask is not None or enable_gqa or kernel.name not in KERNELS or type(is_causal) is not bool:
        return None
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return None
    if not (query.dtype in DTYPES and key.dtype in DTYPES and value.dtype in DTYPES):
        return None
    if query.dim() < 2 or value.dim() < 2 or not cuda.serves(query, value, kernel.name):
        return None
    query, key, value = autocast(query, key, value)
    shape, keys, values, dtype, device = query.shape, key.shape, value.shape, query.dtype, query.device
    alike = (
        len(shape) == len(keys)
        and shape[:-2] == keys[:-2]
        and shape[-1] == keys[-1] > 0
        and values[:-1] == keys[:-1]
        and dtype == key.dtype == value.dtype
        and device == key.device == value.device
    )
    if not alike or not plain(query, key, value):
        return None
    tau = kernel.default_bandwidth(shape[-1]) if bandwidth is None else bandwidth
    if type(tau) not in (float, int) or not 0 < tau < math.inf:
        return None
    return Problem(query, key, value, None, float(tau), is_causal, 1, shape[:-2], dtype)


def attention(problem: Problem, kernel: Kernel) -> Tensor:
    """`y_m = sum_n Phi(q_m, k_n) v_n / sum_n Phi(q_m, k_n)` of such a problem, `(..., M, C)`, in the caller's type."""
    tensors = problem.query, problem.key, problem.value
    options = problem.bandwidth, kernel.name, problem.causal, 1, True, problem.dtype.itemsize == 2
    if torch.is_grad_enabled() and any(part.requires_grad for part in tensors):
        return _Attention.apply(*tensors, options, None)
    rows, *_ = cuda.forward(_inputs(*tensors, options), gradients=False)
    return rows if rows.dtype == problem.dtype else rows.to(problem.dtype)


def is_given(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether its tensors are those that were given, and not what autocast makes of them."""
    return problem.query is query and problem.key is key and problem.value is value


def again(problem: Problem, kernel: Kernel) -> Again | None:
    """What serves calls like this one with launches that are known; None is for one that has to be looked at again."""
    query, key, value = problem.query, problem.key, problem.value
    if not (query.numel() and value.numel()):
        return None
    options = problem.bandwidth, kernel.name, problem.causal, 1, True, query.itemsize == 2
    inputs = Inputs(query, key, value, None, None, None, *options)
    by = short if short.serves(inputs) else cuda
    if by is cuda and query.dtype not in cuda_kernels.ROWS:
        # 16 bits are cast before
        return None
    learning = torch.is_grad_enabled() and any(part.requires_grad for part in inputs[:3])
    run = by.prepared(inputs, learning)
    if learning:
        return lambda stream, *points: recorded(*points, options, partial(run, stream))
    return lambda stream, *points: run(stream, *points)[0]


def _inputs(query: Tensor, key: Tensor, value: Tensor, options: tuple) -> Inputs:
    inputs = Inputs(query, key, value, None, None, None, *options)
    working = working_type(query.dtype)
    if query.dtype == working or short.serves(inputs):
        return inputs
    return Inputs(query.to(working), key.to(working), value.to(working), *inputs[3:])


def recorded(
    query: Tensor, key: Tensor, value: Tensor, options: tuple, forward: Callable[..., tuple[Tensor | None, ...]]
) -> Tensor:
    """The rows, with gradients; `forward` makes them of the three tensors as `cuda.forward` does, in their own type."""
    return _Attention.apply(query, key, value, options, forward)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, options, forward):
        ctx.options, ctx.dtype = options, query.dtype
        # the derivative of a quotient needs it as it is, and the output may be changed in place
        if forward is not None:
            rows, total, shift, copy = forward(query, key, value)
            ctx.save_for_backward(query, key, value, copy, total, shift)
            return rows
        inputs = _inputs(query, key, value, options)
        narrow = inputs.query is not query
        rows, total, shift, copy = cuda.forward(inputs, copied=not narrow)
        ctx.save_for_backward(*inputs[:3], rows if narrow else copy, total, shift)
        return rows.to(query.dtype) if narrow else rows

    @staticmethod
    def backward(ctx, grad):
        query, key, value, *sums = ctx.saved_tensors
        inputs = Inputs(query, key, value, None, None, None, *ctx.options)
        grad = grad if grad.dtype == query.dtype else grad.to(query.dtype)
        if torch.is_grad_enabled() or several(grad) or not plain(grad):
            gradients = _by_operator(grad, *sums, inputs)
        else:
            gradients = cuda.backward(grad, *sums, inputs)[:3]
        if ctx.dtype != query.dtype:
            gradients = [part.to(ctx.dtype) for part in gradients]
        return *gradients, None, None


def _by_operator(grad: Tensor, rows: Tensor, total: Tensor, shift: Tensor | None, inputs: Inputs) -> list[Tensor]:
    """By way of the operator, which torch can map, and which says that it has no second derivative if one is wanted."""
    points = inputs[:3]
    query, key, value, grad, rows = (_flat(part, 2) for part in (*points, grad, rows))
    total = _flat(total, 1)
    shift = total.new_empty(total.shape[0], 0) if shift is None else _flat(shift, 1)
    gradients = tiled_sum_backward(grad, rows, total, shift, query, key, value, *inputs[3:])
    return [part.view(given.shape) for part, given in zip(gradients, points, strict=False)]


def _flat(part: Tensor, last: int) -> Tensor:
    """All but the last dimensions as one, which may be none."""
    # torch cannot flatten gradients of `is_grads_batched`
    return part.reshape(part.shape[:-last].numel(), *part.shape[-last:])
