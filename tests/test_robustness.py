"""Degenerate sizes, extreme numbers, odd layouts, and NaN or infinity in one head."""

import threading
from functools import partial

import pytest
import torch

import sortattn

from . import dense
from .cases import (
    BOX,
    CASES,
    PLAIN,
    SIDED,
    Shape,
    assert_close,
    cotangent,
    draw,
    leaves,
    pairs,
    refusal,
    relative_error,
)
from .definition import FORWARD, GRADIENT, define

PAIRS = pairs(PLAIN)
every_pair = pytest.mark.parametrize(("case", "backend"), PAIRS)
sided_pairs = pytest.mark.parametrize(("case", "backend"), [pair for pair in PAIRS if pair.values[0].sided])
exact_backends = pytest.mark.parametrize("backend", ["reference", "tiled", "sorted"])


def tau(case) -> float | None:
    return 4.0 if case.name == "tri" else None


# sizes

EMPTY = {
    "no_keys": Shape((2,), 3, 0, 2, 2),
    "no_queries": Shape((2,), 0, 3, 2, 2),
    "neither": Shape((2,), 0, 0, 2, 2),
    "no_channels": Shape((2,), 3, 4, 2, 0),
    "no_batch": Shape((0, 2), 3, 4, 2, 2),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", EMPTY.values(), ids=EMPTY.keys())
@every_pair
def test_empty_inputs_give_empty_or_zero_outputs_and_gradients(case, backend, shape, causal, device):
    if refusal(backend, case, device, causal=causal):
        return
    for function in (sortattn.kernel_attention, sortattn.kernel_sum):
        bandwidth = torch.tensor(2.0, device=device, requires_grad=True)
        points = leaves(*draw(shape, torch.float32, device))
        output = function(*points, case.kernel, bandwidth=bandwidth, is_causal=causal, backend=backend)
        assert output.shape == (*shape.leading, shape.rows, shape.channels)
        assert (output == 0).all()
        gradients = torch.autograd.grad(output.sum(), (*points, bandwidth), materialize_grads=True)
        assert all((part == 0).all() for part in gradients)


@every_pair
def test_one_key_gives_its_value_to_every_query_that_it_has_any_weight_for(case, backend, device):
    query, key, value = draw(Shape((3,), 7, 1, 1, 1), torch.float32, device)
    output = sortattn.kernel_attention(query, key, value, case.kernel, bandwidth=tau(case), backend=backend)
    weight = dense.weights(case.formula, query.double(), key.double(), tau(case) or case.bandwidth(1))[..., 0]
    expected = torch.where(weight[..., None] > 0, value.double(), 0.0)
    assert_close(output, expected, FORWARD[torch.float32])


# ties


@pytest.mark.parametrize("count", [70, 1500], ids=["N70", "N1500"])
@every_pair
def test_equal_keys_give_the_mean_of_their_values(case, backend, count, device):
    query, key, value = draw(Shape((1,), 5, count, 3, 4), torch.float32, device)
    key = key[:, :1].expand(-1, count, -1)
    points = leaves(query, key, value)
    output = sortattn.kernel_attention(*points, case.kernel, bandwidth=tau(case), backend=backend)
    seen = dense.weights(case.formula, query.double(), key.double(), tau(case) or case.bandwidth(3)).sum(-1) > 0
    expected = torch.where(seen[..., None], value.double().mean(1, keepdim=True), 0.0)
    # equal weights are rounded alike, so errors of the normaliser add up, but in no more than a block of 128 terms
    assert_close(output, expected, FORWARD[torch.float32] + 128 * 2**-24)


@pytest.mark.parametrize("count", [70, 200, 1500], ids=["N70", "N200", "N1500"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=lambda dtype: str(dtype)[6:])
@every_pair
def test_all_queries_equal_to_all_keys(case, backend, dtype, count, device):
    shape = Shape((1,), count, count, 2, 3)
    _, _, value = draw(shape, dtype, device)
    query = key = torch.full((1, count, 2), 0.75, dtype=dtype, device=device)
    points = leaves(query, key, value)
    output = sortattn.kernel_attention(*points, case.kernel, bandwidth=4.0, backend=backend)
    assert_close(output, value.double().mean(1, keepdim=True).expand(-1, count, -1), FORWARD[dtype])
    gradient = cotangent(shape, dtype, device)
    expected = define(case, (query, key, value), gradient, bandwidth=4.0)
    gradients = torch.autograd.grad(output, points, gradient)
    for actual, wanted, scale in zip(gradients, expected.gradients, expected.scales, strict=True):
        assert_close(actual, wanted, GRADIENT[dtype], scale)


@pytest.mark.parametrize("levels", [1, 2, 7], ids=lambda levels: f"{levels}_levels")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", [*(CASES[name] for name in SIDED), BOX], ids=lambda case: case.name)
def test_long_runs_of_ties_are_summed_by_sorting(case, dtype, levels, device):
    if refusal("sorted", case, device):
        return
    # runs of several hundred equal points, on both sides of the kinks of all kernels
    shape = Shape((1,), 700, 1300, 2, 3)
    generator = torch.Generator().manual_seed(levels)
    _, _, value = draw(shape, dtype, device)
    query, key = (
        (torch.randint(levels, (1, rows, 2), generator=generator) / 2 - 1.0).to(device, dtype) for rows in (700, 1300)
    )
    gradient = cotangent(shape, dtype, device)
    points = leaves(query, key, value)
    output = sortattn.kernel_attention(*points, case.kernel, bandwidth=1.0, backend="sorted")
    expected = define(case, (query, key, value), gradient, bandwidth=1.0)
    assert_close(output, expected.output, FORWARD[dtype])
    gradients = torch.autograd.grad(output, points, gradient)
    for actual, wanted, scale in zip(gradients, expected.gradients, expected.scales, strict=True):
        assert_close(actual, wanted, GRADIENT[dtype], scale)


# numbers


def assert_close_but_for_flushed(actual, expected, bound, flushed) -> None:
    """`assert_close`, with an absolute error of each number beside it."""
    difference = actual.double() - expected
    assert_close(expected + difference.sign() * (difference.abs() - flushed).clamp(min=0.0), expected, bound)


def flushes(backend: str, case, device: str) -> bool:
    """Whether sums go through hardware that has zero for every number below the smallest normal one.

    On a GPU atomic additions do, by which the sorted backend adds up without the deterministic mode, and SDPA.
    """
    if device == "cpu":
        return False
    atomic = backend == "sorted" and not torch.are_deterministic_algorithms_enabled()
    return atomic or (backend, case.name) == ("tiled", "gauss")


@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-41], ids=["1e30", "1e-30", "denormal"])
@every_pair
def test_large_and_tiny_values_are_scaled_and_nothing_else(case, backend, size, device):
    query, key, value = draw(Shape((2,), 20, 30, 3, 4), torch.float32, device)
    value = (value.double() * size).float()
    points = leaves(query, key, value)
    output = sortattn.kernel_attention(*points, case.kernel, bandwidth=tau(case), backend=backend)
    exact = (query.double(), key.double(), value.double())
    expected = dense.attention(case.formula, *exact, tau(case) or case.bandwidth(3), floor=case.floor)
    # the smallest float32 is 1.4e-45, so a denormal has few digits: a sum of 30 rounded products and their quotient
    few = 32 * 1.4e-45 / size
    # less than the smallest normal number for each of the terms, divided as the sum is: none where a sum is normal
    total = dense.weights(case.formula, *exact[:2], tau(case) or case.bandwidth(3)).sum(-1, keepdim=True)
    terms = 30 if flushes(backend, case, device) else 0
    flushed = terms * torch.finfo(torch.float32).tiny / torch.where(total == 0, 1.0, total.abs())
    assert_close_but_for_flushed(output, expected, FORWARD[torch.float32] + few, flushed)
    gradients = torch.autograd.grad(output.sum(), points)
    assert all(part.isfinite().all() for part in gradients)


@exact_backends
@pytest.mark.parametrize("size", [1e-41, 1e-38, 1e30], ids=["denormal", "tiny", "1e30"])
def test_points_of_any_size_are_told_apart(size, backend, device):
    # distances of 1e-41 are exact in float32, and their signs decide the gradient of |q - k|
    generator = torch.Generator().manual_seed(0)
    query, key = (
        (torch.randint(-20, 21, (1, rows, 2), generator=generator).double() * size).float().to(device)
        for rows in (90, 110)
    )
    value, weight = (torch.randn(1, rows, 3, generator=generator).to(device) for rows in (110, 90))
    signs = (query[:, :, None].double() - key[:, None].double()).sign()
    expected = torch.einsum("pmnd,pmc,pnc->pmd", signs, weight.double(), value.double())
    output = sortattn.weighted_sign_sum(query, key, value, weight, backend=backend)
    assert_close(output, expected, FORWARD[torch.float32])
    distances = (query[:, :, None].double() - key[:, None].double()).abs().sum(-1)
    expected = distances @ value.double()
    # sums of denormals are multiples of the smallest of them
    few = 1.4e-45 * 256 / size
    # atomic additions of two dimensions, each from two sides: what is below the smallest normal number is zero there
    flushed = 4 * torch.finfo(torch.float32).tiny if device != "cpu" and backend == "sorted" else 0.0
    output = sortattn.weighted_abs_sum(query, key, value, backend=backend)
    assert_close_but_for_flushed(output, expected, FORWARD[torch.float32] + few, flushed)


@pytest.mark.parametrize("size", [1e4, 1e10, 1e30], ids=["1e4", "1e10", "1e30"])
@sided_pairs
def test_points_far_apart_are_no_overflow(case, backend, size, device):
    if size == 1e4 and case.name in ("add_laplace", "matern32", "matern52"):
        # e^-500 is a number in float64 and zero in float32
        return
    query, key, value = draw(Shape((2,), 20, 30, 3, 4), torch.float32, device)
    query, key = query * size, key * size
    # some pairs are neighbours all the same
    query[:, :10] = key[:, :10]
    output = sortattn.kernel_attention(query, key, value, case.kernel, backend=backend)
    exact = (query.double(), key.double(), value.double())
    assert_close(output, sortattn.kernel_attention(*exact, case.kernel, backend="reference"), FORWARD[torch.float32])


@sided_pairs
def test_a_weight_that_is_hardly_a_number_is_taken_or_left(case, backend, device):
    # e^-90 is 8e-40: a float32 with few digits, whose reciprocal is infinite
    value = torch.tensor([[2.0, -3.0]], device=device)
    for distance in (80.0, 86.0, 88.0, 90.0, 95.0, 103.0, 120.0):
        points = leaves(torch.zeros(1, 1, device=device), torch.full((1, 1), distance, device=device), value)
        output = sortattn.kernel_attention(*points, case.kernel, bandwidth=1.0, backend=backend)
        assert (output == 0).all() or relative_error(output, value) < 1e-2
        assert all(part.isfinite().all() for part in torch.autograd.grad(output.sum(), points))


# layouts


def strided(part: torch.Tensor) -> torch.Tensor:
    """The same numbers, every other row and column of a larger tensor."""
    wide = part.repeat_interleave(2, -1).repeat_interleave(2, -2)
    return wide[..., ::2, ::2]


def transposed(part: torch.Tensor) -> torch.Tensor:
    """The same numbers, stored with the columns outside."""
    return part.mT.contiguous().mT


def heads_inside(part: torch.Tensor) -> torch.Tensor:
    """The same numbers, stored `(B, N, H, D)` as a projection leaves them."""
    return part.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("layout", [strided, transposed, heads_inside], ids=lambda layout: layout.__name__)
@every_pair
def test_the_layout_of_the_inputs_does_not_matter(case, backend, layout, device):
    inputs = draw(Shape((2, 2), 20, 30, 3, 4), torch.float32, device)
    gradient = cotangent(Shape((2, 2), 20, 30, 3, 4), torch.float32, device)
    plain, odd = leaves(*inputs), [layout(part).detach().requires_grad_() for part in inputs]
    assert all(part.shape == other.shape for part, other in zip(plain, odd, strict=True))
    options = {"bandwidth": tau(case), "backend": backend}
    first = sortattn.kernel_attention(*plain, case.kernel, **options)
    second = sortattn.kernel_attention(*odd, case.kernel, **options)
    assert_close(second, first, FORWARD[torch.float32])
    for one, other in zip(
        torch.autograd.grad(first, plain, gradient), torch.autograd.grad(second, odd, layout(gradient)), strict=True
    ):
        assert_close(other, one, GRADIENT[torch.float32])


@every_pair
def test_expanded_inputs_are_taken_and_left_alone(case, backend, device):
    query, key, value = draw(Shape((), 20, 30, 3, 4), torch.float32, device)
    copies = [part.clone() for part in (query, key, value)]
    expanded = [part.expand(2, 3, *part.shape) for part in (query, key, value)]
    output = sortattn.kernel_attention(*expanded, case.kernel, backend=backend)
    single = sortattn.kernel_attention(query, key, value, case.kernel, backend=backend)
    assert output.shape == (2, 3, 20, 4)
    assert_close(output, single.expand(2, 3, 20, 4), FORWARD[torch.float32])
    assert all(torch.equal(part, copy) for part, copy in zip((query, key, value), copies, strict=True))


# NaN and infinity


def within(seconds: float, function):
    """What the function returns; an error if it takes longer."""
    result = []
    thread = threading.Thread(target=lambda: result.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert result, f"no result within {seconds} seconds"
    return result[0]


@pytest.mark.usefixtures("reproducible")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=["nan", "inf", "minus_inf"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
@every_pair
def test_a_bad_number_spoils_its_head_and_no_other(case, backend, which, bad, device):
    inputs = draw(Shape((2, 2), 70, 90, 2, 3), torch.float32, device)
    options = {"bandwidth": tau(case), "backend": backend}

    def run(inputs):
        points = leaves(*inputs)
        output = sortattn.kernel_attention(*points, case.kernel, **options)
        return output, torch.autograd.grad(output.nan_to_num().sum(), points)

    clean, clean_gradients = run(inputs)
    spoilt = [part.clone() for part in inputs]
    spoilt[which][1, 0, 33, 1] = bad
    output, gradients = within(60, lambda: run(spoilt))
    assert output[1, 0].isnan().all()
    for b, h in ((0, 0), (0, 1), (1, 1)):
        assert torch.equal(output[b, h], clean[b, h])
        for part, before in zip(gradients, clean_gradients, strict=True):
            assert torch.equal(part[b, h], before[b, h])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize(("case", "backend"), [*PAIRS, pytest.param(BOX, "sorted", id="box-sorted"), *pairs(("grid",))])
@pytest.mark.usefixtures("cpu_only")
def test_a_bandwidth_that_is_no_number_spoils_its_head_and_no_other(case, backend, bad, device):
    inputs = draw(Shape((3,), 70, 90, 2, 3), torch.float32, device)
    for function in (sortattn.kernel_attention, sortattn.kernel_sum):
        points = leaves(*inputs, torch.tensor([2.0, bad, 3.0], device=device))
        output = within(60, partial(function, *points[:3], case.kernel, bandwidth=points[3], backend=backend))
        assert output[1].isnan().all()
        assert output[[0, 2]].isfinite().all()
        gradients = torch.autograd.grad(output[[0, 2]].sum(), points)
        assert all(part[[0, 2]].isfinite().all() for part in gradients)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@every_pair
def test_a_bad_query_spoils_its_own_head_of_a_group_only(case, backend, bad, device):
    query, key, value = draw(Shape((4,), 70, 90, 2, 3), torch.float32, device)
    key, value = key[:2], value[:2]
    options = {"bandwidth": tau(case), "enable_gqa": True, "backend": backend}
    clean = sortattn.kernel_attention(query, key, value, case.kernel, **options)
    query[1, 33, 1] = bad
    output = within(60, lambda: sortattn.kernel_attention(query, key, value, case.kernel, **options))
    assert output[1].isnan().all()
    for head in (0, 2, 3):
        assert_close(output[head], clean[head], FORWARD[torch.float32])


@pytest.mark.usefixtures("reproducible")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@every_pair
def test_a_bad_number_in_a_masked_key_does_not_count(case, backend, bad, device):
    query, key, value = draw(Shape((2,), 20, 30, 3, 4), torch.float32, device)
    mask = torch.ones(2, 30, dtype=torch.bool, device=device)
    mask[0, 7] = mask[1, 29] = False
    options = {"bandwidth": tau(case), "key_mask": mask, "backend": backend}

    def run(key, value):
        points = leaves(query, key, value)
        output = sortattn.kernel_attention(*points, case.kernel, **options)
        return output, torch.autograd.grad(output.sum(), points)

    clean, clean_gradients = run(key, value)
    key[0, 7, 0] = key[1, 29, 2] = value[0, 7, 1] = bad
    output, gradients = run(key, value)
    assert torch.equal(output, clean)
    for part, before in zip(gradients, clean_gradients, strict=True):
        assert torch.equal(part, before)


@sided_pairs
def test_a_head_of_nothing_but_nan_is_no_trouble(case, backend, device):
    query, key, value = draw(Shape((2,), 300, 300, 2, 3), torch.float32, device)
    query[1], key[1] = float("nan"), float("nan")
    output = within(60, lambda: sortattn.kernel_attention(query, key, value, case.kernel, backend=backend))
    assert output[1].isnan().all()
    assert output[0].isfinite().all()


@pytest.mark.usefixtures("reproducible")
@sided_pairs
def test_the_output_may_be_changed_in_place(case, backend, device):
    # as dropout and residual connections do
    query, key, value = leaves(*draw(Shape((2,), 40, 50, 3, 4), torch.float32, device))
    output = sortattn.kernel_attention(query, key, value, case.kernel, backend=backend)
    (expected,) = torch.autograd.grad(2 * output.sum(), value, retain_graph=True)
    output.mul_(2.0)
    (gradient,) = torch.autograd.grad(output.sum(), value)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("side", [1.0, -1.0], ids=["positive", "negative"])
@pytest.mark.parametrize("backend", ["tiled", "sorted"])
def test_few_keys_on_a_side_of_zero_do_not_drown_in_the_many_on_the_other(backend, side, device):
    key = -torch.randn(1, 3000, 1, generator=torch.Generator().manual_seed(0)).abs()
    key[0, 5] = 0.01
    key = side * key
    query = torch.full((1, 4, 1), side)
    value = torch.randn(1, 3000, 16, generator=torch.Generator().manual_seed(1))
    exact = sortattn.kernel_attention(query.double(), key.double(), value.double(), "add_riesz", backend="reference")
    inputs = (part.to(device) for part in (query, key, value))
    output = sortattn.kernel_attention(*inputs, "add_riesz", backend=backend)
    assert_close(output.cpu(), exact, FORWARD[torch.float32])


@pytest.mark.parametrize("side", [1.0, -1.0], ids=["positive", "negative"])
@pytest.mark.usefixtures("cpu_only")
def test_large_values_on_the_other_side_of_zero_leave_no_rounding_on_this_one(side):
    generator = torch.Generator().manual_seed(0)
    key = -torch.randn(1, 3000, 1, generator=generator).abs()
    value = 1e3 * torch.randn(1, 3000, 16, generator=generator)
    key[0, :2, 0] = torch.tensor([0.5, 5.0])
    query = torch.full((1, 4, 1), side)
    exact = sortattn.kernel_attention(
        query.double(), side * key.double(), value.double(), "add_riesz", backend="reference"
    )
    output = sortattn.kernel_attention(query, side * key, value, "add_riesz", backend="sorted")
    assert_close(output, exact, FORWARD[torch.float32])


@pytest.mark.usefixtures("cpu_only")
def test_a_query_far_beyond_all_keys_has_no_rounding_of_their_sum():
    generator = torch.Generator().manual_seed(0)
    key = 0.01 * torch.randn(1, 3000, 1, generator=generator).abs()
    value = torch.randn(1, 3000, 16, generator=generator)
    query = torch.full((1, 4, 1), 100.0)
    exact = sortattn.kernel_attention(query.double(), key.double(), value.double(), "add_riesz", backend="reference")
    output = sortattn.kernel_attention(query, key, value, "add_riesz", backend="sorted")
    assert_close(output, exact, FORWARD[torch.float32])
