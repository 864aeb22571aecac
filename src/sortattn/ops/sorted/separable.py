"""The separable part of a kernel, `row(q_m) + column(k_n)`: every query's share is a combination of two rows.

Products of matrices would do, but those of BLAS round differently with the number of threads, and elementwise products
make tensors of the size of the values. On the CPU these are compiled loops, which add up in float64.
"""

import torch
from torch import Tensor

from ... import threads
from ..batching import map_rule


@torch.library.custom_op("sortattn::collect", mutates_args=())
def collect(factors: Tensor, rows: Tensor) -> Tensor:
    """`(P, K, C)`: `sum_n factors[p, k, n] rows[p, n, c]`."""
    factors, rows = factors.detach(), rows.detach()
    if rows.device.type != "cpu":
        return torch.stack([(part[..., None] * rows).sum(1) for part in factors.unbind(1)], 1)
    from .rows import collect_rows

    return _by_head(collect_rows, (factors, rows), (factors.shape[1], rows.shape[2]))


@torch.library.custom_op("sortattn::project", mutates_args=())
def project(vectors: Tensor, rows: Tensor) -> Tensor:
    """`(P, K, N)`: `sum_c vectors[p, k, c] rows[p, n, c]`."""
    vectors, rows = vectors.detach(), rows.detach()
    if rows.device.type != "cpu":
        return torch.stack([(part[:, None] * rows).sum(2) for part in vectors.unbind(1)], 1)
    from .rows import project_rows

    return _by_head(project_rows, (vectors, rows), (vectors.shape[1], rows.shape[1]))


@torch.library.custom_op("sortattn::spread", mutates_args=())
def spread(start: Tensor, factors: Tensor, vectors: Tensor) -> Tensor:
    """`start (P, N, C)` plus `sum_k factors[p, k, n] vectors[p, k, c]`."""
    start, factors, vectors = start.detach(), factors.detach(), vectors.detach()
    if start.device.type != "cpu":
        out = start.clone(memory_format=torch.contiguous_format)
        for factor, vector in zip(factors.unbind(1), vectors.unbind(1), strict=True):
            out.addcmul_(factor[..., None], vector[:, None])
        return out
    from .rows import spread_rows

    return _by_head(spread_rows, (factors, vectors, start), start.shape[1:])


def _by_head(function, parts: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
    out = parts[0].new_empty(parts[0].shape[0], *shape)
    arrays = [part.contiguous().numpy() for part in parts] + [out.numpy()]
    threads.run(lambda p: function(*(array[p] for array in arrays)), [(p,) for p in range(len(out))])
    return out


@collect.register_fake
def _(factors, rows):
    return rows.new_empty(rows.shape[0], factors.shape[1], rows.shape[2])


@project.register_fake
def _(vectors, rows):
    return rows.new_empty(rows.shape[0], vectors.shape[1], rows.shape[1])


@spread.register_fake
def _(start, factors, vectors):
    return start.new_empty(start.shape)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _collect_backward(ctx, grad):
    factors, rows = ctx.saved_tensors
    wants = ctx.needs_input_grad
    return (
        project(grad, rows) if wants[0] else None,
        spread(torch.zeros_like(rows), factors, grad) if wants[1] else None,
    )


def _project_backward(ctx, grad):
    vectors, rows = ctx.saved_tensors
    wants = ctx.needs_input_grad
    return (
        collect(grad, rows) if wants[0] else None,
        spread(torch.zeros_like(rows), grad, vectors) if wants[1] else None,
    )


def _setup_spread(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _spread_backward(ctx, grad):
    factors, vectors = ctx.saved_tensors
    wants = ctx.needs_input_grad
    return grad, project(vectors, grad) if wants[1] else None, collect(factors, grad) if wants[2] else None


collect.register_autograd(_collect_backward, setup_context=_setup)
project.register_autograd(_project_backward, setup_context=_setup)
spread.register_autograd(_spread_backward, setup_context=_setup_spread)

for _operator in (collect, project, spread):
    _operator.register_vmap(map_rule(_operator))
