"""At a kink the derivative is the mean of the two one-sided ones, and so is the value at a jump; in every backend.

All numbers here are multiples of 1/8 below 8, exact in every dtype: with 16-bit inputs ties are the rule.
"""

import pytest
import torch

import sortattn

from . import dense
from .cases import BOX, CASES, Shape, assert_close, cotangent, leaves, refusal
from .definition import FORWARD, GRADIENT

BACKENDS = ("reference", "tiled", "sorted", "linear")
ALL = {**CASES, "box": BOX}
PAIRS = [
    pytest.param(case, backend, id=f"{name}-{backend}")
    for name, case in ALL.items()
    for backend in BACKENDS
    if refusal(backend, case, "cpu") is None
]
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:]
)

# kernel -> its kinks in `s - t`, in units of the bandwidth
KINKS = {
    "laplace": [0.0],
    "add_riesz": [0.0],
    "add_laplace": [0.0],
    "add_bump": [-1.0, 0.0, 1.0],
    "spline": [-1.0, 0.5, 2.0],
    "spline_jumps": [-1.5, -0.5, 0.75],
    "box": [-1.0, 1.5],
    "matern32": [0.0],
}
POINTS = [
    pytest.param(case, backend, kink, id=f"{name}-{backend}-at{kink:g}")
    for name, case in ALL.items()
    for backend in BACKENDS
    for kink in KINKS.get(name, [])
    if refusal(backend, case, "cpu") is None
]


def one_sided_mean(case, difference: float, place: float) -> tuple[float, float]:
    """The mean of value and derivative by `s` just right and just left of `s = place + difference`, `t = place`."""
    values, slopes = [], []
    for side in (-1e-9, 1e-9):
        s = torch.tensor([[place + difference + side]], dtype=torch.float64, requires_grad=True)
        value = dense.weights(case.formula, s, torch.tensor([[place]], dtype=torch.float64), 1.0)
        value.sum().backward()
        values.append(value.item())
        slopes.append(s.grad.item())
    return sum(values) / 2, sum(slopes) / 2


@every_dtype
@pytest.mark.parametrize(("case", "backend", "kink"), POINTS)
@pytest.mark.parametrize("bandwidth", [1.0, 0.5, 1.5])
def test_the_derivative_at_a_kink_is_the_mean_of_both_sides(case, backend, kink, bandwidth, dtype, device):
    if refusal(backend, case, device):
        return
    # 0.75 is no kink of |t|
    place = 0.75
    query = torch.tensor([[place + kink * bandwidth]], dtype=dtype, device=device, requires_grad=True)
    key = torch.tensor([[place]], dtype=dtype, device=device, requires_grad=True)
    value = torch.ones(1, 1, dtype=dtype, device=device)
    output = sortattn.kernel_sum(query, key, value, case.kernel, bandwidth=bandwidth, backend=backend)
    output.sum().backward()
    expected, slope = one_sided_mean(case, kink, place / bandwidth)
    assert output.item() == pytest.approx(expected, rel=max(FORWARD[dtype], 1e-8), abs=1e-8)
    assert query.grad.item() == pytest.approx(slope / bandwidth, rel=max(GRADIENT[dtype], 1e-8), abs=1e-8)
    if case.name != "add_riesz":
        # stationary: the key moves against the query
        assert key.grad.item() == -query.grad.item()


@every_dtype
@pytest.mark.parametrize(("case", "backend"), PAIRS)
def test_gradients_on_a_lattice_full_of_ties_match_the_definition(case, backend, dtype, device):
    if refusal(backend, case, device):
        return
    shape = Shape((2,), 63, 100, 3, 4)
    generator = torch.Generator().manual_seed(11)

    def lattice(rows):
        numbers = torch.randint(-6, 7, (*shape.leading, rows, shape.dims), generator=generator)
        return (numbers / 4).to(device, dtype)

    query, key = lattice(shape.rows), lattice(shape.columns)
    value = torch.randn(*shape.leading, shape.columns, shape.channels, generator=generator).to(device, dtype)
    gradient = cotangent(shape, dtype, device)
    bandwidth = 4.0 if case.name == "tri" else 1.0
    points, exact = leaves(query, key, value), leaves(query.double(), key.double(), value.double())
    output = sortattn.kernel_attention(*points, case.kernel, bandwidth=bandwidth, backend=backend)
    expected = dense.attention(case.formula, *exact, bandwidth, floor=case.floor)
    assert_close(output, expected, FORWARD[dtype])
    actual = torch.autograd.grad(output, points, gradient)
    wanted = torch.autograd.grad(expected, exact, gradient.double())
    for one, other in zip(actual, wanted, strict=True):
        assert_close(one, other, GRADIENT[dtype])


@pytest.mark.parametrize("backend", ["reference", "tiled", "sorted"])
def test_zero_and_minus_zero_tie(backend, device):
    zero, minus = torch.zeros(1, 1, device=device), -torch.zeros(1, 1, device=device)
    one = torch.ones(1, 1, device=device)
    if refusal(backend, CASES["add_laplace"], device):
        return
    for first, second in ((zero, minus), (minus, zero)):
        query, key = leaves(first, second)
        sortattn.kernel_sum(query, key, one, "add_laplace", backend=backend).sum().backward()
        assert query.grad.item() == 0.0
        assert key.grad.item() == 0.0
        assert sortattn.weighted_sign_sum(first, second, one, one, backend=backend).item() == 0.0


@pytest.mark.parametrize("backend", ["reference", "tiled", "linear"])
@pytest.mark.parametrize("name", ["relu", "dpfp"])
def test_rectifiers_have_slope_one_half_at_zero(name, backend, device):
    query = torch.zeros(1, 1, dtype=torch.float64, device=device, requires_grad=True)
    key = value = torch.ones(1, 1, dtype=torch.float64, device=device)
    sortattn.kernel_sum(query, key, value, name, backend=backend).sum().backward()
    # relu(s) relu(1) has slope 1/2 at zero; dpfp has products of two rectifiers, flat at zero
    assert query.grad.item() == {"relu": 0.5, "dpfp": 0.0}[name]
