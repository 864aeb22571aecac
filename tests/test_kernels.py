"""The data of the paper's Table 1, and what faster backends read of a kernel."""

import math

import pytest
import torch

import sortattn
from sortattn.kernels import FeatureKernel, SidedKernel, Spline, rebuild, resolve

from . import dense
from .cases import BOX, CASES, Shape, assert_close, draw

INF = math.inf
# name: dimension in units of D, stationary, additive, capacity, complexity
TABLE = {
    "softmax": (INF, "no", False, "inf", "quadratic"),
    "gauss": (INF, "yes", False, "inf", "quadratic"),
    "laplace": (INF, "yes", False, "inf", "quasi linear"),
    "riesz": (INF, "partially", False, "-", "quadratic"),
    "add_riesz": (INF, "partially", True, ">= 2D", "quasi linear"),
    "add_laplace": (INF, "yes", True, "inf", "quasi linear"),
    "add_bump": (INF, "yes", True, "inf", "quasi linear"),
    "tri": (2, "yes", True, "<= 2D", "linear"),
    "relu": (1, "no", True, "<= D", "linear"),
    "elu": (1, "no", True, "<= D", "linear"),
    "dpfp": (6, "no", False, "<= 6D", "linear"),
}
SIDED = {name: case for name, case in {**CASES, "box": BOX}.items() if case.sided}
every_sided = pytest.mark.parametrize("case", SIDED.values(), ids=SIDED.keys())


def test_the_kernels_are_those_of_the_table_in_its_order():
    assert list(sortattn.KERNELS) == list(TABLE)
    for name, kernel in sortattn.KERNELS.items():
        row = (kernel.dimension, kernel.stationary, kernel.additive, kernel.capacity, kernel.complexity)
        assert row == TABLE[name], name
        assert kernel.name == name


@pytest.mark.parametrize("dims", [1, 16, 64])
def test_the_default_bandwidths_are_the_papers(dims):
    root = dims**0.25
    expected = {"softmax": root, "gauss": root, "tri": root, "laplace": 6.0, "add_laplace": 0.5, "add_bump": 1.5}
    for name, kernel in sortattn.KERNELS.items():
        assert kernel.default_bandwidth(dims) == pytest.approx(expected.get(name, 1.0)), name


@pytest.mark.parametrize("name", TABLE)
def test_no_bandwidth_means_the_default(name, device):
    query, key, value = draw(Shape((), 9, 11, 5, 3), torch.float64, device)
    given = sortattn.kernel_attention(query, key, value, name, bandwidth=dense.default_bandwidth(name, 5))
    assert_close(sortattn.kernel_attention(query, key, value, name), given, 1e-12)


def test_a_kernel_of_ones_own_has_the_default_bandwidth_it_was_given(device):
    query, key, value = draw(Shape((), 9, 11, 5, 3), torch.float64, device)
    for make in (
        lambda **tau: sortattn.Spline([0.0], [1.0, -1.0], **tau),
        lambda **tau: sortattn.PolynomialExponential([1.0, 1.0], **tau),
    ):
        output = sortattn.kernel_sum(query, key, value, make(bandwidth=3.0))
        assert_close(output, sortattn.kernel_sum(query, key, value, make(), bandwidth=3.0), 1e-12)


@pytest.mark.parametrize("name", ["relu", "elu", "tri", "dpfp"])
def test_feature_maps_have_the_dimension_of_the_table(name, device):
    kernel = sortattn.KERNELS[name]
    assert isinstance(kernel, FeatureKernel)
    features = kernel.features(torch.randn(4, 7, device=device))
    assert features.shape == (4, TABLE[name][0] * 7)


def test_only_tri_can_be_negative_and_is_clamped(device):
    query, key, _ = draw(Shape((), 200, 200, 1, 1), torch.float64, device)
    for name, kernel in sortattn.KERNELS.items():
        negative = bool((sortattn.gram(3 * query, 3 * key, name, bandwidth=1.0) < 0).any())
        assert negative == (name == "tri"), name
        assert kernel.floor == (1e-6 if name == "tri" else 0.0), name


def test_riesz_kernels_carry_a_thousandth(device):
    zero = torch.zeros(1, 5, dtype=torch.float64, device=device)
    assert sortattn.gram(zero, zero, "riesz").item() == pytest.approx(1e-3)
    # per dimension for the additive one, and whatever the bandwidth
    assert sortattn.gram(zero, zero, "add_riesz", bandwidth=7.0).item() == pytest.approx(5e-3)


# sided terms


def evaluate(kernel: SidedKernel, difference: torch.Tensor) -> torch.Tensor:
    """`f(u)` from the table of sided terms, as `Terms` defines it, with `H(0) = 1/2`."""
    terms = kernel.terms()
    total = torch.zeros_like(difference)
    for j, node in enumerate(terms.nodes):
        for side, polynomials in ((1.0, terms.below), (-1.0, terms.above)):
            beyond = side * difference - node
            step = (beyond > 0).double() + 0.5 * (beyond == 0)
            powers = sum(c * beyond**i for i, c in enumerate(polynomials[j]))
            # far on the wrong side the exponential would be infinite, and the step is zero
            total = total + step * powers * (-terms.rate * beyond.clamp(min=0.0)).exp()
    return total


@every_sided
def test_sided_and_separable_parts_make_up_the_gram_matrix(case):
    kernel = resolve(case.kernel)
    # multiples of 1/4, so that nodes are hit
    query, key = (torch.randint(-12, 13, (rows, 3)).double() / 4 for rows in (40, 50))
    for bandwidth in (1.0, 0.5, torch.tensor([[2.0]], dtype=torch.float64)):
        scale = bandwidth if isinstance(bandwidth, float) else bandwidth.item()
        s, t = query[:, None] / scale, key[None] / scale
        terms = kernel.terms()
        if terms.folded:
            # points of one sign see each other, and the constant is for all
            sided = evaluate(kernel, s.abs() - t.abs()) - evaluate(kernel, s.abs())
            total = torch.where(s * t > 0, sided, 0.0).sum(-1) + terms.constant * query.shape[1]
        else:
            total = evaluate(kernel, s - t).sum(-1)
        parts = kernel.separable(query, key, bandwidth)
        if parts is not None:
            total = total + parts[0][:, None] + parts[1][None]
        assert_close(total, kernel.gram(query, key, bandwidth), 1e-13)


@every_sided
def test_univariate_kernels_are_the_formula(case):
    kernel = resolve(case.kernel)
    difference = torch.arange(-400, 401, dtype=torch.float64) / 100
    if case.name == "add_riesz":
        assert torch.equal(kernel.univariate(difference), -difference.abs())
    else:
        expected = case.formula(difference[:, None], torch.zeros(1, 1, dtype=torch.float64))
        assert_close(kernel.univariate(difference), expected, 1e-13)


@every_sided
def test_only_nodes_at_zero_have_terms_above_and_nodes_ascend(case):
    terms = resolve(case.kernel).terms()
    assert (terms.nodes.diff() > 0).all()
    assert terms.below.shape == terms.above.shape
    assert (terms.above[terms.nodes != 0] == 0).all()


@every_sided
def test_compact_means_zero_beyond_the_outer_nodes(case):
    kernel = resolve(case.kernel)
    terms = kernel.terms()
    assert isinstance(terms.compact, bool)
    assert terms.compact == (case.name in ("add_bump", "box"))
    if terms.compact:
        ends = terms.nodes[[0, -1]] + torch.tensor([-1e-9, 1e-9], dtype=torch.float64)
        assert (kernel.univariate(torch.cat([ends, torch.tensor([-9.0, 9.0], dtype=torch.float64)])) == 0).all()


# splines

ODD_SPLINES = {
    "one_node": sortattn.Spline([0.5], [1.0, -2.0], offset=3.0),
    "jumps": sortattn.Spline([-1.0, 0.5, 2.0], [0.5, 1.0, 0.0, -1.0], offset=0.25, jumps=[1.0, -0.5, 2.0]),
    "float32": sortattn.Spline(torch.tensor([-1.0, 1.0]), torch.tensor([0.0, 0.5, 0.0])),
    "flat": sortattn.Spline([0.0], [0.0, 0.0], offset=1.0),
}


@pytest.mark.parametrize("spline", ODD_SPLINES.values(), ids=ODD_SPLINES.keys())
def test_a_spline_survives_the_trip_through_its_parameters(spline):
    twin = sortattn.Spline.from_parameters(spline.parameters())
    difference = torch.linspace(-4, 4, 81, dtype=torch.float64)
    assert torch.equal(twin.univariate(difference), spline.univariate(difference))
    for part in ("nodes", "slopes", "jumps", "offset"):
        assert torch.equal(getattr(twin, part).double(), getattr(spline, part).double()), part
    again = rebuild(spline.name, spline.parameters())
    assert torch.equal(again.univariate(difference), spline.univariate(difference))


def test_a_polynomial_exponential_survives_the_trip_through_its_parameters():
    kernel = sortattn.PolynomialExponential([1.0, -0.5, 0.25])
    twin = rebuild(kernel.name, kernel.parameters())
    difference = torch.linspace(-4, 4, 81, dtype=torch.float64)
    assert torch.equal(twin.univariate(difference), kernel.univariate(difference))


def test_named_kernels_have_no_parameters():
    for name, kernel in sortattn.KERNELS.items():
        assert kernel.parameters() is None
        assert rebuild(name, None) is kernel


@pytest.mark.parametrize("backend", ["reference", "tiled", "sorted"])
def test_named_kernels_are_members_of_the_families(backend, device):
    if backend == "sorted" and device != "cpu":
        return
    query, key, value = draw(Shape((2,), 30, 40, 3, 4), torch.float64, device)
    twins = {
        "add_bump": sortattn.Spline([-1.0, 0.0, 1.0], [0.0, 1.0, -1.0, 0.0]),
        "add_laplace": sortattn.PolynomialExponential([1.0]),
    }
    for name, twin in twins.items():
        named = sortattn.kernel_attention(query, key, value, name, bandwidth=0.8, backend=backend)
        own = sortattn.kernel_attention(query, key, value, twin, bandwidth=0.8, backend=backend)
        assert_close(own, named, 1e-12)


@pytest.mark.parametrize(
    ("coefficients", "order"), [([1.0, 1.0], 1.5), ([1.0, 1.0, 1 / 3], 2.5)], ids=["Matern32", "Matern52"]
)
def test_the_coefficients_of_matern_kernels_are_right(coefficients, order):
    # k(x) = 2^(1-nu) / Gamma(nu) x^nu K_nu(x), with K_3/2 and K_5/2 integrated numerically: K_nu(x) is the integral of
    # e^(-x cosh t) cosh(nu t)
    x = torch.linspace(0.1, 5, 20, dtype=torch.float64)
    t = torch.linspace(0, 12, 20_001, dtype=torch.float64)
    bessel = torch.trapezoid((-x[:, None] * t.cosh()).exp() * (order * t).cosh(), t, dim=1)
    expected = 2 ** (1 - order) / math.gamma(order) * x**order * bessel
    assert_close(sortattn.PolynomialExponential(coefficients).univariate(x), expected, 1e-10)


def test_kernels_print_their_formula():
    for kernel in sortattn.KERNELS.values():
        assert kernel.name in repr(kernel)
        assert kernel.formula in repr(kernel)


def test_a_kernel_may_be_given_as_an_object(device):
    query, key, value = draw(Shape((), 9, 11, 5, 3), torch.float64, device)
    for name, kernel in sortattn.KERNELS.items():
        by_name = sortattn.kernel_attention(query, key, value, name)
        assert torch.equal(by_name, sortattn.kernel_attention(query, key, value, kernel))


def test_a_spline_that_is_constant_outside_follows_its_tensors():
    slopes = torch.tensor([0.0, 1.0, -1.0, 0.0])
    kernel = Spline([-1.0, 0.0, 1.0], slopes, offset=0.5, jumps=torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16))
    slopes.copy_(torch.tensor([0.0, 2.0, -1.0, 0.0]))
    places = torch.linspace(-3, 3, 101, dtype=torch.float64)
    step, rest = kernel.parts()
    torch.testing.assert_close(step.univariate(places) + rest.univariate(places), kernel.univariate(places))
    assert rest.terms().compact
    assert not step.terms().compact


def test_a_spline_whose_coefficients_are_learned_is_one_part():
    kernel = Spline([-1.0, 0.0, 1.0], torch.tensor([0.0, 1.0, -1.0, 0.0]), offset=0.5)
    assert len(kernel.parts()) == 2
    kernel.slopes.requires_grad_()
    assert kernel.parts() == (kernel,)


def test_a_spline_whose_own_coefficients_are_learned_later_knows_nothing_of_them():
    bump = Spline([-1.0, 0.0, 1.0], [0.0, 1.0, -1.0, 0.0])
    bump.slopes.requires_grad_()
    bump.jumps.requires_grad_()
    with torch.no_grad():
        bump.slopes[0], bump.jumps[1] = -1.0, 0.5
    assert not bump.continuous
    query, key, value = torch.randn(3, 2, 9, 4, dtype=torch.float64)
    found, wanted = (sortattn.kernel_sum(query, key, value, bump, backend=name) for name in ("sorted", "reference"))
    assert torch.allclose(found, wanted)


def test_tensors_that_need_no_gradient_are_copied():
    slopes, coefficients = torch.tensor([0.0, 1.0, -1.0, 0.0]), torch.tensor([1.0, 1.0])
    kernels = sortattn.Spline([-1.0, 0.0, 1.0], slopes), sortattn.PolynomialExponential(coefficients)
    at = torch.tensor([-3.0, 0.25])
    before = [kernel.univariate(at) for kernel in kernels]
    slopes[0], coefficients[1] = -1.0, 5.0
    assert all(torch.equal(kernel.univariate(at), found) for kernel, found in zip(kernels, before, strict=True))


@pytest.mark.parametrize("place", [torch.inference_mode(), torch.device("meta")], ids=["inference", "meta"])
def test_kernels_may_be_made_and_used_wherever(place):
    def compute(kernel):
        inputs = [part.requires_grad_() for part in torch.randn(3, 1, 9, 2, generator=torch.Generator().manual_seed(0))]
        output = sortattn.kernel_attention(*inputs, kernel, backend="sorted")
        return output.detach(), *torch.autograd.grad(output.square().sum(), inputs)

    def make():
        yield sortattn.Spline([-1.0, 0.0, 1.0], [0.0, 1.0, -1.0, 0.0])
        yield sortattn.Spline(torch.tensor([0.0], device="cpu"), torch.tensor([1.0, -1.0], device="cpu"), offset=5.0)
        yield sortattn.PolynomialExponential(torch.tensor([1.0, 1.0], device="cpu"))

    with place:
        made = list(make())
    for kernel, wanted in zip(made, map(compute, make()), strict=True):
        assert all(map(torch.equal, compute(kernel), wanted))


@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_the_default_device_does_not_matter(name):
    query, key, value = (part.requires_grad_() for part in torch.randn(3, 2, 9, 4))
    wanted = sortattn.kernel_attention(query, key, value, name, backend="sorted")
    with torch.device("meta"):
        found = sortattn.kernel_attention(query, key, value, name, backend="sorted")
        found.sum().backward()
    assert torch.equal(found, wanted)
    assert query.grad.device.type == "cpu"
