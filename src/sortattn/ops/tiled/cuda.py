"""The sums on CUDA devices: which calls they serve, and the launches of a forward pass."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...cuda.launch import Kernel, foreseen, on
from ...cuda.support import trouble
from ...kernels import Laplace
from . import cuda_backward, cuda_kernels, short
from .cuda_call import SURVEY_THREADS, Call
from .inputs import TENSORS, Inputs


def serves(query: Tensor, value: Tensor, kernel: str) -> bool:
    """Whether the CUDA kernels sum these tensors."""
    return (
        query.is_cuda
        and kernel in cuda_kernels.NAMES
        and max(query.shape[-1], value.shape[-1]) <= cuda_kernels.WIDEST
        and trouble(query.device.index) is None
    )


def forward(inputs: Inputs, gradients: bool = True, copied: bool = False) -> tuple[Tensor | None, ...]:
    """What `tiled_sum` returns; with `copied` the rows once more, and without `gradients` the rows alone."""
    return _foreseen_forward(inputs, gradients, copied)


def _kernels(inputs: Inputs, gradients: bool, copied: bool) -> list[Kernel]:
    """All that a forward pass launches and, if one is to be expected, its backward pass."""
    learning = copied or (gradients and any(part is not None and part.requires_grad for part in inputs[:TENSORS]))
    if short.serves(inputs):
        return short.kernels(inputs, learning)
    call = Call(inputs)
    look = call.looker()
    return [
        *([look.kernel] if look else []),
        call.kernel_for("forward", call.rows)[0],
        *(cuda_backward.kernels(call) if learning else ()),
    ]


def _gradient_kernels(inputs: Inputs) -> list[Kernel]:
    return short.kernels(inputs, True) if short.serves(inputs) else cuda_backward.kernels(Call(inputs))


def _forward(inputs: Inputs, gradients: bool, copied: bool) -> tuple[Tensor | None, ...]:
    if short.serves(inputs):
        return short.forward(inputs, gradients, copied)
    query = inputs.query
    with on(query.device):
        call = Call(inputs)
        out = query.new_empty((*query.shape[:-1], call.channels))
        total = query.new_empty(query.shape[:-1]) if gradients else None
        shift = None
        if gradients and inputs.normalised and call.kernel == Laplace.name:
            shift = torch.empty_like(total)
        copy = torch.empty_like(out) if copied else None
        surveyed = call.survey()
        call.launch(
            "forward", call.rows, *call.tensors, *surveyed[:2], out, copy, total, shift, *call.sizes,
            int(inputs.normalised), surveyed.slices, call.tau,
        )  # fmt: skip
    return out, total, shift, copy


def prepared(inputs: Inputs, gradients: bool) -> Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor | None, ...]]:
    """`forward` of contiguous tensors like these, without masks, on a stream of the current device.

    With `gradients` the rows are copied, as for the backward pass.
    """
    call = Call(inputs)
    # not the call itself, which has the tensors
    room, offsets = call.room(), call.places(0)
    known, look = call.looker(), None
    makes = known is not None and known.makes
    if known is not None:
        pointers = 6 if makes else 4
        look = known.kernel.prepared((known.blocks,), SURVEY_THREADS, pointers, *known.numbers)
    kernel, grid, block, options = call.form("forward", call.rows)
    numbers = (*call.sizes, int(inputs.normalised), call.slices(), call.tau)
    launch = kernel.prepared(grid, block, 12, *numbers, **options)
    alike, shape = call.dims == call.channels, (*inputs.query.shape[:-1], call.channels)
    shifted = gradients and call.kernel == Laplace.name

    def run(stream: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
        # like another takes torch less time
        out = torch.empty_like(query) if alike else query.new_empty(shape)
        copy = torch.empty_like(out) if gradients else None
        total = query.new_empty(shape[:-1]) if gradients else None
        shift = torch.empty_like(total) if shifted else None
        points, found = (query.data_ptr(), key.data_ptr(), value.data_ptr()), None
        places = (0, 0)
        if look is not None:
            # let go at the end: who has it next comes later on the stream
            found = query.new_empty(room)
            first = found.data_ptr()
            places = [0 if offset is None else first + offset for offset in offsets]
            look(stream, *points, *((0, *places) if makes else places[:1]))
        launch(
            stream, *points, 0, 0, 0, *places, out.data_ptr(),
            0 if copy is None else copy.data_ptr(), 0 if total is None else total.data_ptr(),
            0 if shift is None else shift.data_ptr(),
        )  # fmt: skip
        return out, total, shift, copy

    return run


def backward(
    grad: Tensor, rows: Tensor, total: Tensor, shift: Tensor | None, inputs: Inputs
) -> tuple[Tensor | None, ...]:
    """What `tiled_sum_backward` returns; None is what it has no number for."""
    return _foreseen_backward(grad, rows, total, shift, inputs)


def _backward(
    grad: Tensor, rows: Tensor, total: Tensor, shift: Tensor | None, inputs: Inputs
) -> tuple[Tensor | None, ...]:
    if short.serves(inputs):
        return *short.backward(grad, rows.contiguous(), total.contiguous(), inputs), None, None
    with on(inputs.query.device):
        return cuda_backward.backward(Call(inputs), grad, rows, total, shift)


_foreseen_forward = foreseen(_forward, _kernels)
_foreseen_backward = foreseen(_backward, lambda *given: _gradient_kernels(given[-1]))
