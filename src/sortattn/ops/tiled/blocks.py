"""Blocks of queries against blocks of keys in torch, for any kernel; the backward pass makes each block again."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ... import threads
from ...kernels import rebuild

# numbers in the largest intermediate of a block, per dimension that autograd keeps of it in the backward pass
_BLOCK = 1 << 22
_LENGTH = 256


def forward(
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
    """What `tiled_sum` returns."""
    query, key, value, weight = (part.detach() for part in (query, key, value, weight))
    chosen = rebuild(kernel, parameters.detach() if parameters.numel() else None)
    sums = torch.zeros(*query.shape[:2], value.shape[2], dtype=value.dtype, device=value.device)
    total = torch.zeros(query.shape[:2], dtype=value.dtype, device=value.device)
    shift = torch.full_like(total, -torch.inf if shifted else 0.0)
    for problems, rows, columns in _blocks(query, key, causal, group):
        seen = _seen(weight[problems, columns], rows, columns, query, key, causal, group)
        if shifted:
            scores = chosen.log_gram(query[problems, rows], key[problems, columns], bandwidth[problems])
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
            block = chosen.gram(query[problems, rows], key[problems, columns], bandwidth[problems])
            block = torch.where(seen, block, 0.0)
        sums[problems, rows] += block @ value[problems, columns]
        total[problems, rows] += block.sum(-1)
    return sums, total, torch.where(shift == -torch.inf, 0.0, shift)


def backward(
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
    """What `tiled_sum_backward` returns."""
    inputs = tuple(part.detach() for part in (query, key, value, bandwidth, parameters))
    gradients = tuple(torch.zeros_like(part, memory_format=torch.contiguous_format) for part in inputs)

    def accumulate() -> None:
        for problems, rows, columns in _blocks(query, key, causal, group):
            places = ((problems, rows), (problems, columns), (problems, columns), (problems,), (slice(None),))
            leaves = [part[place].detach().requires_grad_() for part, place in zip(inputs, places, strict=True)]
            seen = _seen(weight[problems, columns], rows, columns, query, key, causal, group)
            queries, keys, values, taus, numbers = leaves
            chosen = rebuild(kernel, numbers if numbers.numel() else None)
            if shifted:
                scores = chosen.log_gram(queries, keys, taus) - shift[problems, rows][..., None]
                block = torch.where(seen, scores, -torch.inf).exp()
            else:
                block = torch.where(seen, chosen.gram(queries, keys, taus), 0.0)
            outputs = (block @ values, block.sum(-1))
            grads = (grad[problems, rows], grad_total[problems, rows])
            parts = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
            for gradient, place, part in zip(gradients, places, parts, strict=True):
                if part is not None:
                    gradient[place] += part

    threads.apart(accumulate)
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
            for n in range(0, reach, length[1]):
                yield slice(p, p + together), slice(m, m + length[0]), slice(n, n + length[1])


def _seen(weight: Tensor, rows: slice, columns: slice, query: Tensor, key: Tensor, causal: bool, group: int) -> Tensor:
    """True where a query of the block sees a key, broadcastable to the block."""
    seen = (weight != 0)[:, None, :]
    if not causal:
        return seen
    each = query.shape[1] // group
    position = torch.arange(rows.start, min(rows.stop, query.shape[1]), device=query.device) % each
    index = torch.arange(columns.start, min(columns.stop, key.shape[1]), device=query.device)
    return seen & (index <= (position + key.shape[1] - each)[:, None])
