"""The `reference` backend, which the others are compared with, against the formulas of the paper."""

import pytest
import torch

import sortattn

from . import dense
from .cases import BOX, CASES, Shape, assert_close, cotangent, draw, leaves

# both sides are float64 sums of a few hundred terms in a different order: a few hundred units of 1.1e-16 at worst
ROUNDING = 1e-13

ALL = {**CASES, "box": BOX}
every_kernel = pytest.mark.parametrize("case", ALL.values(), ids=ALL.keys())
SHAPE = Shape((2, 2), 23, 31)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@every_kernel
def test_attention_and_its_gradients_are_those_of_the_formula(case, masked, causal, device):
    points = leaves(*draw(SHAPE, torch.float64, device))
    again = leaves(*points)
    mask = (torch.rand(2, 31, generator=torch.Generator().manual_seed(5)) < 0.7).to(device) if masked else None
    seen = dense.visible(23, 31).to(device) if causal else torch.ones(23, 31, dtype=torch.bool, device=device)
    if masked:
        seen = seen & mask[:, None, None, :]
    bandwidth = 4.0 if case.name == "tri" else case.bandwidth(SHAPE.dims)
    output = sortattn.kernel_attention(
        *points, case.kernel, bandwidth=bandwidth, key_mask=mask, is_causal=causal, backend="reference"
    )
    expected = dense.attention(case.formula, *again, bandwidth, seen, case.floor)
    assert_close(output, expected, ROUNDING)
    gradient = cotangent(SHAPE, torch.float64, device)
    actual = torch.autograd.grad(output, points, gradient)
    wanted = torch.autograd.grad(expected, again, gradient)
    for one, other in zip(actual, wanted, strict=True):
        # a gradient is a difference of quotients: a digit more
        assert_close(one, other, 10 * ROUNDING)


@every_kernel
def test_the_gram_matrix_is_that_of_the_formula(case, device):
    query, key, _ = draw(SHAPE, torch.float64, device)
    expected = dense.weights(case.formula, query, key, case.bandwidth(SHAPE.dims))
    assert_close(sortattn.gram(query, key, case.kernel), expected, ROUNDING)
    for bandwidth in (0.7, torch.tensor([0.7, 2.0], dtype=torch.float64, device=device)):
        expected = dense.weights(case.formula, query, key, bandwidth)
        assert_close(sortattn.gram(query, key, case.kernel, bandwidth=bandwidth), expected, ROUNDING)


def test_the_normaliser_of_tri_is_clamped_at_one_millionth(device):
    # far apart by half a period, so that all weights are negative
    query = torch.full((3, 1), torch.pi, dtype=torch.float64, device=device)
    key, value = (
        torch.zeros(4, 1, dtype=torch.float64, device=device),
        torch.ones(4, 2, dtype=torch.float64, device=device),
    )
    for backend in ("reference", "tiled", "linear"):
        output = sortattn.kernel_attention(query, key, value, "tri", bandwidth=1.0, backend=backend)
        assert_close(output, torch.full_like(output, -4e6), ROUNDING)
