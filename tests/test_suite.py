"""One suite for every backend, kernel and dtype, forward and backward, against `reference` in float64."""

from functools import lru_cache

import pytest
import torch

import sortattn
from sortattn.validation import make_problem

from . import dense
from .cases import BACKENDS, CASES, Case, Shape, assert_close, cotangent, draw, leaves, pairs, refusal
from .definition import FORWARD, GRADIENT, Expected, check, define

SHAPE = Shape()
ODD = (Shape(rows=1), Shape(columns=1), Shape(dims=1), Shape(channels=1))
WIDE = (
    Shape((2,), rows=5, columns=9, dims=2, channels=65),
    Shape((1,), rows=5, columns=9, dims=2, channels=130),
)

PAIRS = pairs(BACKENDS)
every_pair = pytest.mark.parametrize(("case", "backend"), PAIRS)
# `auto` is one of the others
named_pairs = pytest.mark.parametrize(("case", "backend"), [pair for pair in PAIRS if pair.values[1] != "auto"])
causal_pairs = pytest.mark.parametrize(
    ("case", "backend"), [pair for pair in PAIRS if refusal(pair.values[1], pair.values[0], "cpu", causal=True) is None]
)


def over(*dtypes: torch.dtype):
    return pytest.mark.parametrize("dtype", dtypes, ids=lambda dtype: str(dtype).removeprefix("torch."))


every_dtype = over(torch.float64, torch.float32, torch.float16, torch.bfloat16)
full_dtypes = over(torch.float64, torch.float32)


def tau(case: Case) -> float | None:
    """The default, but for `tri` one so wide that its normaliser stays away from zero, where it is ill-conditioned."""
    return 4.0 if case.name == "tri" else None


@lru_cache(maxsize=8)
def expected_for(case: Case, shape: Shape, dtype: torch.dtype, device: str) -> Expected:
    """Shared by the backends, which follow each other."""
    return define(case, draw(shape, dtype, device), cotangent(shape, dtype, device), bandwidth=tau(case))


def matches(case: Case, backend: str, shape: Shape, dtype: torch.dtype, device: str) -> None:
    inputs, gradient = draw(shape, dtype, device), cotangent(shape, dtype, device)
    if refusal(backend, case, device) is None:
        expected = expected_for(case, shape, dtype, device)
        check(expected, case, inputs, gradient, bandwidth=tau(case), backend=backend)


@every_dtype
@every_pair
def test_output_and_gradients_match_the_definition(case, backend, dtype, device):
    matches(case, backend, SHAPE, dtype, device)


@pytest.mark.parametrize("shape", ODD, ids=str)
@full_dtypes
@named_pairs
def test_a_single_query_key_dimension_or_channel_is_no_exception(case, backend, shape, dtype, device):
    matches(case, backend, shape, dtype, device)


@pytest.mark.parametrize("shape", WIDE, ids=str)
@over(torch.float32)
@named_pairs
def test_channels_beyond_a_block_are_summed_too(case, backend, shape, dtype, device):
    # every number of coefficients is compiled for every width; blocks of 64 with three are left out
    if case.name != "matern52":
        matches(case, backend, shape, dtype, device)


@pytest.mark.parametrize("shape", WIDE, ids=str)
def test_channels_beyond_a_block_are_summed_in_float64(shape, device):
    matches(CASES["add_laplace"], "sorted", shape, torch.float64, device)


@pytest.mark.parametrize("backend", [*BACKENDS, "grid"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("function", [sortattn.kernel_attention, sortattn.kernel_sum], ids=["attention", "sum"])
def test_a_backend_that_cannot_serve_a_call_says_why(function, causal, case, backend, device):
    inputs = draw(Shape((), 3, 4, 2, 2), torch.float32, device)
    reason = refusal(backend, case, device, causal=causal)
    if reason is None:
        assert function(*inputs, case.kernel, is_causal=causal, backend=backend).isfinite().all()
    else:
        with pytest.raises(RuntimeError, match=f"backend '{backend}' cannot serve this call: .*{reason}"):
            function(*inputs, case.kernel, is_causal=causal, backend=backend)


# masks


def scattered_mask(device: str) -> torch.Tensor:
    """`(2, 100)`: holes anywhere in the first row, the second row empty."""
    mask = torch.rand(2, 100, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[1] = False
    return mask.to(device)


@full_dtypes
@named_pairs
def test_masked_keys_do_not_count(case, backend, dtype, device):
    mask = scattered_mask(device)
    inputs, gradient = draw(SHAPE, dtype, device), cotangent(SHAPE, dtype, device)
    options = {"bandwidth": tau(case), "key_mask": mask}
    check(define(case, inputs, gradient, **options), case, inputs, gradient, backend=backend, **options)
    # the same as leaving them out
    seen = mask[0]
    query, key, value = (part[:1] for part in inputs)
    short = sortattn.kernel_attention(
        query, key[:, :, seen], value[:, :, seen], case.kernel, bandwidth=tau(case), backend=backend
    )
    masked = sortattn.kernel_attention(
        query, key, value, case.kernel, bandwidth=tau(case), key_mask=mask[:1], backend=backend
    )
    assert_close(masked, short, 2 * FORWARD[dtype])


@named_pairs
def test_a_query_that_sees_no_key_gets_zeros_and_gives_no_gradient(case, backend, device):
    inputs = leaves(*draw(SHAPE, torch.float32, device))
    output = sortattn.kernel_attention(*inputs, case.kernel, key_mask=scattered_mask(device), backend=backend)
    assert (output[1] == 0).all()
    output.sum().backward()
    assert all((part.grad[1] == 0).all() for part in inputs)
    assert all(part.grad.isfinite().all() for part in inputs)


@pytest.mark.usefixtures("reproducible")
@named_pairs
def test_masks_of_every_head_or_of_none_are_taken(case, backend, device):
    query, key, value = draw(SHAPE, torch.float64, device)
    mask = (torch.rand(2, 3, 100, generator=torch.Generator().manual_seed(3)) < 0.5).to(device)
    options = {"bandwidth": tau(case), "backend": backend}
    output = sortattn.kernel_attention(query, key, value, case.kernel, key_mask=mask, **options)
    for b in range(2):
        for h in range(3):
            part = (query[b, h], key[b, h, mask[b, h]], value[b, h, mask[b, h]])
            alone = sortattn.kernel_attention(*part, case.kernel, **options)
            assert_close(output[b, h], alone, 2 * FORWARD[torch.float64])
    one = sortattn.kernel_attention(query, key, value, case.kernel, key_mask=mask[0, 0], **options)
    each = sortattn.kernel_attention(query, key, value, case.kernel, key_mask=mask[0, 0].expand(2, 3, 100), **options)
    assert torch.equal(one, each)


# causality

LENGTHS = [
    pytest.param(63, 100, id="M63-N100"),
    pytest.param(70, 70, id="M70-N70"),
    pytest.param(100, 63, id="M100-N63"),
]


@pytest.mark.parametrize(("rows", "columns"), LENGTHS)
@full_dtypes
@causal_pairs
def test_a_causal_query_sees_the_keys_up_to_its_own_place_from_the_end(case, backend, dtype, rows, columns, device):
    shape = Shape((2, 2), rows, columns)
    gradient = cotangent(shape, dtype, device)
    points = leaves(*draw(shape, dtype, device))
    bandwidth = tau(case) or case.bandwidth(shape.dims)
    mask = (torch.rand(2, columns, generator=torch.Generator().manual_seed(4)) < 0.7).to(device)
    for key_mask in (None, mask):
        seen = dense.visible(rows, columns).to(device)
        if key_mask is not None:
            seen = seen & key_mask[:, None, None, :]
        exact = leaves(*(part.double() for part in points))
        expected = dense.attention(case.formula, *exact, bandwidth, seen, case.floor)
        output = sortattn.kernel_attention(
            *points, case.kernel, bandwidth=bandwidth, key_mask=key_mask, is_causal=True, backend=backend
        )
        assert_close(output, expected, FORWARD[dtype])
        # the first queries see one key or a few: there the gradient is a small difference of larger parts
        scales = define(case, points, gradient, bandwidth=bandwidth, key_mask=key_mask, is_causal=True).scales
        actual = torch.autograd.grad(output, points, gradient)
        wanted = torch.autograd.grad(expected, exact, gradient.double())
        for one, other, scale in zip(actual, wanted, scales, strict=True):
            assert_close(one, other, GRADIENT[dtype], scale)


@causal_pairs
def test_causal_sums_are_right_across_blocks_and_groups(case, backend, device):
    # more than one block of 256 and one chunk of 128, neither filled
    query, key, value = draw(Shape((4,), 300, 530, 2, 3), torch.float64, device)
    key, value = key[:2], value[:2]
    options = {"bandwidth": tau(case), "is_causal": True, "backend": backend}
    output = sortattn.kernel_attention(query, key, value, case.kernel, enable_gqa=True, **options)
    repeated = (part.repeat_interleave(2, 0) for part in (key, value))
    seen = dense.visible(300, 530).to(device)
    expected = dense.attention(case.formula, query, *repeated, tau(case) or case.bandwidth(2), seen, case.floor)
    assert_close(output, expected, FORWARD[torch.float64])


@named_pairs
def test_sums_are_right_across_blocks(case, backend, device):
    shape = Shape((1,), 300, 530, 2, 3)
    inputs, gradient = draw(shape, torch.float64, device), cotangent(shape, torch.float64, device)
    check(
        define(case, inputs, gradient, bandwidth=tau(case)),
        case,
        inputs,
        gradient,
        bandwidth=tau(case),
        backend=backend,
    )


# grouped queries


@pytest.mark.parametrize("per_head", [False, True], ids=["one_bandwidth", "bandwidth_per_head"])
@full_dtypes
@named_pairs
def test_grouped_query_heads_share_their_keys(case, backend, dtype, per_head, device):
    query = draw(Shape((2, 6), 17, 30), dtype, device)[0]
    _, key, value = draw(Shape((2, 2), 17, 30), dtype, device)
    gradient = cotangent(Shape((2, 6), 17, 30), dtype, device)
    mask = (torch.rand(2, 30, generator=torch.Generator().manual_seed(4)) < 0.7).to(device)
    bandwidth = torch.linspace(2.0, 4.0, 6, dtype=dtype, device=device) if per_head else tau(case)
    options = {"bandwidth": bandwidth, "key_mask": mask}
    expected = define(case, (query, *(part.repeat_interleave(3, 1) for part in (key, value))), gradient, **options)
    # a key's gradient is the sum over the query heads that share it
    shared = tuple(part.unflatten(1, (2, 3)).sum(2) for part in expected.gradients[1:3])
    gradients = (expected.gradients[0], *shared, *expected.gradients[3:])
    expected = Expected(expected.output, gradients, expected.scales)
    check(expected, case, (query, key, value), gradient, enable_gqa=True, backend=backend, **options)


def test_grouped_keys_are_not_copied(device):
    query, key, value = draw(Shape((2, 6), 17, 30), torch.float32, device)
    key, value = key[:, :2].contiguous(), value[:, :2].contiguous()
    problem = make_problem(query, key, value, sortattn.KERNELS["add_laplace"], enable_gqa=True)
    assert problem.key.data_ptr() == key.data_ptr()
    assert problem.value.data_ptr() == value.data_ptr()
    assert problem.key.shape == (4, 30, 5)
    assert problem.query.shape == (4, 3 * 17, 5)


# leading dimensions

LEADING = {
    "none": ((), (), ()),
    "one": ((3,), (3,), (3,)),
    "three": ((2, 1, 3), (2, 1, 3), (2, 1, 3)),
    "mixed": ((2, 1), (1, 3), (3,)),
    "shared_keys": ((2, 3), (), ()),
    "one_query": ((), (2, 3), (2, 3)),
}


@pytest.mark.parametrize("leading", LEADING.values(), ids=LEADING.keys())
@named_pairs
def test_leading_dimensions_broadcast(case, backend, leading, device):
    shapes = [Shape(each, 11, 13, 3, 2) for each in leading]
    points = leaves(*(draw(shape, torch.float64, device, seed=i)[i] for i, shape in enumerate(shapes)))
    whole = torch.broadcast_shapes(*leading)
    wide = leaves(*(part.expand(*whole, *part.shape[-2:]) for part in points))
    output = sortattn.kernel_attention(*points, case.kernel, bandwidth=tau(case), backend=backend)
    expected = dense.attention(case.formula, *wide, tau(case) or case.bandwidth(3), floor=case.floor)
    assert output.shape == (*whole, 11, 2)
    assert_close(output, expected, FORWARD[torch.float64])
    gradient = cotangent(Shape(whole, 11, 13, 3, 2), torch.float64, device)
    actual = torch.autograd.grad(output, points, gradient)
    wanted = torch.autograd.grad(expected, wide, gradient)
    for one, other in zip(actual, wanted, strict=True):
        assert_close(one, other.sum_to_size(one.shape), GRADIENT[torch.float64])


# bandwidths

BANDWIDTHS = {
    "scalar": torch.tensor(2.5),
    "per_head": torch.tensor([1.5, 2.0, 4.0]),
    "per_batch": torch.tensor([[1.5], [3.0]]),
    "per_problem": torch.tensor([[1.5, 2.0, 2.5], [3.0, 3.5, 4.0]]),
}


@pytest.mark.parametrize("bandwidth", BANDWIDTHS.values(), ids=BANDWIDTHS.keys())
@full_dtypes
@named_pairs
def test_a_bandwidth_may_be_a_tensor_and_gets_its_gradient(case, backend, bandwidth, dtype, device):
    bandwidth = bandwidth.to(device, dtype)
    inputs, gradient = draw(SHAPE, dtype, device), cotangent(SHAPE, dtype, device)
    expected = define(case, inputs, gradient, bandwidth=bandwidth)
    check(expected, case, inputs, gradient, bandwidth=bandwidth, backend=backend)


@named_pairs
def test_a_bandwidth_as_number_tensor_or_scaling_of_the_points_is_the_same(case, backend, device):
    query, key, value = draw(SHAPE, torch.float64, device)
    results = [
        sortattn.kernel_attention(query, key, value, case.kernel, bandwidth=bandwidth, backend=backend)
        for bandwidth in (2.5, torch.tensor(2.5, dtype=torch.float64, device=device))
    ]
    scaled = sortattn.kernel_attention(query / 2.5, key / 2.5, value, case.kernel, bandwidth=1.0, backend=backend)
    for result in results:
        assert_close(result, scaled, 2 * FORWARD[torch.float64])


# the kernel sum


@full_dtypes
@every_pair
def test_kernel_sums_match_the_definition(case, backend, dtype, device):
    inputs, gradient = draw(SHAPE, dtype, device), cotangent(SHAPE, dtype, device)
    points, exact = leaves(*inputs), leaves(*(part.double() for part in inputs))
    mask = scattered_mask(device)
    bandwidth = tau(case) or case.bandwidth(SHAPE.dims)
    output = sortattn.kernel_sum(*points, case.kernel, bandwidth=tau(case), key_mask=mask, backend=backend)
    expected = dense.kernel_sum(case.formula, *exact, bandwidth, mask[:, None, None, :])
    assert output.dtype == dtype
    assert_close(output, expected, FORWARD[dtype])
    actual = torch.autograd.grad(output, points, gradient)
    wanted = torch.autograd.grad(expected, exact, gradient.double())
    for one, other in zip(actual, wanted, strict=True):
        assert_close(one, other, GRADIENT[dtype])


@pytest.mark.parametrize("backend", ["tiled", "auto"])
@pytest.mark.parametrize("name", ["softmax", "gauss"])
def test_grouped_causal_heads_that_fold_to_as_many_queries_as_keys(name, backend, device):
    # three heads of two queries stand one behind the other beside six keys: square, but no square mask
    query, key, value = draw(Shape((6,), 2, 6, 3, 4), torch.float64, device)
    key, value = key[:2], value[:2]
    output = sortattn.kernel_attention(query, key, value, name, is_causal=True, enable_gqa=True, backend=backend)
    repeated = (part.repeat_interleave(3, 0) for part in (key, value))
    seen = dense.visible(2, 6).to(device)
    wanted = dense.attention(CASES[name].formula, query, *repeated, CASES[name].bandwidth(3), seen)
    assert_close(output, wanted, FORWARD[torch.float64])
