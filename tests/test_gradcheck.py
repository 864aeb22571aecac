"""Every derivative against finite differences in float64, away from kinks."""

import re

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

import sortattn
from sortattn.ops import causal

from .cases import BOX, CASES, Shape, assert_close, draw, leaves, refusal
from .definition import GRADIENT

BACKENDS = ("reference", "tiled", "sorted", "linear")
ALL = {**CASES, "box": BOX}
PAIRS = [
    pytest.param(case, backend, id=f"{name}-{backend}")
    for name, case in ALL.items()
    for backend in BACKENDS
    if refusal(backend, case, "cpu") is None
]
every_pair = pytest.mark.parametrize(("case", "backend"), PAIRS)
causal_pairs = pytest.mark.parametrize(("case", "backend"), [pair for pair in PAIRS if pair.values[1] != "reference"])
sums = pytest.mark.parametrize("function", [sortattn.kernel_attention, sortattn.kernel_sum], ids=["attention", "sum"])
exact = pytest.mark.parametrize("backend", ["reference", "tiled", "sorted"])

SHAPE = Shape((2,), rows=3, columns=4, dims=2, channels=2)
# all kinks of all kernels here, in units of the bandwidth
NODES = (0.0, 0.5, 0.75, 1.0, 1.5, 2.0)
TAU = 0.8
# finite differences move every number by 1e-6; a kink has to be further away than that
STEP, MARGIN = 1e-6, 1e-4


def points(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key, value and bandwidth, with no difference at a kink and no coordinate at zero."""
    query, key, value = draw(SHAPE, torch.float64, device, seed=7)
    bandwidth = torch.tensor([TAU, 1.25 * TAU], dtype=torch.float64, device=device)
    scaled = ((query[:, :, None] - key[:, None]) / bandwidth[:, None, None, None]).abs()
    assert min((scaled - node).abs().min().item() for node in NODES) > MARGIN
    assert min(query.abs().min().item(), key.abs().min().item()) > MARGIN
    return leaves(query, key, value, bandwidth)


def holds(call, *arguments: torch.Tensor, fast: bool = False) -> bool:
    # the error of a central difference is about 1e-16 / STEP from rounding and STEP^2 from curvature
    return gradcheck(call, arguments, eps=STEP, atol=1e-8, rtol=1e-6, fast_mode=fast)


@sums
@every_pair
def test_query_key_value_and_bandwidth(case, backend, function, device):
    assert holds(
        lambda query, key, value, bandwidth: function(
            query, key, value, case.kernel, bandwidth=bandwidth, backend=backend
        ),
        *points(device),
    )


@every_pair
def test_masked_and_grouped_calls(case, backend, device):
    query, key, value, _ = points(device)
    mask = torch.tensor([True, False, True, True], device=device)
    assert holds(
        lambda query, key, value: sortattn.kernel_attention(
            query, key, value, case.kernel, bandwidth=TAU, key_mask=mask, enable_gqa=True, backend=backend
        ),
        *leaves(query, key[:1], value[:1]),
    )


@causal_pairs
def test_causal_calls(case, backend, device, monkeypatch):
    # every key before the query itself by sorting
    for name in ("_CHUNK", "_SHORT", "_SMALL"):
        monkeypatch.setattr(causal, name, 1)
    assert holds(
        lambda query, key, value, bandwidth: sortattn.kernel_attention(
            query, key, value, case.kernel, bandwidth=bandwidth, is_causal=True, backend=backend
        ),
        *points(device),
        # the linear backend pads to chunks of 128: one random direction instead of every entry
        fast=backend == "linear",
    )


@sums
@exact
def test_slopes_offset_and_jumps_of_a_spline(function, backend, device):
    query, key, value, bandwidth = points(device)
    slopes = torch.tensor([-0.25, 0.75, -0.5, 0.125], dtype=torch.float64)
    offset, jumps = torch.tensor(1.0, dtype=torch.float64), torch.tensor([0.5, 0.25, -0.5], dtype=torch.float64)

    def call(query, bandwidth, slopes, offset, jumps):
        kernel = sortattn.Spline([-1.0, 0.5, 2.0], slopes, offset=offset, jumps=jumps)
        return function(query, key, value, kernel, bandwidth=bandwidth, backend=backend)

    assert holds(call, query, bandwidth, *leaves(slopes, offset, jumps))


@exact
def test_slopes_of_a_spline_that_starts_as_a_bump(backend, device):
    # compact support is lost as soon as a coefficient may change
    query, key, value, _ = points(device)
    slopes = torch.tensor([0.0, 1.0, -1.0, 0.0], dtype=torch.float64)

    def call(slopes):
        kernel = sortattn.Spline([-1.0, 0.0, 1.0], slopes)
        return sortattn.kernel_sum(query, key, value, kernel, bandwidth=TAU, backend=backend)

    assert holds(call, *leaves(slopes))


@sums
@exact
@pytest.mark.parametrize("degree", [0, 1, 2])
def test_coefficients_of_a_polynomial_exponential(degree, function, backend, device):
    query, key, value, bandwidth = points(device)
    coefficients = torch.tensor([1.0, 0.75, 0.5][: degree + 1], dtype=torch.float64)

    def call(query, bandwidth, coefficients):
        kernel = sortattn.PolynomialExponential(coefficients)
        return function(query, key, value, kernel, bandwidth=bandwidth, backend=backend)

    assert holds(call, query, bandwidth, *leaves(coefficients))


@exact
def test_coefficients_in_float32_get_float32_gradients(backend, device):
    query, key, value, _ = (part.detach().float() for part in points(device))
    slopes = torch.tensor([-0.25, 0.75, -0.5, 0.125], requires_grad=True)
    coefficients = torch.tensor([1.0, 1.0], requires_grad=True)
    for kernel, numbers in (
        (sortattn.Spline([-1.0, 0.5, 2.0], slopes, offset=1.0), slopes),
        (sortattn.PolynomialExponential(coefficients), coefficients),
    ):
        sortattn.kernel_attention(query, key, value, kernel, backend=backend).square().sum().backward()
        assert numbers.grad.dtype == torch.float32
        assert numbers.grad.isfinite().all()
        assert (numbers.grad != 0).any()


def backward_twice(case, backend: str, device: str) -> torch.Tensor:
    query, key, value, bandwidth = points(device)
    output = sortattn.kernel_attention(query, key, value, case.kernel, bandwidth=bandwidth, backend=backend)
    (gradient,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), query)[0]


@pytest.mark.parametrize("backend", ["tiled", "sorted"])
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump", "spline", "matern32", "softmax", "riesz"])
def test_a_second_derivative_is_an_error_and_not_a_wrong_number(name, backend, device):
    case = CASES[name]
    if refusal(backend, case, device):
        return
    try:
        found = backward_twice(case, backend, device)
    except RuntimeError as error:
        if not re.search("no second derivatives|not implemented|derivative for", str(error)):
            raise
        return
    # torch's own attention has one where it is made of plain operations, as in float64 on CUDA devices
    assert name == "softmax"
    assert_close(found, backward_twice(case, "reference", device), GRADIENT[torch.float64])


def test_a_second_derivative_through_plain_attention_of_torch_is_right(device):
    case = CASES["softmax"]
    with sdpa_kernel(SDPBackend.MATH):
        found = backward_twice(case, "tiled", device)
    assert_close(found, backward_twice(case, "reference", device), GRADIENT[torch.float64])


@pytest.mark.parametrize("backend", ["reference", "linear"])
@pytest.mark.parametrize("name", ["gauss", "laplace", "riesz", "add_laplace", "matern52", "tri", "relu", "elu"])
def test_second_derivatives_of_plain_torch_backends_are_right(name, backend, device):
    case = CASES[name]
    if refusal(backend, case, device) is None:
        query, key, value, _ = points(device)

        def call(query, key, value):
            # wide enough for the normaliser of `tri` to stay away from zero
            return sortattn.kernel_attention(query, key, value, case.kernel, bandwidth=4.0, backend=backend)

        assert gradgradcheck(call, (query, key, value), eps=STEP, atol=1e-6, rtol=1e-5)
