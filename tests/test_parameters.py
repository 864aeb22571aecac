"""The numbers of a kernel on the device are copied once, and again when they change."""

from types import SimpleNamespace

import pytest
import torch

import sortattn
from sortattn.ops import parameters

# in place of queries on a CUDA device
QUERY = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    monkeypatch.setattr(parameters, "plain", lambda *_: True)


def test_a_copy_is_kept_until_the_kernel_changes():
    kernel = sortattn.Spline([-1.0, 0.0, 1.0], [0.0, 1.0, -1.0, 0.0])
    # a copy made here serves calls with gradients too
    with torch.inference_mode():
        first = parameters.parameters_at(QUERY, kernel)
    assert not first.is_inference()
    assert parameters.parameters_at(QUERY, kernel) is first
    kernel.slopes.mul_(2.0)
    # in the same place, where a captured graph looks for it
    assert parameters.parameters_at(QUERY, kernel) is first
    assert torch.equal(first, kernel.parameters())


def test_other_tensors_are_other_numbers_wherever_they_are_in_memory():
    kernel = sortattn.Spline([-1.0, 0.0, 1.0], [0.0, 1.0, -1.0, 0.0])
    for number in range(100):
        # the second one may lie where the one before the first lay
        for size in (number + 1.0, number + 1.5):
            kernel.slopes = torch.tensor([0.0, size, -size, 0.0])
        assert torch.equal(parameters.parameters_at(QUERY, kernel), kernel.parameters())


def test_every_device_has_a_copy_of_its_own():
    kernel = sortattn.Spline([-1.0, 0.0, 1.0], [0.0, 1.0, -1.0, 0.0])
    here = parameters.parameters_at(QUERY, kernel)
    there = parameters.parameters_at(SimpleNamespace(is_cuda=True, device=torch.device("meta")), kernel)
    assert there.is_meta
    assert parameters.parameters_at(QUERY, kernel) is here


def test_learned_numbers_and_those_of_inference_mode_are_not_kept():
    slopes = torch.tensor([0.0, 1.0, -1.0, 0.0], requires_grad=True)
    assert parameters.parameters_at(QUERY, sortattn.Spline([-1.0, 0.0, 1.0], slopes)).requires_grad
    with torch.inference_mode():
        kernel = sortattn.PolynomialExponential([1.0, 1.0])
        kernel.coefficients.mul_(2.0)
        assert torch.equal(parameters.parameters_at(QUERY, kernel), kernel.coefficients)
        kernel.coefficients.mul_(2.0)
        assert torch.equal(parameters.parameters_at(QUERY, kernel), kernel.coefficients)


def test_named_kernels_have_none():
    assert parameters.parameters_at(QUERY, sortattn.KERNELS["add_bump"]) is None
