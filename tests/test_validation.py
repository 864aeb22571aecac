"""Wrong arguments: the type of the exception, and a message with what was expected and what came."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import sortattn

FUNCTIONS = [sortattn.kernel_attention, sortattn.kernel_sum]


def arguments(device: str = "cpu", **changes) -> dict:
    good = {
        "query": torch.randn(2, 4, 5, 3, device=device),
        "key": torch.randn(2, 4, 7, 3, device=device),
        "value": torch.randn(2, 4, 7, 6, device=device),
        "kernel": "add_laplace",
    }
    return {**good, **changes}


def integers(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.int64)


def true(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bool)


class Inverse(sortattn.Kernel):
    """A kernel that no backend knows but by its definition."""

    name, formula = "inverse", "1 / (1 + |q - k|_2^2)"

    def gram(self, query, key, bandwidth):
        return 1 / (1 + (torch.cdist(query, key) / bandwidth).square())


class Halved(sortattn.PolynomialExponential):
    """Another function under the name of its family."""

    def univariate(self, difference):
        return super().univariate(difference / 2)


MASK = r"key_mask must be bool of shape \(B, N\) = \(2, 7\), or any shape that broadcasts to \(2, 4, 7\)"
WRONG = {
    # kernels and backends
    "unknown_kernel": (
        {"kernel": "cosine"},
        ValueError,
        "unknown kernel 'cosine', expected one of softmax, gauss, .* or a Kernel object",
    ),
    "misspelt_kernel": ({"kernel": "Add_laplase"}, ValueError, "unknown kernel .* did you mean 'add_laplace'?"),
    "kernel_class": (
        {"kernel": sortattn.Spline},
        TypeError,
        "kernel must be .* such as Spline.*, got the class Spline itself",
    ),
    "kernel_none": ({"kernel": None}, TypeError, "kernel must be a name or a Kernel, .* got NoneType"),
    "kernel_of_a_user_tiled": (
        {"kernel": Inverse(), "backend": "tiled"},
        RuntimeError,
        "backend 'tiled' cannot serve this call: tiled sums kernels by name, .*, not inverse; 'reference' sums any",
    ),
    "kernel_with_the_name_of_another": (
        {"kernel": Halved([1.0])},
        TypeError,
        "Halved must have a name of its own, got 'polynomial_exponential', by which backends know PolynomialExp",
    ),
    "kernel_without_a_name": ({"kernel": sortattn.Kernel()}, TypeError, "a Kernel must have a name, .*; Kernel has no"),
    "unknown_backend": (
        {"backend": "cuda"},
        ValueError,
        "unknown backend 'cuda', expected one of auto, reference, tiled, sorted",
    ),
    "backend_list": ({"backend": ["tiled"]}, ValueError, r"unknown backend \['tiled'\], expected one of auto, "),
    "grid_softmax": (
        {"backend": "grid", "kernel": "softmax"},
        RuntimeError,
        "backend 'grid' cannot serve this call: a grid sums additive kernels .*, not softmax",
    ),
    "sorted_softmax": (
        {"backend": "sorted", "kernel": "softmax"},
        RuntimeError,
        "backend 'sorted' cannot serve this call: sorting sums additive kernels .*, not softmax",
    ),
    "sorted_causal_softmax": (
        {"backend": "sorted", "kernel": "softmax", "is_causal": True},
        RuntimeError,
        "backend 'sorted' cannot serve this call: sorting sums additive kernels .*, not softmax",
    ),
    "linear_laplace": (
        {"backend": "linear"},
        RuntimeError,
        "backend 'linear' cannot serve this call: it needs a finite feature map .* add_laplace",
    ),
    # tensors
    "query_list": ({"query": [[1.0]]}, TypeError, "query must be a torch.Tensor, got list"),
    "key_none": ({"key": None}, TypeError, "key must be a torch.Tensor, got NoneType"),
    "integer_value": (
        {"value": integers(2, 4, 7, 6)},
        TypeError,
        "value must be float64, float32, float16 or bfloat16, got torch.int64",
    ),
    "complex_query": (
        {"query": torch.ones(2, 4, 5, 3, dtype=torch.complex64)},
        TypeError,
        "query must be float64, .* got torch.complex64",
    ),
    "sparse_value": (
        {"value": torch.ones(2, 4, 7, 6).to_sparse()},
        TypeError,
        "value must be a dense tensor, got torch.sparse_coo",
    ),
    "flat_key": ({"key": torch.ones(3)}, ValueError, r"key must have shape \(..., length, channels\), got \(3,\)"),
    "mixed_dtypes": (
        {"value": torch.ones(2, 4, 7, 6, dtype=torch.float64)},
        TypeError,
        "value must have query's dtype torch.float32, got torch.float64",
    ),
    "half_key": (
        {"key": torch.ones(2, 4, 7, 3, dtype=torch.float16)},
        TypeError,
        "key must have query's dtype torch.float32, got torch.float16",
    ),
    "mixed_devices": (
        {"key": torch.ones(2, 4, 7, 3, device="meta")},
        ValueError,
        "key must be on query's device cpu, got meta",
    ),
    # shapes
    "dims": (
        {"key": torch.ones(2, 4, 7, 2)},
        ValueError,
        r"key must have shape \(..., N, 3\) to match query \(2, 4, 5, 3\), got \(2, 4, 7, 2\)",
    ),
    "no_dims": (
        {"query": torch.ones(2, 4, 5, 0), "key": torch.ones(2, 4, 7, 0)},
        ValueError,
        r"query must have at least one channel, got shape \(2, 4, 5, 0\)",
    ),
    "lengths": (
        {"value": torch.ones(2, 4, 8, 6)},
        ValueError,
        r"value must have shape \(..., 7, C\) to match key \(2, 4, 7, 3\), got \(2, 4, 8, 6\)",
    ),
    "heads": (
        {"key": torch.ones(2, 2, 7, 3), "value": torch.ones(2, 2, 7, 6)},
        ValueError,
        r"leading dimensions .* must broadcast, got \(2, 4, 5, 3\), \(2, 2, 7, 3\) and \(2, 2, 7, 6\) "
        r"\(fewer key heads than query heads need enable_gqa=True\)",
    ),
    # flags
    "causal_text": ({"is_causal": "no"}, TypeError, "is_causal must be True or False, got str"),
    "causal_tensor": ({"is_causal": true(1)}, TypeError, "is_causal must be True or False, got Tensor"),
    "causal_numpy": ({"is_causal": np.True_}, TypeError, r"is_causal must be True or False, got numpy\.bool"),
    "group_number": ({"enable_gqa": 2}, TypeError, "enable_gqa must be True or False, got int"),
    # grouped queries
    "group_no_multiple": (
        {"key": torch.ones(2, 3, 7, 3), "value": torch.ones(2, 3, 7, 6), "enable_gqa": True},
        ValueError,
        "query heads must be a multiple of the key heads, got 4 and 3",
    ),
    "group_value_heads": (
        {"key": torch.ones(2, 2, 7, 3), "enable_gqa": True},
        ValueError,
        "value must have key's 2 heads, got 4",
    ),
    "group_no_heads": (
        {"query": torch.ones(5, 3), "key": torch.ones(7, 3), "value": torch.ones(7, 6), "enable_gqa": True},
        ValueError,
        r"enable_gqa needs a head dimension: tensors of shape \(..., heads, length, channels\)",
    ),
    "group_batches": (
        {"key": torch.ones(3, 2, 7, 3), "value": torch.ones(3, 2, 7, 6), "enable_gqa": True},
        ValueError,
        r"must broadcast, got \(2, 4, 5, 3\), \(3, 2, 7, 3\)",
    ),
    # masks
    "mask_dtype": (
        {"key_mask": torch.ones(2, 7)},
        TypeError,
        MASK + ", True where the key takes part, got torch.float32",
    ),
    "mask_list": ({"key_mask": [[True] * 7] * 2}, TypeError, MASK + ", True where the key takes part, got list"),
    "mask_sparse": (
        {"key_mask": true(2, 7).to_sparse()},
        TypeError,
        MASK + ", True where the key takes part, got torch.sparse_coo",
    ),
    "mask_dense": (
        {"key_mask": true(5, 7)},
        ValueError,
        MASK + r"; dense \(M, N\) masks are not supported, got shape \(5, 7\)",
    ),
    "mask_dense_per_head": (
        {"key_mask": true(2, 4, 5, 7)},
        ValueError,
        MASK + r"; dense \(M, N\) masks are not supported, got shape \(2, 4, 5, 7\)",
    ),
    "mask_length": ({"key_mask": true(2, 8)}, ValueError, MASK + r", got shape \(2, 8\)"),
    "mask_batch": ({"key_mask": true(3, 7)}, ValueError, MASK + r", got shape \(3, 7\)"),
    "mask_heads_first": ({"key_mask": true(4, 7)}, ValueError, MASK + r", got shape \(4, 7\)"),
    "mask_one": ({"key_mask": true(2, 1)}, ValueError, MASK + r", got shape \(2, 1\)"),
    "mask_device": (
        {"key_mask": torch.ones(2, 7, dtype=torch.bool, device="meta")},
        ValueError,
        "key_mask must be on query's device cpu, got meta",
    ),
    # bandwidths
    "bandwidth_zero": ({"bandwidth": 0.0}, ValueError, "bandwidth must be positive, got 0.0"),
    "bandwidth_negative": ({"bandwidth": -1}, ValueError, "bandwidth must be positive, got -1"),
    "bandwidth_that_is_zero_in_float32": (
        {"bandwidth": torch.tensor(1e-60, dtype=torch.float64)},
        ValueError,
        r"bandwidth must be positive, got 1e-60, for sums in torch\.float32",
    ),
    "bandwidth_nan": ({"bandwidth": float("nan")}, ValueError, "bandwidth must be positive, got nan"),
    "bandwidth_infinite": ({"bandwidth": float("inf")}, ValueError, "bandwidth must be finite, got inf"),
    "bandwidth_of_a_head": (
        {"bandwidth": torch.tensor([1.0, 0.0, -2.0, 1.0])},
        ValueError,
        r"bandwidth must be positive, got \[1.0, 0.0, -2.0, 1.0\]",
    ),
    "bandwidth_text": ({"bandwidth": "1"}, TypeError, "bandwidth must be a number, a tensor or None, got str"),
    "bandwidth_bool": ({"bandwidth": True}, TypeError, "bandwidth must be a number, a tensor or None, got bool"),
    "bandwidth_integers": (
        {"bandwidth": integers(4)},
        TypeError,
        "bandwidth must be a floating-point tensor, got torch.int64",
    ),
    "bandwidth_shape": (
        {"bandwidth": torch.ones(3)},
        ValueError,
        r"bandwidth must be .* broadcasts to the leading dimensions \(2, 4\) .*, got shape \(3,\)",
    ),
    "bandwidth_too_large": (
        {"bandwidth": torch.ones(5, 2, 4)},
        ValueError,
        r"leading dimensions \(2, 4\) .*, got shape \(5, 2, 4\)",
    ),
    "bandwidth_device": (
        {"bandwidth": torch.ones(4, device="meta")},
        ValueError,
        "bandwidth must be on query's device cpu, got meta",
    ),
}


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize(("changes", "kind", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_argument_is_told_what_was_expected(function, changes, kind, message):
    with pytest.raises(kind, match=message) as caught:
        function(**arguments(**changes))
    # not a subclass that something deeper down raised
    assert caught.type is kind


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_argument_is_found_before_any_work(changes, kind, message, monkeypatch):
    def work(*_):
        raise AssertionError("work was done")

    from sortattn.ops import linear, reference, tiled
    from sortattn.ops.sorted import backend

    for module in (reference, tiled, linear, backend):
        monkeypatch.setattr(module, "attention", work)
    with pytest.raises(kind, match=message):
        sortattn.kernel_attention(**arguments(**changes))


def test_gram_checks_its_arguments_too():
    with pytest.raises(ValueError, match=r"key must have shape \(..., N, 3\)"):
        sortattn.gram(torch.ones(5, 3), torch.ones(7, 2))
    with pytest.raises(ValueError, match="unknown kernel"):
        sortattn.gram(torch.ones(5, 3), torch.ones(7, 3), "cosine")


def test_all_tensors_may_be_on_the_meta_device():
    output = sortattn.kernel_attention(**arguments("meta"), backend="reference")
    assert output.shape == (2, 4, 5, 6)
    assert output.device.type == "meta"


SPLINES = {
    "unsorted": (
        {"nodes": [1.0, 0.0], "slopes": [0.0, 1.0, 0.0]},
        r"nodes must be finite and strictly ascending, got \[1.0, 0.0\]",
    ),
    "repeated": (
        {"nodes": [0.0, 0.0], "slopes": [0.0, 1.0, 0.0]},
        r"nodes must be finite and strictly ascending, got \[0.0, 0.0\]",
    ),
    "nan": ({"nodes": [0.0, float("nan")], "slopes": [0.0, 1.0, 0.0]}, "nodes must be finite, got"),
    "infinite": ({"nodes": [float("inf")], "slopes": [0.0, 1.0]}, r"nodes must be finite, got \[inf\]"),
    "nan_slopes": ({"nodes": [0.0], "slopes": [0.0, float("nan")]}, r"slopes must be finite, got \[0.0, nan\]"),
    "none": ({"nodes": [], "slopes": [1.0]}, "nodes must hold at least one number, got none"),
    "few_slopes": (
        {"nodes": [0.0, 1.0], "slopes": [0.0, 1.0]},
        r"slopes must have one entry more than nodes \(3\), got 2",
    ),
    "many_jumps": (
        {"nodes": [0.0], "slopes": [0.0, 1.0], "jumps": [1.0, 1.0]},
        r"jumps must have one entry per node \(1\), got 2",
    ),
    "matrix": (
        {"nodes": torch.zeros(2, 2), "slopes": [0.0, 1.0]},
        r"nodes must be a sequence of numbers or a 1-D float tensor, got shape \(2, 2\)",
    ),
}


@pytest.mark.parametrize(("options", "message"), SPLINES.values(), ids=SPLINES.keys())
def test_a_wrong_spline_is_told_what_was_expected(options, message):
    with pytest.raises(ValueError, match=message):
        sortattn.Spline(**options)


NO_NUMBERS = {
    "nodes_none": ({"nodes": None}, "nodes must be a sequence of numbers or a 1-D float tensor, got None"),
    "nodes_number": ({"nodes": 1.0}, "nodes must be a sequence of numbers .*, got 1.0"),
    "slopes_text": ({"slopes": "ab"}, "slopes must be a sequence of numbers .*, got 'ab'"),
    "jumps_integers": ({"jumps": integers(1)}, "jumps must be .* a 1-D float tensor, got torch.int64"),
    "offset_text": ({"offset": "1"}, r"offset must be a number or a tensor of one, of shape \(\), got '1'"),
    "offset_vector": ({"offset": torch.ones(2)}, r"offset must be a number .*, got tensor\(\[1., 1.\]\)"),
    "bandwidth_text": ({"bandwidth": "1"}, "bandwidth must be a number, got str"),
}


@pytest.mark.parametrize(("options", "message"), NO_NUMBERS.values(), ids=NO_NUMBERS.keys())
def test_a_spline_of_no_numbers_is_told_so(options, message):
    with pytest.raises(TypeError, match=message):
        sortattn.Spline(**{"nodes": [0.0], "slopes": [0.0, 1.0], **options})


def test_any_real_number_is_a_bandwidth():
    given = arguments()
    expected = sortattn.kernel_attention(**given, bandwidth=0.5)
    for half in (np.float32(0.5), np.float64(0.5), Fraction(1, 2)):
        assert torch.equal(sortattn.kernel_attention(**given, bandwidth=half), expected)


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("nan")])
def test_a_kernel_needs_a_positive_default_bandwidth(bandwidth):
    with pytest.raises(ValueError, match="bandwidth must be positive, got"):
        sortattn.Spline([0.0], [0.0, 1.0], bandwidth=bandwidth)
    with pytest.raises(ValueError, match="bandwidth must be positive, got"):
        sortattn.PolynomialExponential([1.0], bandwidth=bandwidth)


def test_a_polynomial_needs_a_coefficient():
    with pytest.raises(ValueError, match="coefficients must hold at least one number, got none"):
        sortattn.PolynomialExponential([])


def test_the_sign_sum_checks_its_weight():
    query, key, value = torch.ones(2, 5, 3), torch.ones(2, 7, 3), torch.ones(2, 7, 6)
    with pytest.raises(ValueError, match=r"weight must have shape \(..., M, C\) = \(2, 5, 6\), got \(2, 5, 3\)"):
        sortattn.weighted_sign_sum(query, key, value, torch.ones(2, 5, 3))
    with pytest.raises(ValueError, match=r"weight must have shape .*, got list"):
        sortattn.weighted_sign_sum(query, key, value, [1.0])
    with pytest.raises(TypeError, match="weight must be torch.float32 on cpu like query, got torch.float64 on cpu"):
        sortattn.weighted_sign_sum(query, key, value, torch.ones(2, 5, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match="unknown backend 'linear', expected one of auto, sorted, tiled, reference"):
        sortattn.weighted_sign_sum(query, key, value, torch.ones(2, 5, 6), backend="linear")


ACCEPTED = {
    "batch": (2, 7),
    "one_for_all": (7,),
    "one_batch": (1, 7),
    "per_head": (2, 4, 7),
    "broadcast_heads": (2, 1, 7),
    "broadcast_batch": (1, 4, 7),
}


@pytest.mark.parametrize("shape", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_masks_that_mean_one_thing_only_are_taken(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    full = mask[:, None, :] if mask.dim() == 2 else mask
    given = arguments()
    output = sortattn.kernel_attention(**given, key_mask=mask, backend="reference")
    expected = sortattn.kernel_attention(**given, key_mask=full.expand(2, 4, 7), backend="reference")
    assert torch.equal(output, expected)


def test_a_mask_per_query_head_is_kept_apart_within_a_group():
    # heads of one group share their keys, but not what they see of them
    query, key, value = torch.randn(2, 4, 5, 3), torch.randn(2, 2, 7, 3), torch.randn(2, 2, 7, 6)
    mask = torch.rand(2, 4, 7, generator=torch.Generator().manual_seed(0)) < 0.5
    repeated = (part.repeat_interleave(2, 1) for part in (key, value))
    expected = sortattn.kernel_attention(query, *repeated, key_mask=mask, backend="reference")
    output = sortattn.kernel_attention(query, key, value, key_mask=mask, enable_gqa=True, backend="reference")
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_kernel_of_a_user_is_what_its_definition_says(function):
    inputs = arguments(kernel=Inverse())
    assert torch.equal(function(**inputs), function(**inputs, backend="reference"))


@pytest.mark.parametrize("backend", ["auto", "tiled"])
@pytest.mark.parametrize("kernel", [*sortattn.KERNELS, "spline", "matern"])
def test_the_default_device_is_no_matter(kernel, backend):
    made = {
        "spline": sortattn.Spline([-1.0, 0.0, 1.0], [0.0, 1.0, -1.0, 0.0]),
        "matern": sortattn.PolynomialExponential([1.0, 1.0]),
    }
    inputs = arguments(kernel=made.get(kernel, kernel), backend=backend, is_causal=True)
    wanted = sortattn.kernel_attention(**inputs)
    with torch.device("meta"):
        assert torch.equal(sortattn.kernel_attention(**inputs), wanted)


@pytest.mark.parametrize("kernel", [*sortattn.KERNELS.values(), sortattn.Spline([0.0], [1.0, 2.0]), Inverse()])
def test_tensors_on_meta_have_a_shape(kernel):
    assert sortattn.kernel_attention(**arguments("meta", kernel=kernel)).shape == (2, 4, 5, 6)
