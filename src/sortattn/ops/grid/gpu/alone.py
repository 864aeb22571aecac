"""Calls that record no gradient: their output alone, played again once a call of their kind is known."""

from collections.abc import Callable

from torch import Tensor

from ....cuda.launch import on
from .formula import known
from .launch import Known


def alone(operator: Callable, forward: Callable, launches_of: Callable[..., Known]) -> Callable[..., tuple[Tensor]]:
    """The first result of an operator's function, by the `forward` behind it and what is known of its launches."""

    def output(query, key, value, weight, bandwidth, parameters, kernel, exponential, *options) -> tuple[Tensor]:
        count, group, masked, normalise = options
        if masked:
            return operator(query, key, value, weight, bandwidth, parameters, kernel, exponential, *options)[:1]
        query, key, value, bandwidth = (part.detach().contiguous() for part in (query, key, value, bandwidth))
        _, numbers = known(kernel, parameters)
        call = (query, key, value, None, bandwidth, numbers, count, group, normalise)
        inputs = [query, key, value, bandwidth, *numbers.tensors]
        with on(query.device):
            return launches_of(*call).play(inputs, lambda: (forward(*call).out,))

    return output
