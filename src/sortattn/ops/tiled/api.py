"""The operator of the tiled backend: its fake kernel, its gradients, its rule for vmap."""

import torch
from torch import Tensor

from ..batching import fold, unfold
from ..direct import direct, shortcut
from . import blocks, cuda


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bandwidth: Tensor | None,
    parameters: Tensor | None,
    tau: float,
    kernel: str,
    causal: bool,
    group: int,
    normalised: bool,
    coarse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel sums of the values `(P, M, C)`, with `normalised` divided by those of ones, zero for a query without keys.

    `weight (P, N)` is zero where a key does not take part. The bandwidth is `bandwidth (P, 1, 1)`, else the number
    `tau`. With `coarse`, for numbers that had 16 bits, products may have eleven digits. For the backward pass, and not
    differentiable: the sums of ones, `(P, M)`, divided by `e^shift`; and that shift, for kernels with a logarithm the
    largest one of each row, so that nothing overflows and no row vanishes, otherwise `(P, 0)`.
    """
    way = cuda if cuda.serves(query, value, kernel) else blocks
    return way.forward(query, key, value, weight, bandwidth, parameters, tau, kernel, causal, group, normalised, coarse)


tiled_sum = torch.library.custom_op("sortattn::tiled_sum", _forward, mutates_args=())


@tiled_sum.register_fake
def _(query, key, value, weight, bandwidth, parameters, tau, kernel, causal, group, normalised, coarse):
    problems, rows = query.shape[:2]
    shifts = rows if normalised and blocks.shifted(kernel) else 0
    return (
        value.new_empty(problems, rows, value.shape[2]),
        value.new_empty(problems, rows),
        value.new_empty(problems, shifts),
    )


def _gradients(
    grad: Tensor,
    rows: Tensor,
    total: Tensor,
    shift: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bandwidth: Tensor | None,
    parameters: Tensor | None,
    tau: float,
    kernel: str,
    causal: bool,
    group: int,
    normalised: bool,
    coarse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, bandwidth and parameters; of what is None, no number."""
    way = cuda if cuda.serves(query, value, kernel) else blocks
    return way.backward(
        grad, rows, total, shift, query, key, value, weight, bandwidth, parameters, tau, kernel, causal, group,
        normalised, coarse,
    )  # fmt: skip


tiled_sum_backward = torch.library.custom_op("sortattn::tiled_sum_backward", _gradients, mutates_args=())
_gradients_directly = shortcut(tiled_sum_backward, _gradients)


@tiled_sum_backward.register_fake
def _(grad, rows, total, shift, query, key, value, weight, bandwidth, parameters, *rest):
    return tuple(
        query.new_empty(0) if part is None else part.new_empty(part.shape)
        for part in (query, key, value, bandwidth, parameters)
    )


def _setup(ctx, inputs, output):
    *tensors, tau, kernel, causal, group, normalised, coarse = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.options = tau, kernel, causal, group, normalised, coarse
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad, *_):
    *gradients, dtau, dparameters = _gradients_directly(grad, *ctx.saved_tensors, *ctx.options)
    *_, bandwidth, parameters = ctx.saved_tensors
    dtau, dparameters = None if bandwidth is None else dtau, None if parameters is None else dparameters
    return *gradients, None, dtau, dparameters, None, None, None, None, None, None


tiled_sum.register_autograd(_backward, setup_context=_setup)

tiled_sum_directly = direct(tiled_sum, _forward, _setup, _backward)


@tiled_sum.register_vmap
def _(info, in_dims, *inputs):
    """A mapped dimension becomes more problems."""
    if in_dims[5] is not None:
        raise RuntimeError("sortattn cannot vmap over the coefficients of a kernel; call it once per kernel instead")
    folded = [None if inputs[i] is None else fold(info.batch_size, inputs[i], in_dims[i]) for i in range(5)]
    return unfold(info.batch_size, tiled_sum(*folded, *inputs[5:]))
