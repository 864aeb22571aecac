"""From sums to attention in one kernel each way: on a GPU the many small ones of `normalise` take longer to launch."""

import math
from pathlib import Path

import torch
from torch import Tensor

from ...cuda.launch import Kernel
from ...normalise import reciprocal, through_quotient
from ..batching import fold, unfold
from ..direct import direct

_SOURCE = Path(__file__).with_name("quotient.cu")
_REALS = {torch.float32: "float", torch.float64: "double"}
# numbers that a block looks at, at least; as in quotient.cu
_LOOK, _THREADS, _WARPS = 1 << 15, 256, 8


def _unfit(query: Tensor, key: Tensor, value: Tensor, group: int) -> Tensor:
    """`(P, group)`: zero where the queries `(P, group * M, D)` of a head, its keys and values are all finite."""
    parts = [part.detach().contiguous() for part in (query, key, value)]
    problems = query.shape[0]
    if not query.is_cuda:
        queries, keys, values = (~part.isfinite().all(2) for part in parts)
        queries = queries.reshape(problems, group, query.shape[1] // group)
        return (queries.any(2) | keys.any(1, keepdim=True) | values.any(1, keepdim=True)).int()
    found = torch.zeros(problems, group, dtype=torch.int32, device=query.device)
    sizes = [part.numel() // max(problems, 1) for part in parts]
    sizes[0] //= group
    slices = max(1, math.ceil(max(sizes) / _LOOK))
    with torch.cuda.device(query.device):
        _kernel("look", query)((problems * (group + 2) * slices,), _THREADS, *parts, found, *sizes, group, slices)
    return found


def _quotient(sums: Tensor, total: Tensor, unfit: Tensor, floor: float) -> Tensor:
    """The rows `sums (P, M, C) / total (P, M)` as in `normalise`, NaN for heads that are `unfit (P, group)`."""
    sums, total = sums.detach(), total.detach().contiguous()
    problems, number, channels = sums.shape
    each = number // unfit.shape[1]
    if not sums.is_cuda:
        return sums * (_poison(unfit, each, sums) * reciprocal(total, floor))[..., None]
    return _divide(sums, total, unfit, floor, torch.empty(sums.shape, dtype=sums.dtype, device=sums.device))


def _quotient_alone(sums: Tensor, total: Tensor, unfit: Tensor, floor: float) -> Tensor:
    """The same where nobody asks for a gradient: the sums are nobody else's, and the rows take their place."""
    if not sums.is_cuda or not sums.is_contiguous():
        return _quotient(sums, total, unfit, floor)
    return _divide(sums, total.contiguous(), unfit, floor, sums)


def _divide(sums: Tensor, total: Tensor, unfit: Tensor, floor: float, rows: Tensor) -> Tensor:
    """Fills the rows on a GPU."""
    problems, number, channels = sums.shape
    each = number // unfit.shape[1]
    if sums.stride(2) != 1 or sums.stride(0) != number * sums.stride(1):
        sums = sums.contiguous()
    if rows.numel():
        with torch.cuda.device(sums.device):
            _kernel("divide", sums)(
                (math.ceil(problems * number / _WARPS),), _THREADS, sums, total, unfit, rows, problems * number, each,
                channels, sums.stride(1), floor,
            )  # fmt: skip
    return rows


def _quotient_backward(grad: Tensor, sums: Tensor, total: Tensor, unfit: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """The gradients of sums and total; from the sums, as the rows may have been changed in place since."""
    grad, sums, total = (part.detach().contiguous() for part in (grad, sums, total))
    problems, number, channels = grad.shape
    each = number // unfit.shape[1]
    if not grad.is_cuda:
        poison = _poison(unfit, each, grad)
        # where the rows of an unfit head are NaN, so is the gradient of their total, if it has any
        rows = sums * (poison * reciprocal(total, floor))[..., None]
        by_sums, by_total = through_quotient(grad, rows, total, floor)
        return by_sums * poison[..., None], by_total
    by_sums, by_total = torch.empty_like(grad), torch.empty_like(total)
    if total.numel():
        with torch.cuda.device(grad.device):
            _kernel("divide_backward", grad)(
                (math.ceil(problems * number / _WARPS),), _THREADS, grad, sums, total, unfit, by_sums, by_total,
                problems * number, each, channels, floor,
            )  # fmt: skip
    return by_sums, by_total


def _poison(unfit: Tensor, each: int, like: Tensor) -> Tensor:
    return torch.where(unfit == 0, 1.0, torch.nan).to(like.dtype).repeat_interleave(each, 1)


def _kernel(entry: str, like: Tensor) -> Kernel:
    return Kernel(_SOURCE, entry, (("REAL", _REALS[like.dtype]),))


unfit = torch.library.custom_op("sortattn::unfit", _unfit, mutates_args=())
quotient = torch.library.custom_op("sortattn::quotient", _quotient, mutates_args=())
quotient_backward = torch.library.custom_op("sortattn::quotient_backward", _quotient_backward, mutates_args=())


@unfit.register_fake
def _(query, key, value, group):
    return query.new_empty(query.shape[0], group, dtype=torch.int32)


@quotient.register_fake
def _(sums, total, unfit, floor):
    return sums.new_empty(sums.shape)


@quotient_backward.register_fake
def _(grad, sums, total, unfit, floor):
    return grad.new_empty(grad.shape), total.new_empty(total.shape)


def _setup(ctx, inputs, output):
    sums, total, found, floor = inputs
    ctx.save_for_backward(sums, total, found)
    ctx.floor = floor


def _backward(ctx, grad):
    return *quotient_backward(grad, *ctx.saved_tensors, ctx.floor), None, None


quotient.register_autograd(_backward, setup_context=_setup)

quotient_directly = direct(quotient, _quotient, _setup, _backward, _quotient_alone)


@unfit.register_vmap
def _(info, in_dims, query, key, value, group):
    folded = [fold(info.batch_size, part, dim) for part, dim in zip((query, key, value), in_dims, strict=False)]
    (found,), (dim,) = unfold(info.batch_size, (unfit(*folded, group),))
    return found, dim


@quotient.register_vmap
def _(info, in_dims, sums, total, found, floor):
    folded = [fold(info.batch_size, part, dim) for part, dim in zip((sums, total, found), in_dims, strict=False)]
    (rows,), (dim,) = unfold(info.batch_size, (quotient(*folded, floor),))
    return rows, dim
