"""An operator called around torch's dispatcher where nobody listens there: that costs more than a short kernel."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad


def plain(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors is an ordinary eager one: not compiled, traced, mapped, recorded or on meta."""
    return eager() and all(
        part is None or (type(part) in (Tensor, torch.nn.Parameter) and not part.is_meta) for part in tensors
    )


def eager() -> bool:
    """Whether nothing stands between a call and its tensors, whatever these are."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def several(*gradients: Tensor) -> bool:
    """Whether these are many at once, of `is_grads_batched`: torch calls an operator for one after the other."""
    return any(map(torch._C._functorch.is_legacy_batchedtensor, gradients))


def shortcut(operator: Callable, way: Callable) -> Callable:
    """`operator`, which has no gradients, but eager calls that record none go to its implementation `way` at once.

    Of a backward pass, whose first arguments are the one or two gradients that it is given.
    """

    def call(*inputs):
        tensors = (part for part in inputs if isinstance(part, Tensor))
        if torch.is_grad_enabled() or several(*inputs[:2]) or not plain(*tensors):
            return operator(*inputs)
        return way(*inputs)

    return call


def direct(
    operator: Callable, way: Callable, setup: Callable, backward: Callable, alone: Callable | None = None
) -> Callable:
    """`operator`, but eager calls go to its implementation `way` at once, on the CPU in 10 us less, with gradients 40.

    `setup` and `backward` are what the operator has registered for its gradients; `alone`, if given, is `way` for calls
    that record none. The tensors come first among the arguments.
    """
    alone = alone or way

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            outputs = way(*inputs)
            setup(ctx, inputs, outputs)
            return outputs

        @staticmethod
        def backward(ctx, *gradients):
            return backward(ctx, *gradients)

    def call(*inputs):
        tensors = [part for part in inputs if isinstance(part, Tensor)]
        if not plain(*tensors):
            refuse_transforms(*tensors)
            return operator(*inputs)
        if torch.is_grad_enabled() and any(part.requires_grad for part in tensors):
            return Function.apply(*inputs)
        return alone(*inputs)

    return call


def refuse_transforms(*tensors: Tensor) -> None:
    """Operators have gradients of `torch.autograd` alone; torch would take forward-mode derivatives for zero."""
    if torch.compiler.is_compiling():
        return
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(part).tangent is not None for part in tensors):
        raise RuntimeError(
            "sortattn has no forward-mode derivatives of its operators; use backend='reference', or torch.autograd.grad"
        )
    if any(map(_functional, tensors)):
        raise RuntimeError(
            "sortattn's operators cannot be differentiated by functorch transforms (torch.func.grad, vjp, jacrev); use "
            "backend='reference', or torch.autograd.grad"
        )


def _functional(tensor: Tensor) -> bool:
    """Whether a transform of `torch.func` differentiates by it, perhaps outside of others."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_gradtrackingtensor(tensor) and tensor.requires_grad:
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def differentiated_once(operator: Callable) -> Callable:
    """An operator that makes gradients, and says that it has none itself."""

    def refuse(ctx, *_):
        raise RuntimeError("sortattn has no second derivatives of its operators; use backend='reference'")

    operator.register_autograd(refuse)
    return operator
