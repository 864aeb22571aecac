"""Tensors of 16 bits through torch's attention, as on a GPU; here on the CPU, whose kernels round alike."""

import pytest
import torch

import sortattn
from sortattn.kernels import KERNELS
from sortattn.ops.tiled import sdpa
from sortattn.validation import make_problem

CASES = [("softmax", torch.bfloat16, 8e-3), ("softmax", torch.float16, 1e-3), ("gauss", torch.bfloat16, 8e-3)]
MASK = torch.arange(60) < torch.tensor([[60], [41]])


def error(one, other):
    return ((one.double() - other).norm() / other.norm()).item()


@pytest.mark.parametrize("mask", [None, MASK], ids=["all keys", "some keys"])
@pytest.mark.parametrize("shift", [0.0, 100.0])
@pytest.mark.parametrize(("name", "dtype", "bound"), CASES)
def test_values_stay_within_the_rounding_of_the_output(name, dtype, bound, shift, mask):
    source = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 60, 64, generator=source)
    # what is added to all keys changes nothing, to the queries only if the kernel is stationary
    query, key, value = (part.to(dtype) for part in (query + shift * (name == "gauss"), key + shift, value))
    exact = [part.double().requires_grad_() for part in (query, key, value)]
    expected = sortattn.kernel_attention(*exact, name, key_mask=mask, backend="reference")
    given = [part.requires_grad_() for part in (query, key, value)]
    problem = make_problem(*given, KERNELS[name], key_mask=mask, native=True)
    assert problem.query.dtype == dtype
    found = problem.restore(sdpa.attention(problem, KERNELS[name]))
    assert error(found, expected) < bound
    if not shift:
        grad = torch.randn(expected.shape, generator=source)
        found.backward(grad.to(dtype))
        expected.backward(grad.double())
        assert all(error(one.grad, other.grad) < bound for one, other in zip(given, exact, strict=True))


def test_a_scale_of_its_own_for_every_head_stays_in_32_bits(monkeypatch):
    class OnGpu(torch.Tensor):
        is_cuda = True

    half = torch.zeros(2, 3, dtype=torch.bfloat16).as_subclass(OnGpu)
    assert sdpa.takes_16_bits(KERNELS["gauss"], half, None)
    assert sdpa.takes_16_bits(KERNELS["softmax"], half, 2.0)
    assert not sdpa.takes_16_bits(KERNELS["softmax"], half, torch.ones(3))
    assert not sdpa.takes_16_bits(KERNELS["laplace"], half, None)
    assert not sdpa.takes_16_bits(KERNELS["softmax"], half.float(), None)
    assert not sdpa.takes_16_bits(KERNELS["gauss"], half.to(torch.float16), None)
    assert not sdpa.takes_16_bits(KERNELS["softmax"], torch.zeros(2, 3, dtype=torch.bfloat16), None)
