"""From sums to attention in one kernel each way.

On a GPU the many small ones of `normalise` take longer to launch; on the CPU they make tensors of the size of the sums.
"""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ... import threads
from ...cuda import launch
from ..batching import fold, unfold
from ..direct import differentiated_once, direct, shortcut
from . import lent
from .lines import narrow

_SOURCE = Path(__file__).with_name("quotient.cu")
_REALS = {torch.float32: "float", torch.float64: "double"}
# numbers that a block looks at, at least; as in quotient.cu
_LOOK, _THREADS, _WARPS = 1 << 13, 256, 8
# rows of a thread that divides, as there
_ROWS = 2
# integers of the size of a number, and its exponent of all ones
_BITS = {torch.float32: (np.int32, np.int32(0x7F800000)), torch.float64: (np.int64, np.int64(0x7FF << 52))}


def _unfit(query: Tensor, key: Tensor, value: Tensor, group: int) -> Tensor:
    """`(P, group)`: zero where the queries `(P, group * M, D)` of a head, its keys and values are all finite."""
    parts = [part.detach().contiguous() for part in (query, key, value)]
    problems = query.shape[0]
    if not query.is_cuda:
        return _unfit_on_cpu(*parts, group)
    found = torch.zeros(problems, group, dtype=torch.int32, device=query.device)
    sizes = [part.numel() // max(problems, 1) for part in parts]
    sizes[0] //= group
    slices = max(1, math.ceil(max(sizes) / _LOOK))
    with launch.on(query.device):
        _kernel("look", query)((problems * (group + 2) * slices,), _THREADS, *parts, found, *sizes, group, slices, 0)
    return found


def look_at(value: Tensor, unfit: Tensor) -> None:
    """Count what is no finite number among values `(P, N, C)` on a GPU, in `unfit (P, group)`."""
    (problems, group), size = unfit.shape, value.numel() // max(value.shape[0], 1)
    slices = max(1, math.ceil(size / _LOOK))
    with launch.on(value.device):
        _kernel("look", value)(
            (problems * slices,), _THREADS, None, None, value, unfit, 0, 0, size, group, slices, group + 1
        )


def _quotient(sums: Tensor, total: Tensor, unfit: Tensor, floor: float) -> Tensor:
    """The rows `sums (P, M, C) / total (P, M)` as in `normalise`, NaN for heads that are `unfit (P, group)`."""
    sums, total = sums.detach(), total.detach().contiguous()
    return _divide(sums, total, unfit, floor, lent.empty_like(sums))


def _quotient_alone(sums: Tensor, total: Tensor, unfit: Tensor, floor: float) -> Tensor:
    """The same where nobody asks for a gradient: the sums are nobody else's, and the rows take their place."""
    if not sums.is_contiguous():
        return _quotient(sums, total, unfit, floor)
    return _divide(sums, total.contiguous(), unfit, floor, sums)


def _divide(sums: Tensor, total: Tensor, unfit: Tensor, floor: float, rows: Tensor) -> Tensor:
    """Fills the rows."""
    if sums.is_cuda:
        return divide_on_gpu(sums, total, unfit, floor, rows)
    from .rows import divide_rows

    _each_head(divide_rows, (sums.contiguous(), total), unfit, floor, (rows,))
    return rows


def divide_on_gpu(sums: Tensor, total: Tensor, unfit: Tensor, floor: float, rows: Tensor) -> Tensor:
    """The same; the rows may have 16 bits."""
    problems, number, channels = sums.shape
    if sums.stride(2) != 1 or sums.stride(0) != number * sums.stride(1):
        # of a single row torch takes any stride for that of a contiguous tensor
        sums = sums.clone(memory_format=torch.contiguous_format)
    # four numbers are read at a time
    if sums.data_ptr() % 16:
        sums = sums.clone()
    if rows.numel():
        lanes = 16 if channels <= 64 else 32
        with launch.on(sums.device):
            _kernel("divide", rows)(
                (math.ceil(problems * number * lanes / (_ROWS * _THREADS)),), _THREADS, sums, total, unfit, rows,
                problems * number, number // unfit.shape[1], channels, sums.stride(1), lanes, floor,
            )  # fmt: skip
    return rows


def _quotient_backward(grad: Tensor, sums: Tensor, total: Tensor, unfit: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """The gradients of sums and total; from the sums, as the rows may have been changed in place since."""
    grad, sums, total = (part.detach().contiguous() for part in (grad, sums, total))
    problems, number, channels = grad.shape
    each = number // unfit.shape[1]
    by_sums, by_total = lent.empty_like(grad), torch.empty_like(total)
    if not grad.is_cuda:
        from .rows import divide_rows_backward

        _each_head(divide_rows_backward, (grad, sums, total), unfit, floor, (by_sums, by_total))
        return by_sums, by_total
    if total.numel():
        with launch.on(grad.device):
            _kernel("divide_backward", grad)(
                (math.ceil(problems * number / _WARPS),), _THREADS, grad, sums, total, unfit, by_sums, by_total,
                problems * number, each, channels, floor,
            )  # fmt: skip
    return by_sums, by_total


def _unfit_on_cpu(query: Tensor, key: Tensor, value: Tensor, group: int) -> Tensor:
    from .rows import all_finite

    problems = query.shape[0]
    integer, exponent = _BITS[query.dtype]
    queries, *shared = (part.flatten(1).numpy().view(integer) for part in (query, key, value))
    queries = queries.reshape(problems, group, queries.shape[1] // group)
    found = torch.empty(problems, group, dtype=torch.int32, device="cpu")

    def task(p):
        fit = all(all_finite(part[p], exponent) for part in shared)
        for head in range(group):
            found[p, head] = not (fit and all_finite(queries[p, head], exponent))

    threads.run(task, [(p,) for p in range(problems)])
    return found


def _each_head(
    function: Callable[..., None], given: tuple[Tensor, ...], unfit: Tensor, floor: float, results: tuple[Tensor, ...]
) -> None:
    """Call a compiled function for every head: the queries of a group are heads of their own."""
    heads = unfit.numel()
    spoilt, tiny = unfit.flatten().tolist(), torch.finfo(given[0].dtype).tiny
    given, results = (
        [part.view(heads, part.shape[1] // unfit.shape[1], *part.shape[2:]).numpy() for part in parts]
        for parts in (given, results)
    )

    def task(head):
        parts, into = ([part[head] for part in some] for some in (given, results))
        function(*parts, bool(spoilt[head]), floor, tiny, *into)

    threads.run(task, [(head,) for head in range(heads)])


def kernels(like: Tensor, learning: bool) -> list[launch.Kernel]:
    """What is launched for such inputs on a GPU, forward and, if they are `learning`, backward."""
    return [_kernel(entry, like) for entry in ("look", "divide", "divide_backward")[: 2 + learning]]


def _kernel(entry: str, like: Tensor) -> launch.Kernel:
    return launch.Kernel(_SOURCE, entry, (("REAL", _REALS.get(like.dtype, "float")), *narrow(like.dtype)))


unfit = torch.library.custom_op("sortattn::unfit", _unfit, mutates_args=())
quotient = torch.library.custom_op("sortattn::quotient", _quotient, mutates_args=())
quotient_backward = differentiated_once(
    torch.library.custom_op("sortattn::quotient_backward", _quotient_backward, mutates_args=())
)
_quotient_backward_directly = shortcut(quotient_backward, _quotient_backward)


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
    return *_quotient_backward_directly(grad, *ctx.saved_tensors, ctx.floor), None, None


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
