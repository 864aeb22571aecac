"""Rows times numbers: the derivative knows the product only."""

import torch

from sortattn.ops.scale import dot_rows, scale_rows


def test_gradients_of_scaled_rows_are_those_of_the_product(device):
    rows, factors, other = (
        torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        for shape in ((2, 5, 3), (2, 5), (2, 5, 3))
    )
    torch.autograd.gradcheck(scale_rows, (rows, factors))
    torch.autograd.gradcheck(scale_rows, (rows, factors[:, :1]))
    torch.autograd.gradcheck(dot_rows, (rows, other))
    torch.autograd.gradgradcheck(scale_rows, (rows, factors))


def test_a_row_that_is_scaled_to_zero_has_no_gradient_by_its_factor(device):
    rows = torch.ones(1, 2, 3, device=device)
    factors = torch.tensor([[0.0, 2.0]], device=device, requires_grad=True)
    scale_rows(rows, factors).sum().backward()
    assert factors.grad.tolist() == [[0.0, 3.0]]


def test_inner_products_of_more_rows_than_a_block_holds(device):
    left, right = torch.randn(2, 3, 20_000, 2, dtype=torch.float64, device=device).unbind()
    torch.testing.assert_close(dot_rows(left, right), (left * right).sum(-1))
