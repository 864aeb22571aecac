"""The numerical promises: relative Frobenius errors against float64 on the same inputs.

Unit normal inputs, and the same moved by +100, which a stationary kernel must not notice.
"""

import math

import pytest
import torch

import sortattn

from . import dense
from .cases import CASES, PLAIN, Case, Shape, assert_close, cotangent, draw, leaves, pairs, refusal
from .definition import FORWARD, GRADIENT, check, define

MAIN = ("add_riesz", "add_laplace", "add_bump")
PAIRS = pairs(PLAIN)
every_pair = pytest.mark.parametrize(("case", "backend"), PAIRS)
main_kernels = pytest.mark.parametrize("name", MAIN)
shifts = pytest.mark.parametrize("shift", [0.0, 100.0], ids=["centred", "shifted_by_100"])


def inputs_for(case: Case, shape: Shape, dtype: torch.dtype, device: str, shift: float):
    """Inputs for gradients, none of whose differences is rounded: at a node other than zero a rounded one decides
    between two slopes (docs/numerics.md, "Known misses"), or between two values."""
    query, key, value = draw(shape, dtype, device, shift=shift)
    if case.name in ("add_bump", "spline", "spline_jumps"):
        query, key = ((part * 4096).round() / 4096 for part in (query, key))
    return query, key, value


@shifts
@every_pair
def test_every_kernel_and_backend_in_float32_at_1024(case, backend, shift, device):
    if refusal(backend, case, device) or (case.name == "softmax" and shift):
        return
    shape = Shape((1,), 128, 1024, 16, 16)
    inputs = inputs_for(case, shape, torch.float32, device, shift)
    gradient = cotangent(shape, torch.float32, device)
    check(define(case, inputs, gradient), case, inputs, gradient, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_softmax_shifted_by_100_errs_no_more_than_its_logits(backend, device):
    # the only kernel here that is neither stationary nor a sum of positive terms: it is exp(<q, k>), and though an
    # offset of the keys cancels, one of the queries multiplies every key's. A float32 product of D terms errs by about
    # sqrt(D) u sum |q_d| |k_d|, and an error of d in the logits moves the output by at most d sum_n p_n |v_n - y|
    query, key, value = draw(Shape((1,), 128, 1024, 64, 64), torch.float32, device, shift=100.0)
    bandwidth = 20.0
    exact = [part.double() for part in (query, key, value)]
    expected = sortattn.kernel_attention(*exact, "softmax", bandwidth=bandwidth, backend="reference")
    centred = (exact[1] - exact[1].mean(1, keepdim=True)).abs()
    logits = math.sqrt(64) * 2**-24 * (exact[0].abs() @ centred.mT).max() / bandwidth**2
    weights = (exact[0] @ exact[1].mT / bandwidth**2).softmax(-1)
    spread = sum((weights[..., n, None] * (exact[2][:, n, None] - expected).abs() for n in range(1024)), 0.0)
    bound = FORWARD[torch.float32] + (logits * spread.norm() / expected.norm()).item()
    # that is no licence to be wrong
    assert bound < 1e-4
    output = sortattn.kernel_attention(query, key, value, "softmax", bandwidth=bandwidth, backend=backend)
    assert_close(output, expected, bound)


@shifts
@main_kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=lambda dtype: str(dtype)[6:])
def test_sorted_sums_at_1024_with_64_dimensions_and_channels(name, dtype, shift, device):
    if refusal("sorted", CASES[name], device):
        return
    # with few channels in float64, which has no block of 64 in any other test
    shape = Shape((1,), 128, 1024, 64, 64 if dtype == torch.float32 else 16)
    inputs, gradient = draw(shape, dtype, device, shift=shift), cotangent(shape, dtype, device)
    check(define(CASES[name], inputs, gradient), CASES[name], inputs, gradient, backend="sorted")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@every_pair
def test_sixteen_bits_cost_no_more_than_rounding_the_output(case, backend, dtype, device):
    if refusal(backend, case, device):
        return
    shape = Shape((1,), 128, 1024, 16, 16)
    inputs, gradient = draw(shape, dtype, device), cotangent(shape, dtype, device)
    check(define(case, inputs, gradient), case, inputs, gradient, backend=backend)


@shifts
@every_pair
@pytest.mark.parametrize(
    ("length", "bound"),
    [(16_384, 2e-6), pytest.param(131_072, 5e-6, marks=pytest.mark.slow)],
    ids=["N16384", "N131072"],
)
def test_every_kernel_and_backend_in_float32_with_many_keys(case, backend, length, bound, shift, device):
    if refusal(backend, case, device) or (case.name == "softmax" and shift):
        return
    shape = Shape((1,), 8, length, 8, 16)
    inputs = draw(shape, torch.float32, device, shift=shift)
    if case.name == "spline_jumps":
        inputs = inputs_for(case, shape, torch.float32, device, shift)
    exact = [part.double() for part in inputs]
    expected = sortattn.kernel_attention(*exact, case.kernel, backend="reference")
    assert_close(sortattn.kernel_attention(*inputs, case.kernel, backend=backend), expected, bound)


@shifts
@main_kernels
def test_sorted_sums_in_float32_at_16384(name, shift, device):
    if refusal("sorted", CASES[name], device):
        return
    check_some_queries(name, 16_384, shift, device, bound=2e-6)


@pytest.mark.slow
@shifts
@main_kernels
def test_sorted_sums_in_float32_at_131072(name, shift, device):
    if refusal("sorted", CASES[name], device):
        return
    check_some_queries(name, 131_072, shift, device, bound=5e-6)


def check_some_queries(name: str, length: int, shift: float, device: str, bound: float) -> None:
    """Compare 32 of the queries with the definition in float64, some keys at a time."""
    query, key, value = draw(Shape((1,), length, length, 64, 64), torch.float32, device, shift=shift)
    chosen = torch.randperm(length, generator=torch.Generator().manual_seed(3))[:32].to(device)
    output = sortattn.kernel_attention(query, key, value, name, backend="sorted")
    queries, ones = query[:, chosen].double(), torch.ones_like(value[..., :1])
    pieces = zip(key.double().split(1024, 1), torch.cat([value, ones], -1).double().split(1024, 1), strict=True)
    sums = sum(sortattn.kernel_sum(queries, *piece, name, backend="reference") for piece in pieces)
    assert_close(output[:, chosen], sums[..., :-1] / sums[..., -1:], bound)


@main_kernels
@pytest.mark.parametrize("rows", [1 << 17, pytest.param(1 << 20, marks=pytest.mark.slow)], ids=["M131072", "M1048576"])
def test_sums_and_gradients_of_up_to_a_million_queries_and_keys(name, rows, device):
    columns = rows + 37
    # on a lattice on which differences are exact, see `inputs_for`
    query, key, value = draw(Shape((1,), rows, columns, 2, 4), torch.float32, device)
    query, key = (((part * 65536).round() / 65536).requires_grad_() for part in (query, key))
    value, gradient = value.requires_grad_(), cotangent(Shape((1,), rows, columns, 2, 4), torch.float32, device)
    output = sortattn.kernel_sum(query, key, value, name, backend="sorted")
    output.backward(gradient)
    some = torch.randperm(rows, generator=torch.Generator().manual_seed(3))[:32].to(device)
    sums, slopes = define_some(name, query[:, some], key, value, gradient[:, some])
    assert_close(output[:, some], sums, 5e-6)
    assert_close(query.grad[:, some], slopes, GRADIENT[torch.float32])
    # these kernels are symmetric: what the queries give keys are sums too
    sums, slopes = define_some(name, key[:, some], query, gradient, value[:, some])
    assert_close(value.grad[:, some], sums, GRADIENT[torch.float32])
    assert_close(key.grad[:, some], slopes, GRADIENT[torch.float32])


def define_some(name: str, points, others, rows, own) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64: the sums of all others' rows at some points, and the gradient of their product with own rows."""
    points, others, rows, own = (part.detach().double() for part in (points, others, rows, own))
    points.requires_grad_()
    sums, slopes = torch.zeros_like(own), torch.zeros_like(points)
    for piece in zip(others.split(1 << 17, 1), rows.split(1 << 17, 1), strict=True):
        part = sortattn.kernel_sum(points, *piece, name, backend="reference")
        slopes += torch.autograd.grad(part, points, own)[0]
        sums += part.detach()
    return sums, slopes


@shifts
@main_kernels
@pytest.mark.parametrize(("rows", "columns"), [(16_384, 96), (96, 16_384)], ids=["M16384-N96", "M96-N16384"])
def test_gradients_of_sorted_sums_in_float32_with_16384_points_on_one_side(name, rows, columns, shift, device):
    if refusal("sorted", CASES[name], device):
        return
    shape = Shape((1,), rows, columns, 8, 16)
    inputs, gradient = draw(shape, torch.float32, device, shift=shift), cotangent(shape, torch.float32, device)
    check(define(CASES[name], inputs, gradient), CASES[name], inputs, gradient, backend="sorted")


@shifts
@main_kernels
@pytest.mark.parametrize(("rows", "columns"), [(96, 16_384), (16_384, 96)], ids=["M96-N16384", "M16384-N96"])
def test_few_queries_or_few_keys_among_many_others(name, rows, columns, shift, device):
    # neighbours in the sorted order are then far apart, with hundreds of points of the other kind between them
    if refusal("sorted", CASES[name], device):
        return
    query, key, value = draw(Shape((1,), rows, columns, 64, 64), torch.float32, device, shift=shift)
    chosen = slice(0, 96)
    output = sortattn.kernel_attention(query, key, value, name, backend="sorted")
    exact = (query[:, chosen].double(), key.double(), value.double())
    assert_close(
        output[:, chosen], sortattn.kernel_attention(*exact, name, backend="reference"), FORWARD[torch.float32]
    )


@pytest.mark.parametrize("bandwidth", [0.01, 0.1, 10.0, 100.0], ids=lambda tau: f"tau{tau:g}")
@pytest.mark.parametrize("backend", ["reference", "tiled", "sorted"])
@pytest.mark.parametrize("name", ["add_laplace", "add_bump", "matern32", "spline"])
def test_narrow_and_wide_bandwidths(name, backend, bandwidth, device):
    if refusal(backend, CASES[name], device):
        return
    shape = Shape((1,), 128, 1024, 16, 16)
    inputs, gradient = draw(shape, torch.float32, device), cotangent(shape, torch.float32, device)
    options = {"bandwidth": bandwidth}
    check(define(CASES[name], inputs, gradient, **options), CASES[name], inputs, gradient, backend=backend, **options)


@pytest.mark.parametrize("backend", ["reference", "tiled", "sorted"])
def test_a_narrow_bump_in_one_dimension_is_zero_where_no_key_is_near(backend, device):
    # a difference of prefix sums would leave rounding errors there, and the normalisation make numbers of them
    query, key, value = draw(Shape((1,), 1024, 256, 1, 8), torch.float32, device)
    if refusal(backend, CASES["add_bump"], device):
        return
    output = sortattn.kernel_attention(query, key, value, "add_bump", bandwidth=0.002, backend=backend)
    alone = ((query - key.mT).abs() / 0.002).amin(-1) >= 1
    assert 100 < alone.sum() < 1024
    assert (output[alone] == 0).all()
    # one key in the window: its value, whatever the weight
    one = ((query - key.mT).abs() / 0.002 < 1).sum(-1) == 1
    nearest = value[0, (query - key.mT).abs().argmin(-1)[0]]
    assert_close(output[one], nearest[one[0]], 1e-6)


@every_pair
def test_masked_keys_far_away_cost_no_digits(case, backend, device):
    # their place is taken by something, and it must not be the origin, which is far from all others
    if refusal(backend, case, device) or case.name == "softmax":
        return
    shape = Shape((1,), 64, 512, 16, 16)
    inputs = inputs_for(case, shape, torch.float32, device, shift=100.0)
    gradient = cotangent(shape, torch.float32, device)
    mask = (torch.rand(1, 512, generator=torch.Generator().manual_seed(2)) < 0.5).to(device)
    bandwidth = torch.tensor([case.bandwidth(16)], device=device)
    options = {"key_mask": mask, "bandwidth": bandwidth}
    check(define(case, inputs, gradient, **options), case, inputs, gradient, backend=backend, **options)


@pytest.mark.parametrize("backend", ["reference", "tiled", "sorted", "linear"])
@pytest.mark.parametrize("shift", [100.0, 10_000.0])
@pytest.mark.parametrize("name", [name for name in CASES if name != "softmax"])
def test_offsets_do_no_harm(name, backend, shift, device):
    case = CASES[name]
    if refusal(backend, case, device):
        return
    # at 10,000 float32 has steps of 1/1024: the points are multiples of them, and tie often
    query, key, value = draw(Shape((1,), 96, 300, 3, 4), torch.float32, device)
    query, key = ((part * 256).round() / 256 + shift for part in (query, key))
    points, exact = leaves(query, key, value), leaves(query.double(), key.double(), value.double())
    # 3 is no power of two: a division by it is rounded, and a sine must not see that
    bandwidth = 3.0 if name == "tri" else 1.0
    output = sortattn.kernel_attention(*points, case.kernel, bandwidth=bandwidth, backend=backend)
    expected = dense.attention(case.formula, *exact, bandwidth, floor=case.floor)
    assert_close(output, expected, FORWARD[torch.float32])
