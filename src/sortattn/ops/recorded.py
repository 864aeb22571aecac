"""Autograd inside of an operator, where torch switches it off."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def recorded(function: Callable[[], Result]) -> Result:
    """Call `function` with autograd at work, and without autocast, which a backward pass may be called for within.

    Below an operator torch records nothing, whatever the grad mode, since autograd's keys are taken out of the
    dispatch. A new thread would have them, but must not be waited for: backward passes of CUDA tensors run on a single
    thread of torch, which a backward pass on the new thread would wait for in turn.
    """
    keys = torch._C.DispatchKey
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        left_out = left_out.remove(key)
    guard = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out)
    with guard, torch._C._DisableAutocast(), torch.enable_grad():
        return function()
