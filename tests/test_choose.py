"""The choice of `auto`: always a backend that serves the call, the sorted one where it is long."""

import pytest
import torch

import sortattn
from sortattn import choose
from sortattn.validation import make_problem

from .cases import CASES, Shape, draw, refusal

pytestmark = pytest.mark.usefixtures("cpu_only")


def chosen(case, shape: Shape, **options) -> str:
    kernel = sortattn.KERNELS.get(case.name, case.kernel)
    inputs = (part.expand(*part.shape) for part in draw(shape, torch.float32))
    return choose.cheapest(make_problem(*inputs, kernel, **options), kernel, normalised=True)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("length", [1, 100, 5000])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_auto_takes_a_backend_that_serves_the_call(case, length, causal):
    name = chosen(case, Shape((1,), length, length, 4, 4), is_causal=causal)
    assert name != "keops"
    assert refusal(name, case, "cpu", causal=causal) is None


@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_auto_sorts_what_is_long_and_only_that(name):
    assert chosen(CASES[name], Shape((1,), 8192, 8192, 8, 8)) == "sorted"
    assert chosen(CASES[name], Shape((1,), 8, 8, 64, 64)) != "sorted"


@pytest.mark.parametrize("name", ["tri", "relu", "elu", "dpfp"])
def test_auto_uses_feature_maps_where_there_are_many_points(name):
    assert chosen(CASES[name], Shape((1,), 8192, 8192, 8, 8)) == "linear"


def test_auto_never_makes_a_dense_matrix_of_a_long_sequence():
    for name in ("softmax", "gauss", "laplace", "riesz"):
        assert chosen(CASES[name], Shape((1,), 8192, 8192, 8, 8)) == "tiled"


def test_the_cost_model_can_be_printed():
    text = choose.cost_table()
    for word in ("sorted", "tiled", "reference", "linear", "add_laplace", "softmax", "P M N D"):
        assert word in text
