"""Blocks of queries against blocks of keys in torch, for any kernel; the backward pass makes each block again."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ...kernels import KERNELS, ExponentialKernel, rebuild, widened
from ...normalise import reciprocal, through_quotient
from ..recorded import recorded
from .inputs import Inputs

# blocks of fewer keys are joined to their neighbours: products with so narrow a matrix may round by the threads
_NARROW = 12
# numbers in the largest intermediate of a block, per dimension that autograd keeps of it in the backward pass
_BLOCK = 1 << 22
_LENGTH = 256


def shifted(kernel: str) -> bool:
    """Whether attention with this kernel is the softmax of a logarithm."""
    return isinstance(KERNELS.get(kernel), ExponentialKernel)


def forward(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `tiled_sum` returns, without a shift None."""
    query, key, value = (part.detach() for part in inputs[:3])
    weight, bandwidth, parameters, tau, kernel, causal, group, normalised, _ = inputs[3:]
    chosen = rebuild(kernel, None if parameters is None else parameters.detach())
    logarithm = normalised and shifted(kernel)
    channels, value = value.shape[2], widened(value)
    sums = torch.zeros(*query.shape[:2], value.shape[2], dtype=value.dtype, device=value.device)
    total = torch.zeros(query.shape[:2], dtype=value.dtype, device=value.device)
    shift = torch.full_like(total, -torch.inf) if logarithm else None
    for problems, rows, columns in _blocks(query, key, causal, group):
        seen = _seen(weight, problems, rows, columns, query, key, causal, group)
        taus = tau if bandwidth is None else bandwidth[problems]
        if logarithm:
            scores = chosen.log_gram(query[problems, rows], key[problems, columns], taus)
            if seen is not None:
                scores = torch.where(seen, scores, -torch.inf)
            before = shift[problems, rows]
            after = torch.maximum(before, scores.amax(-1))
            # a row that has seen nothing yet has no scale to change
            change = torch.where(before == -torch.inf, 0.0, (before - after).exp())
            sums[problems, rows] *= change[..., None]
            total[problems, rows] *= change
            shift[problems, rows] = after
            block = (scores - torch.where(after == -torch.inf, 0.0, after)[..., None]).exp()
        else:
            block = chosen.gram(query[problems, rows], key[problems, columns], taus)
            if seen is not None:
                block = torch.where(seen, block, 0.0)
        sums[problems, rows] += block @ value[problems, columns]
        total[problems, rows] += block.sum(-1)
    if normalised:
        sums *= reciprocal(total, chosen.floor)[..., None]
    return sums[..., :channels].contiguous(), total, torch.where(shift == -torch.inf, 0.0, shift) if logarithm else None


def backward(
    grad: Tensor, rows: Tensor, total: Tensor, shift: Tensor | None, inputs: Inputs
) -> tuple[Tensor | None, ...]:
    """What `tiled_sum_backward` returns; None is what it has no number for."""
    query, key, value, weight, bandwidth, parameters, tau, kernel, causal, group, normalised, _ = inputs
    points = tuple(None if part is None else part.detach() for part in (query, key, value, bandwidth, parameters))
    gradients = tuple(
        None if part is None else torch.zeros_like(part, memory_format=torch.contiguous_format) for part in points
    )
    floor = rebuild(kernel, points[4]).floor
    if normalised:
        grad, grad_total = through_quotient(grad, rows, total, floor)
    else:
        grad_total = torch.zeros_like(total)
    grad = widened(grad)

    def accumulate() -> None:
        for problems, rows, columns in _blocks(query, key, causal, group):
            places = ((problems, rows), (problems, columns), (problems, columns), (problems,), (slice(None),))
            leaves = [
                None if part is None else part[place].detach().requires_grad_()
                for part, place in zip(points, places, strict=True)
            ]
            seen = _seen(weight, problems, rows, columns, query, key, causal, group)
            queries, keys, values, taus, numbers = leaves
            chosen = rebuild(kernel, numbers)
            taus = tau if taus is None else taus
            if shift is not None:
                scores = chosen.log_gram(queries, keys, taus) - shift[problems, rows][..., None]
                block = (scores if seen is None else torch.where(seen, scores, -torch.inf)).exp()
            else:
                block = chosen.gram(queries, keys, taus)
                block = block if seen is None else torch.where(seen, block, 0.0)
            outputs = (block @ widened(values), block.sum(-1))
            grads = (grad[problems, rows], grad_total[problems, rows])
            asked = [leaf for leaf in leaves if leaf is not None]
            parts = iter(torch.autograd.grad(outputs, asked, grads, allow_unused=True))
            for gradient, place, leaf in zip(gradients, places, leaves, strict=True):
                part = None if leaf is None else next(parts)
                if part is not None:
                    gradient[place] += part

    recorded(accumulate)
    return gradients


def _blocks(query: Tensor, key: Tensor, causal: bool, group: int) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of problems, queries and keys that together make up all pairs that may see each other."""
    problems, rows, dims = query.shape
    length = min(_LENGTH, max(rows, 1)), min(_LENGTH, max(key.shape[1], 1))
    together = max(1, _BLOCK // (length[0] * length[1] * dims))
    each = rows // group
    for p in range(0, problems, together):
        for m in range(0, rows, length[0]):
            reach = key.shape[1]
            if causal and m // each == (min(m + length[0], rows) - 1) // each:
                # all rows of the block belong to one head: keys beyond its last query are not seen
                reach = max(0, (min(m + length[0], rows) - 1) % each + 1 + key.shape[1] - each)
            for n in range(0, max(reach - _NARROW, 0) + 1 if reach else 0, length[1]):
                last = reach - n - length[1] < _NARROW
                yield slice(p, p + together), slice(m, m + length[0]), slice(n, reach if last else n + length[1])


def _seen(
    weight: Tensor | None,
    problems: slice,
    rows: slice,
    columns: slice,
    query: Tensor,
    key: Tensor,
    causal: bool,
    group: int,
) -> Tensor | None:
    """True where a query of the block sees a key, broadcastable to the block; None if all see all."""
    seen = None if weight is None else (weight[problems, columns] != 0)[:, None, :]
    if not causal:
        return seen
    each = query.shape[1] // group
    position = torch.arange(rows.start, min(rows.stop, query.shape[1]), device=query.device) % each
    index = torch.arange(columns.start, min(columns.stop, key.shape[1]), device=query.device)
    before = index <= (position + key.shape[1] - each)[:, None]
    return before if seen is None else seen & before
