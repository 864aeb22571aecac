"""The expected result of a call, forward and backward: the `reference` backend in float64 on the same, rounded, inputs.

`test_reference.py` compares that backend with the formulas of `dense.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import sortattn

from .cases import Case, assert_close, leaves

# the promise for the output, as a relative Frobenius error; 16-bit types: twice the unit roundoff, 2^-11 and 2^-8
FORWARD = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# float32 by promise; float64 with the same ratio to its forward bound; 16 bits: sums in float32, rounded at the end
GRADIENT = {torch.float64: 5e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Expected:
    """An output, the gradients of query, key and value (and bandwidth, if it is a tensor), and the gradients' scales.

    The gradient of a quotient is the difference of a part through the numerator and one through the denominator. Where
    the two cancel (with one key the output does not depend on the query at all) rounding is relative to the parts and
    not to the difference: the scale is the norm of the part through the numerator.
    """

    output: Tensor
    gradients: tuple[Tensor, ...]
    scales: tuple[float, ...]


def define(case: Case, inputs, gradient: Tensor, *, bandwidth=None, **options) -> Expected:
    """The expected result of `kernel_attention(*inputs, case.kernel, ...)` with this gradient of the output."""
    query, key, value, *rest = points = leaves(*(part.double() for part in _tensors(inputs, bandwidth)))
    gradient = gradient.double()
    options |= {"bandwidth": rest[0] if rest else bandwidth, "backend": "reference"}
    output = sortattn.kernel_attention(query, key, value, case.kernel, **options)
    gradients = torch.autograd.grad(output, points, gradient, materialize_grads=True)
    total = sortattn.kernel_sum(query, key, torch.ones_like(value[..., :1]), case.kernel, **options).detach()
    if case.floor:
        total = total.clamp(min=case.floor)
    share = torch.where(total == 0, 0.0, gradient / torch.where(total == 0, 1.0, total))
    sums = sortattn.kernel_sum(query, key, value, case.kernel, **options)
    parts = torch.autograd.grad(sums, points, share, materialize_grads=True)
    return Expected(output.detach(), gradients, tuple(part.norm().item() for part in parts))


def _tensors(inputs, bandwidth):
    return (*inputs, bandwidth) if isinstance(bandwidth, Tensor) else inputs


def check(expected: Expected, case: Case, inputs, gradient: Tensor, *, bandwidth=None, **options) -> None:
    """Assert that `kernel_attention` gives the expected output and gradients, to the promised precision."""
    dtype = inputs[0].dtype
    query, key, value, *rest = points = leaves(*_tensors(inputs, bandwidth))
    tau = rest[0] if rest else bandwidth
    output = sortattn.kernel_attention(query, key, value, case.kernel, bandwidth=tau, **options)
    assert output.dtype == dtype
    assert output.device == query.device
    assert_close(output, expected.output, FORWARD[dtype])
    gradients = torch.autograd.grad(output, points, gradient, materialize_grads=True)
    names = ("query", "key", "value", "bandwidth")
    for name, point, actual, wanted, scale in zip(
        names, points, gradients, expected.gradients, _scales(expected, points), strict=False
    ):
        assert actual.dtype == point.dtype, name
        assert_close(actual, wanted, GRADIENT[dtype], scale, name=f"gradient of {name}")


def _scales(expected: Expected, points) -> tuple[float, ...]:
    if len(points) == 3:
        return expected.scales
    # d/dtau = -(<q, d/dq> + <k, d/dk>) / tau: errors of the gradients by the points enter with the size of the points
    query, key, _, bandwidth = (part.detach().double() for part in points)
    spread = (query - query.mean()).norm().item() * expected.scales[0]
    spread += (key - key.mean()).norm().item() * expected.scales[1]
    return *expected.scales[:3], spread / bandwidth.min().item()
