"""The backward pass on CUDA devices: launches of its kernels, with room for what they leave to each other."""

from itertools import accumulate

import torch
from torch import Tensor

from ...cuda.launch import Kernel
from ...kernels import Spline
from . import cuda_kernels
from .cuda_call import Call
from .cuda_kernels import CHUNK, SLICE, SLOPE_THREADS, THREADS


def kernels(call: Call) -> list[Kernel]:
    """All that is launched for a call."""
    if call.by_steps():
        entries = ("slopes", "forward_values", "prepare")
    else:
        entries = ("backward_key", "backward_query", "backward_table", "backward_quotient")
        entries = [name for name in entries if call.inputs.parameters is not None or name != "backward_table"]
    return [call.kernel_for(entry, call.columns)[0] for entry in entries]


def backward(call: Call, grad: Tensor, rows: Tensor, total: Tensor, shift: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, bandwidth and parameters; None is what has no number."""
    inputs = call.inputs
    query, bandwidth, parameters, normalised = inputs.query, inputs.bandwidth, inputs.parameters, inputs.normalised
    if call.by_steps():
        return _by_steps(call, grad.contiguous(), rows.contiguous(), total.contiguous())
    grad, grad_total = grad.contiguous(), torch.zeros_like(total) if not normalised else torch.empty_like(total)
    if normalised:
        whole, grad = (grad, rows.contiguous(), total.contiguous()), torch.empty_like(grad)
        # a warp has a row
        grid = (-(-total.numel() // (THREADS // 32)),)
        quotient = cuda_kernels.kernel_of("backward_quotient", call.kernel, call.dtype, call.wide)
        quotient(grid, THREADS, *whole, grad, grad_total, total.numel(), call.channels)
    given = (grad, grad_total, *call.tensors, shift, *call.sizes, call.tau)
    gradients = [torch.empty_like(part) for part in call.tensors[:3]]
    # per block, sums of (point - origin) gradient
    moments = [
        query.new_empty(call.problems, call.blocks(count), dtype=torch.float64) for count in (call.rows, call.columns)
    ]
    call.launch("backward_query", call.rows, *given, gradients[0], moments[0])
    call.launch("backward_key", call.columns, *given, gradients[1], gradients[2], moments[1])
    # Phi is a function of q / tau and k / tau: d/dtau = -(<q, d/dq> + <k, d/dk>) / tau
    grad_bandwidth = None
    if bandwidth is not None:
        moment = (moments[0].sum(1) + moments[1].sum(1)).reshape(-1, 1, 1)
        grad_bandwidth = (-moment / bandwidth).to(bandwidth.dtype)
    grad_parameters = None if parameters is None else _table_gradient(call, given, parameters)
    return *gradients, grad_bandwidth, grad_parameters


def _by_steps(call: Call, grad: Tensor, rows: Tensor, total: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, weight, bandwidth, _ = call.tensors
    normalised, coarse = call.inputs.normalised, call.inputs.coarse
    gradients = [torch.empty_like(part) for part in (query, key, value)]
    queries, keys = call.problems * call.rows, call.problems * call.columns
    slices = -(-max(call.rows, call.columns) // SLICE)
    # one behind the other, as every tensor costs time: vectors as halves, large and small ones, of queries and keys;
    # the gradients by the sums; what `prepare` finds; what undoes the scales of halves; the gradients by the totals
    sizes = (
        CHUNK * queries, CHUNK * keys, call.channels * queries if normalised else 0, 12 * call.problems * slices,
        queries, keys, queries,
    )  # fmt: skip
    room = query.new_empty(sum(sizes))
    *places, _ = accumulate(sizes, lambda place, size: place + 4 * size, initial=room.data_ptr())
    halves, value_halves, sums, found, scales, value_scales, grad_total = places
    sums = sums if normalised else grad.data_ptr()
    prepare = cuda_kernels.kernel_of("prepare", call.kernel, call.dtype, False, coarse)
    prepare(
        (2 * call.problems * slices,), SLOPE_THREADS, query, key, value, grad, rows, total, sums, grad_total,
        halves, scales, value_halves, value_scales, found, call.rows, call.columns, call.dims, call.channels,
        int(normalised), slices,
    )  # fmt: skip
    tiles = [call.blocks(count) for count in (call.rows, call.columns)]
    blocks = call.problems * sum(tiles)
    moments = None if bandwidth is None else query.new_empty(blocks, dtype=torch.float64)
    slopes = cuda_kernels.kernel_of("slopes", call.kernel, call.dtype, False, coarse)
    slopes(
        (blocks,), SLOPE_THREADS, query, key, halves, scales, grad_total, value_halves, value_scales,
        weight, bandwidth, *gradients[:2], moments, call.problems, *call.sizes[:3], call.each, call.causal,
        call.tau, shared=cuda_kernels.shared_of("slopes", call.kernel, call.dtype, coarse),
    )  # fmt: skip
    # the gradients of the values are kernel sums too, of keys and queries
    call.launch(
        "forward_values", call.columns, key, query, sums, weight, bandwidth, None, found, None, gradients[2], None,
        None, None, call.columns, call.rows, *call.sizes[2:], 0, slices, call.tau,
    )  # fmt: skip
    grad_bandwidth = None
    if bandwidth is not None:
        parts = moments.split([call.problems * count for count in tiles])
        moment = sum(part.view(call.problems, count).sum(1) for part, count in zip(parts, tiles, strict=True))
        grad_bandwidth = (-moment[:, None, None] / bandwidth).to(bandwidth.dtype)
    return *gradients, grad_bandwidth, None


def _table_gradient(call: Call, given: tuple, parameters: Tensor) -> Tensor:
    passes = call.count + 1 if call.kernel == Spline.name else call.count
    size = (passes, call.problems * call.blocks(call.rows), 2)
    moments = torch.empty(size, dtype=torch.float64, device=call.tensors[0].device)
    call.launch("backward_table", call.rows, *given, moments, passes=passes)
    first, second = moments.sum(1).unbind(1)
    if call.kernel == Spline.name:
        first = Spline.piece_gradients(parameters.to(first), first, second)
    return first.to(parameters)
