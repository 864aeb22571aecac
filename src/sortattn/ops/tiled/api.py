"""The operator of the tiled backend: its fake kernel, its gradients, its rule for vmap."""

import torch
from torch import Tensor

from ..batching import fold, refuse_coefficients, unfold
from ..direct import differentiated_once, direct, shortcut
from . import blocks, cpu, cuda
from .inputs import TENSORS, Inputs, schema


def _forward(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel sums of the values `(P, M, C)`, with `normalised` divided by those of ones, zero for a query without keys.

    For the backward pass, and not differentiable: the sums of ones, `(P, M)`, divided by `e^shift`; and that shift, for
    kernels with a logarithm the largest one of each row, so that nothing overflows and no row vanishes, otherwise
    `(P, 0)`.
    """
    inputs = Inputs(*arguments)
    rows, total, shift, *_ = _way(inputs).forward(inputs)
    return rows, total, total.new_empty(total.shape[0], 0) if shift is None else shift


def _way(inputs: Inputs):
    if cuda.serves(inputs.query, inputs.value, inputs.kernel):
        return cuda
    return cpu if cpu.serves(inputs.query, inputs.kernel) else blocks


tiled_sum = torch.library.custom_op("sortattn::tiled_sum", _forward, mutates_args=(), schema=schema(3))


@tiled_sum.register_fake
def _(*arguments):
    inputs = Inputs(*arguments)
    value, (problems, rows, _) = inputs.value, inputs.query.shape
    shifts = rows if inputs.normalised and blocks.shifted(inputs.kernel) else 0
    return (
        value.new_empty(problems, rows, value.shape[2]),
        value.new_empty(problems, rows),
        value.new_empty(problems, shifts),
    )


def _gradients(grad: Tensor, rows: Tensor, total: Tensor, shift: Tensor, *arguments) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, bandwidth and parameters; of what is None, no number.

    The last argument, if it is there, is whether the parameters are learned: if they are not, their gradient may be
    left out.
    """
    count = len(Inputs._fields)
    inputs = Inputs(*arguments[:count])
    way = _way(inputs)
    if way is cpu and inputs.parameters is not None and all(arguments[count:]):
        way = blocks
    gradients = way.backward(grad, rows, total, shift if shift.shape[1] else None, inputs)
    # an operator returns what its fake kernel says
    if inputs.parameters is not None and gradients[4] is None:
        gradients = (*gradients[:4], torch.zeros_like(inputs.parameters))
    return tuple(grad.new_empty(0) if part is None else part for part in gradients)


tiled_sum_backward = torch.library.custom_op(
    "sortattn::tiled_sum_backward",
    _gradients,
    mutates_args=(),
    schema=schema(5, "grad", "rows", "total", "shift", last=("bool learned=True",)),
)
differentiated_once(tiled_sum_backward)
gradients_directly = shortcut(tiled_sum_backward, _gradients)


@tiled_sum_backward.register_fake
def _(grad, rows, total, shift, *arguments):
    query, key, value, _, bandwidth, parameters = arguments[:TENSORS]
    return tuple(
        query.new_empty(0) if part is None else part.new_empty(part.shape)
        for part in (query, key, value, bandwidth, parameters)
    )


def _setup(ctx, inputs, output):
    rows, *rest = output
    # the derivative of a quotient needs it as it is, and the output may be changed in place
    kept = rows.clone() if Inputs(*inputs).normalised else rows.new_empty(0)
    ctx.save_for_backward(kept, *rest, *inputs[:TENSORS])
    ctx.options = inputs[TENSORS:]
    ctx.mark_non_differentiable(*rest)
    # zeros for them would be made at every backward pass
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * (TENSORS + len(ctx.options))
    saved = ctx.saved_tensors
    *gradients, dtau, dparameters = gradients_directly(grad, *saved, *ctx.options, ctx.needs_input_grad[5])
    *_, bandwidth, parameters = saved
    dtau, dparameters = None if bandwidth is None else dtau, None if parameters is None else dparameters
    return *gradients, None, dtau, dparameters, *(None,) * len(ctx.options)


tiled_sum.register_autograd(_backward, setup_context=_setup)

tiled_sum_directly = direct(tiled_sum, _forward, _setup, _backward)


@tiled_sum.register_vmap
def _(info, in_dims, *inputs):
    """A mapped dimension becomes more problems."""
    refuse_coefficients(in_dims[5])
    folded = [None if inputs[i] is None else fold(info.batch_size, inputs[i], in_dims[i]) for i in range(5)]
    return unfold(info.batch_size, tiled_sum(*folded, *inputs[5:]))
