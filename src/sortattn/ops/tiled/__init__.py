"""Exact and quadratic, but never an M x N matrix: blocks of queries against blocks of keys, forward and backward.

`softmax` and `gauss` are SDPA where it can serve them, `gauss` with one more dimension: `q' = [q, 1]`,
`k' = [k, -|k|^2 / 2]`, as the query's norm cancels. All else is summed on CUDA devices by a kernel of our own, where
there is one, and else block by block through the dense formula.
"""

import torch
from torch import Tensor

from ...kernels import ExponentialKernel, Gauss, Kernel, Softmax
from ...normalise import normalise, poisoned
from ...validation import Problem
from ..batching import fold, unfold
from . import blocks, cuda


def why_not(problem: Problem, kernel: Kernel, normalised: bool) -> str | None:
    """Blocks serve every call."""
    return None


def attention(problem: Problem, kernel: Kernel) -> Tensor:
    """`y_m = sum_n Phi(q_m, k_n) v_n / sum_n Phi(q_m, k_n)`, `(P, M, C)`."""
    if isinstance(kernel, (Softmax, Gauss)) and _sdpa_serves(problem):
        return poisoned(problem, _sdpa(problem, kernel))
    sums, total = _sums(problem, kernel, shifted=isinstance(kernel, ExponentialKernel))
    return normalise(problem, sums, total, kernel.floor)


def kernel_sum(problem: Problem, kernel: Kernel) -> Tensor:
    """`z_m = sum_n Phi(q_m, k_n) v_n`, `(P, M, C)`."""
    return _sums(problem, kernel, shifted=False)[0]


def _sdpa_serves(problem: Problem) -> bool:
    # SDPA aligns its causal mask at the start, knows no heads one behind the other, and takes no other mask beside it
    square = problem.group == 1 and problem.query.shape[1] == problem.key.shape[1]
    return not problem.causal or (square and problem.weight is None)


def _sdpa(problem: Problem, kernel: Softmax | Gauss) -> Tensor:
    query, key = kernel.center(problem.query, problem.key)
    query, key = query / problem.bandwidth, key / problem.bandwidth
    if isinstance(kernel, Gauss):
        query = torch.nn.functional.pad(query, (0, 1), value=1.0)
        key = torch.cat([key, key.square().sum(-1, keepdim=True) / -2], -1)
    mask = None if problem.weight is None else (problem.weight != 0)[:, None, None, :]
    out = torch.nn.functional.scaled_dot_product_attention(
        query[:, None], key[:, None], problem.value[:, None], attn_mask=mask, is_causal=problem.causal, scale=1.0
    )[:, 0]
    return out if mask is None else torch.where(mask.any(-1), out, 0.0)


def _sums(problem: Problem, kernel: Kernel, shifted: bool) -> tuple[Tensor, Tensor]:
    query, key, value = problem.query, problem.key, problem.value
    if shifted:
        query, key = kernel.center(query, key)
    weight = value.new_ones(value.shape[:2]) if problem.weight is None else problem.weight
    bandwidth = torch.as_tensor(problem.bandwidth, dtype=query.dtype, device=query.device)
    bandwidth = bandwidth.reshape(-1, 1, 1).expand(query.shape[0], 1, 1)
    parameters = kernel.parameters()
    if parameters is None:
        # not `query.new_empty`, which under vmap would have the mapped dimension
        parameters = torch.empty(0, dtype=query.dtype, device=query.device)
    # here and not in the operator: a gradient goes back to where the parameters are only if somebody asks for it
    parameters = parameters.to(query.device)
    sums, total, _ = tiled_sum(
        query, key, value, weight, bandwidth, parameters, kernel.name, problem.causal, problem.group, shifted
    )
    return sums, total


@torch.library.custom_op("sortattn::tiled_sum", mutates_args=())
def tiled_sum(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bandwidth: Tensor,
    parameters: Tensor,
    kernel: str,
    causal: bool,
    group: int,
    shifted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel sums of values `(P, M, C)` and of weights `(P, M)`, both divided by `e^shift`, and the shift `(P, M)`.

    With `shifted`, for kernels with a logarithm, the shift is the largest of each row's, so that nothing overflows and
    no row vanishes; otherwise it is zero.
    """
    way = cuda if cuda.serves(query, value, kernel) else blocks
    return way.forward(query, key, value, weight, bandwidth, parameters, kernel, causal, group, shifted)


@tiled_sum.register_fake
def _(query, key, value, weight, bandwidth, parameters, kernel, causal, group, shifted):
    rows = value.new_empty(query.shape[0], query.shape[1], value.shape[2])
    return rows, value.new_empty(query.shape[:2]), value.new_empty(query.shape[:2])


@torch.library.custom_op("sortattn::tiled_sum_backward", mutates_args=())
def tiled_sum_backward(
    grad: Tensor,
    grad_total: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bandwidth: Tensor,
    parameters: Tensor,
    shift: Tensor,
    kernel: str,
    causal: bool,
    group: int,
    shifted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, bandwidth and parameters."""
    way = cuda if cuda.serves(query, value, kernel) else blocks
    return way.backward(
        grad, grad_total, query, key, value, weight, bandwidth, parameters, shift, kernel, causal, group, shifted
    )


@tiled_sum_backward.register_fake
def _(
    grad, grad_total, query, key, value, weight, bandwidth, parameters, shift, kernel, causal, group, shifted
):  # fmt: skip
    return tuple(part.new_empty(part.shape) for part in (query, key, value, bandwidth, parameters))


def _setup(ctx, inputs, output):
    *tensors, kernel, causal, group, shifted = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.options = kernel, causal, group, shifted
    ctx.mark_non_differentiable(output[2])


def _backward(ctx, grad, grad_total, _):
    *tensors, shift = ctx.saved_tensors
    query, _, value, *_ = tensors
    if grad is None:
        grad = value.new_zeros(*query.shape[:2], value.shape[2])
    if grad_total is None:
        grad_total = value.new_zeros(query.shape[:2])
    dq, dk, dv, dtau, dparameters = tiled_sum_backward(grad, grad_total, *tensors, shift, *ctx.options)
    return dq, dk, dv, None, dtau, dparameters, None, None, None, None


tiled_sum.register_autograd(_backward, setup_context=_setup)


@tiled_sum.register_vmap
def _(info, in_dims, *inputs):
    """A mapped dimension becomes more problems."""
    if in_dims[5] is not None:
        raise RuntimeError("sortattn cannot vmap over the coefficients of a kernel; call it once per kernel instead")
    folded = [fold(info.batch_size, inputs[i], in_dims[i]) for i in range(5)]
    return unfold(info.batch_size, tiled_sum(*folded, *inputs[5:]))
