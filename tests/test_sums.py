"""The paper's weighted sums against their definitions."""

import pytest
import torch

import sortattn

from .cases import Shape, assert_close, cotangent, draw, leaves
from .definition import FORWARD, GRADIENT

backends = pytest.mark.parametrize("backend", ["auto", "reference", "tiled", "sorted"])
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:]
)
shapes = pytest.mark.parametrize(
    "shape", [Shape((2, 3), 63, 100, 5, 7), Shape((), 1, 1, 1, 1), Shape((1,), 70, 300, 2, 3)], ids=str
)


def abs_sum(query, key, value):
    return (query[..., :, None, :] - key[..., None, :, :]).abs().sum(-1) @ value


def laplace_sum(query, key, value):
    return (-(query[..., :, None, :] - key[..., None, :, :]).abs()).exp().sum(-1) @ value


def sign_sum(query, key, value, weight):
    signs = (query[..., :, None, :] - key[..., None, :, :]).sign()
    return (signs * (weight @ value.mT)[..., None]).sum(-2)


def compare(function, definition, inputs, gradient):
    dtype = inputs[0].dtype
    points, exact = leaves(*inputs), leaves(*(part.double() for part in inputs))
    output, expected = function(*points), definition(*exact)
    assert output.dtype == dtype
    assert_close(output, expected, FORWARD[dtype])
    actual = torch.autograd.grad(output, points, gradient, materialize_grads=True)
    wanted = torch.autograd.grad(expected, exact, gradient.double(), materialize_grads=True)
    for one, other in zip(actual, wanted, strict=True):
        assert_close(one, other, GRADIENT[dtype])


@backends
@dtypes
@shapes
@pytest.mark.parametrize(
    ("function", "definition"),
    [(sortattn.weighted_abs_sum, abs_sum), (sortattn.weighted_laplace_sum, laplace_sum)],
    ids=["abs", "laplace"],
)
def test_abs_and_laplace_sums_are_their_definitions(function, definition, shape, dtype, backend, device):
    inputs, gradient = draw(shape, dtype, device), cotangent(shape, dtype, device)
    compare(lambda *points: function(*points, backend=backend), definition, inputs, gradient)


@backends
@dtypes
@shapes
def test_sign_sums_are_their_definition(shape, dtype, backend, device):
    query, key, value = draw(shape, dtype, device)
    # ties among them
    query, key = ((part * 4).round() / 4 for part in (query, key))
    weight = cotangent(shape, dtype, device)
    gradient = draw(Shape(shape.leading, shape.rows, 1, shape.dims), dtype, device, seed=5)[0]
    compare(
        lambda *points: sortattn.weighted_sign_sum(*points, backend=backend),
        sign_sum,
        (query, key, value, weight),
        gradient,
    )


@backends
def test_the_sign_sum_is_the_gradient_of_the_abs_sum(backend, device):
    shape = Shape((2,), 20, 30, 3, 4)
    query, key, value = draw(shape, torch.float64, device)
    weight = cotangent(shape, torch.float64, device)
    (query,) = leaves(query)
    total = (sortattn.weighted_abs_sum(query, key, value, backend=backend) * weight).sum()
    (gradient,) = torch.autograd.grad(total, query)
    signs = sortattn.weighted_sign_sum(query.detach(), key, value, weight, backend=backend)
    assert_close(signs, gradient, FORWARD[torch.float64])


@backends
@pytest.mark.parametrize("shape", [Shape((2,), 0, 3, 2, 2), Shape((2,), 3, 0, 2, 2)], ids=["no_queries", "no_keys"])
def test_empty_sums_are_zero(shape, backend, device):
    inputs = leaves(*draw(shape, torch.float32, device))
    (weight,) = leaves(cotangent(shape, torch.float32, device))
    outputs = [
        sortattn.weighted_abs_sum(*inputs, backend=backend),
        sortattn.weighted_laplace_sum(*inputs, backend=backend),
        sortattn.weighted_sign_sum(*inputs, weight, backend=backend),
    ]
    for output, columns in zip(outputs, (shape.channels, shape.channels, shape.dims), strict=True):
        assert output.shape == (*shape.leading, shape.rows, columns)
        assert (output == 0).all()
        output.sum().backward()


@backends
def test_leading_dimensions_of_sums_broadcast(backend, device):
    query, key, value = draw(Shape((2, 3), 9, 11, 2, 4), torch.float64, device)
    query, key, value = query[:, :1], key[:1], value[0, 0]
    wide = [part.expand(2, 3, *part.shape[-2:]) for part in (query, key, value)]
    weight = cotangent(Shape((2, 3), 9, 11, 2, 4), torch.float64, device)
    assert_close(sortattn.weighted_abs_sum(query, key, value, backend=backend), abs_sum(*wide), FORWARD[torch.float64])
    signs = sortattn.weighted_sign_sum(query, key, value, weight, backend=backend)
    assert_close(signs, sign_sum(*wide, weight), FORWARD[torch.float64])


@backends
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("which", range(4), ids=["query", "key", "value", "weight"])
def test_a_bad_number_spoils_the_sums_of_its_head_and_no_other(which, bad, backend, device):
    shape = Shape((2,), 20, 30, 3, 4)
    inputs = [*draw(shape, torch.float32, device), cotangent(shape, torch.float32, device)]
    inputs[which][1, 7, 2] = bad
    outputs = [sortattn.weighted_sign_sum(*inputs, backend=backend)]
    if which < 3:
        outputs += [
            function(*inputs[:3], backend=backend)
            for function in (sortattn.weighted_abs_sum, sortattn.weighted_laplace_sum)
        ]
    for output in outputs:
        assert output[1].isnan().all()
        assert output[0].isfinite().all()
