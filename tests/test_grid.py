"""The grid: its nodes, its surrogate, its error and the estimate of it."""

import pytest
import torch

import sortattn
from sortattn.bench.grid import DATA, normal, outlier
from sortattn.kernels import resolve
from sortattn.ops.grid import options
from sortattn.ops.grid.nodes import place
from sortattn.ops.grid.surrogate import slope_jumps

from . import surrogate
from .cases import CASES, Shape, assert_close, cotangent, draw, leaves, refusal, relative_error
from .definition import FORWARD, GRADIENT, define
from .test_suite import BANDWIDTHS, LEADING, ODD, SHAPE, WIDE, full_dtypes, over, scattered_mask

NAMES = [name for name, case in CASES.items() if refusal("grid", case, "cpu") is None]
MAIN = ("add_riesz", "add_laplace", "add_bump")
every_kernel = pytest.mark.parametrize("name", NAMES)
main_kernels = pytest.mark.parametrize("name", MAIN)
both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


all_data = pytest.mark.parametrize("data", DATA.values(), ids=DATA.keys())


def sample(data, rows=500, columns=700, dims=8, channels=16, heads=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query, key = (data(generator, heads, length, dims) for length in (rows, columns))
    return query, key, torch.randn(heads, columns, channels, generator=generator)


# like the definition, to within what the estimate says


def check(name, inputs, gradient, backend="grid", **call):
    """Output and gradients beside the exact ones: the output to three times the estimate.

    An error of the output falls as G^-1.5, one of the gradients by points as G^-0.5: its third root. Where all points
    are on nodes the output is exact, and so are gradients, if the kernel has no kink but at zero.
    """
    case = CASES[name]
    query, key, value = inputs
    expected = define(case, inputs, gradient, **call)
    estimate = sortattn.grid_error(query, key, case.kernel, value=value, backend=backend, **call).item()
    assert estimate < 0.1
    dtype = query.dtype
    bandwidth = call.get("bandwidth")
    points = leaves(*inputs, *([bandwidth] if isinstance(bandwidth, torch.Tensor) else []))
    call = {**call, "bandwidth": points[3]} if len(points) == 4 else call
    output = sortattn.kernel_attention(*points[:3], case.kernel, backend=backend, **call)
    assert output.dtype == dtype
    assert_close(output, expected.output, FORWARD[dtype] + 3 * estimate)
    actual = torch.autograd.grad(output, points, gradient)
    slope = 3 * max(estimate, 0.0 if name in ("add_riesz", "add_laplace") else 2e-4) ** (1 / 3)
    bounds = [GRADIENT[dtype] + part for part in (slope, slope, 10 * estimate)]
    names = ("query", "key", "value")
    for label, one, other, bound, scale in zip(
        names, actual, expected.gradients, bounds, expected.scales, strict=False
    ):  # fmt: skip
        assert_close(one, other, bound, scale, name=f"gradient of {label}")
    if len(points) == 4:
        assert actual[3].shape == points[3].shape
        assert actual[3].isfinite().all()


@over(torch.float64, torch.float32, torch.float16, torch.bfloat16)
@every_kernel
def test_output_and_gradients_are_near_the_definition(name, dtype, device):
    check(name, draw(SHAPE, dtype, device), cotangent(SHAPE, dtype, device))


@pytest.mark.parametrize("shape", [*ODD, *WIDE], ids=str)
@main_kernels
def test_a_single_point_dimension_or_channel_and_many_channels_are_no_exception(name, shape, device):
    # in one dimension the normaliser of add_riesz is close to zero for queries there
    backend = "grid:512" if shape.dims == 1 else "grid"
    check(name, draw(shape, torch.float64, device), cotangent(shape, torch.float64, device), backend=backend)


@every_kernel
def test_masked_keys_do_not_count(name, device):
    inputs, gradient = draw(SHAPE, torch.float64, device), cotangent(SHAPE, torch.float64, device)
    mask = scattered_mask(device)
    check(name, inputs, gradient, key_mask=mask)
    output = sortattn.kernel_attention(*inputs, CASES[name].kernel, key_mask=mask, backend="grid")
    assert (output[1] == 0).all()


@pytest.mark.parametrize("per_head", [False, True], ids=["one_bandwidth", "bandwidth_per_head"])
@both_masks
@main_kernels
def test_grouped_query_heads_share_their_keys(name, causal, per_head, device):
    # more than one chunk
    query, key, value = draw(Shape((1, 4), 300, 330), torch.float64, device)
    gradient = cotangent(Shape((1, 4), 300, 330), torch.float64, device)
    call = {"bandwidth": torch.linspace(1.0, 2.0, 4).to(query) if per_head else None, "is_causal": causal}
    shared = leaves(query, key[:, :2], value[:, :2])
    repeated = leaves(query, *(part[:, :2].repeat_interleave(2, 1) for part in (key, value)))
    one = sortattn.kernel_attention(*shared, name, enable_gqa=True, backend="grid", **call)
    other = sortattn.kernel_attention(*repeated, name, backend="grid", **call)
    # heads that share nodes have others than heads that do not
    bound = 1e-12 if per_head else 0.02
    assert_close(one, other, bound)
    grouped, alone = (
        torch.autograd.grad(out, points, gradient) for out, points in ((one, shared), (other, repeated))
    )  # fmt: skip
    assert_close(grouped[2], alone[2].unflatten(1, (2, 2)).sum(2), 5 * bound)
    if per_head:
        assert_close(grouped[1], alone[1].unflatten(1, (2, 2)).sum(2), bound)


@pytest.mark.parametrize("leading", LEADING.values(), ids=LEADING.keys())
def test_leading_dimensions_broadcast(leading, device):
    parts = [draw(Shape(each, 11, 13, 3, 2), torch.float64, device, seed=i)[i] for i, each in enumerate(leading)]
    output = sortattn.kernel_attention(*parts, "add_laplace", backend="grid")
    whole = torch.broadcast_shapes(*leading)
    wide = [part.expand(*whole, *part.shape[-2:]) for part in parts]
    assert_close(output, sortattn.kernel_attention(*wide, "add_laplace", backend="grid"), 1e-12)
    assert output.shape == (*whole, 11, 2)


@pytest.mark.parametrize("bandwidth", BANDWIDTHS.values(), ids=BANDWIDTHS.keys())
@main_kernels
def test_a_bandwidth_may_be_a_tensor(name, bandwidth, device):
    inputs, gradient = draw(SHAPE, torch.float64, device), cotangent(SHAPE, torch.float64, device)
    check(name, inputs, gradient, bandwidth=bandwidth.to(device, torch.float64))


@full_dtypes
@every_kernel
def test_kernel_sums_are_near_the_definition(name, dtype, device):
    query, key, value = draw(Shape((2,), 200, 300, 5, 7), dtype, device)
    exact = (part.double() for part in (query, key, value))
    wanted = sortattn.kernel_sum(*exact, CASES[name].kernel, backend="reference")
    assert_close(sortattn.kernel_sum(query, key, value, CASES[name].kernel, backend="grid"), wanted, 0.02)


# the same surrogate in float64 autograd


@both_masks
@full_dtypes
@every_kernel
def test_gradients_are_those_of_the_surrogate(name, dtype, causal):
    # causal: two chunks, and keys that all queries see
    shape = Shape((2,), 300, 310, 3, 4) if causal else Shape((2,), 60, 90, 3, 4)
    kernel = CASES[name].kernel
    tau = torch.tensor([0.8, 1.7], dtype=dtype)
    points, exact = (
        leaves(*draw(shape, dtype), tau),
        leaves(*(part.double() for part in (*draw(shape, dtype), tau))),
    )
    output = sortattn.kernel_attention(
        *points[:3], kernel, bandwidth=points[3], is_causal=causal, backend="grid:24"
    )  # fmt: skip
    grid = surrogate.nodes_of(points[0], points[1], kernel, 24, bandwidth=tau)
    wanted = surrogate.attention(*exact[:3], kernel, exact[3], grid, causal)
    bound = {torch.float64: 1e-11, torch.float32: 1e-5}[dtype]
    assert_close(output, wanted, bound)
    gradient = cotangent(shape, dtype)
    actual = torch.autograd.grad(output, points, gradient)
    expected = torch.autograd.grad(wanted, exact, gradient.double())
    for label, one, other in zip(("query", "key", "value", "bandwidth"), actual, expected, strict=True):
        # slopes across narrow cells are differences, and the bandwidth's gradient is a sum that nearly cancels
        assert_close(one, other, 20 * bound if label != "bandwidth" else 300 * bound, name=label)


def test_a_point_on_a_node_has_the_mean_of_both_derivatives():
    # three values and a constant dimension: all points are on nodes, where the exact gradient counts ties as zero
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randint(0, 3, (1, 40, 2), generator=generator).double() for _ in range(2))
    query[..., 1] = key[..., 1] = 0.3
    value = torch.randn(1, 40, 3, generator=generator, dtype=torch.float64)
    for name in ("add_riesz", "add_laplace"):
        results = []
        for backend in ("grid", "reference"):
            points = leaves(query, key, value)
            output = sortattn.kernel_attention(*points, name, backend=backend)
            results.append([output, *torch.autograd.grad(output.square().sum(), points)])
        for one, other in zip(*results, strict=True):
            assert_close(one, other, 1e-12)


# nodes


@all_data
def test_nodes_ascend_and_enclose_the_data(data):
    query, key, _ = sample(data)
    nodes, _ = place(query, key, None, torch.ones(2), 32)
    assert nodes.shape == (2, 8, 32)
    assert (nodes.diff(dim=2) >= 0).all()
    points = torch.cat([query, key], 1)
    assert (nodes[..., 0] < points.amin(1)).all()
    assert (nodes[..., -1] > points.amax(1)).all()


def test_frequent_values_have_a_node_of_their_own():
    query, key, _ = sample(lambda generator, *size: torch.randint(0, 20, size, generator=generator) / 7.0)
    nodes, _ = place(query, key, None, torch.ones(2), 64)
    for value in torch.cat([query, key], 1).unique():
        assert (nodes == value).any(2).all()


def test_an_outlier_draws_few_nodes_away():
    query, key, _ = sample(outlier)
    nodes, _ = place(query, key, None, torch.ones(2), 64)
    assert ((nodes > 4.5).sum(2) < 8).all()


def test_masked_keys_draw_no_nodes():
    query, key, _ = sample(normal, columns=5000)
    mask = torch.zeros(2, 5000, dtype=torch.bool)
    mask[:, 4900:] = True
    weight = mask.float()
    # where masked keys are put before any backend sees them
    key = torch.where(mask[..., None], key, 0.0)
    nodes, found = place(query, key, weight, torch.ones(2), 64)
    assert (found == 0).float().mean() < 0.01


def test_a_periodic_sequence_is_not_seen_at_one_phase():
    place_in_period = torch.arange(16384) % 16
    points = place_in_period[None, :, None].float().expand(1, 16384, 1)
    _, found = place(points, points, None, torch.ones(1), 16)
    assert len(found.unique()) == 16


# errors


@all_data
@main_kernels
def test_the_estimate_is_between_a_third_and_ten_times_the_error(name, data):
    query, key, value = sample(data)
    for nodes in (16, 32, 64):
        backend = f"grid:{nodes}"
        error = surrogate.exact_error(query, key, value, name, backend)
        estimate = sortattn.grid_error(query, key, name, backend=backend).item()
        informed = sortattn.grid_error(query, key, name, value=value, backend=backend).item()
        # where all values have a node, both are rounding
        if error > 1e-5:
            assert error / 3 < estimate < 10 * error
            assert error / 3 < informed < 10 * error


@both_masks
def test_the_estimate_knows_masks_groups_and_16_bits(causal):
    query, key, value = sample(normal, 700, 700, heads=4)
    mask = torch.rand(1, 700, generator=torch.Generator().manual_seed(2)) < 0.6
    call = {"key_mask": mask, "is_causal": causal, "enable_gqa": True}
    inputs = [part[None].half() for part in (query, key[:2], value[:2])]
    error = surrogate.exact_error(*(part.float() for part in inputs), "add_bump", "grid:16", **call)
    for given in (None, inputs[2]):
        estimate = sortattn.grid_error(*inputs[:2], "add_bump", value=given, backend="grid:16", **call).item()
        assert error / 3 < estimate < 10 * error


@all_data
@main_kernels
def test_the_estimate_knows_what_queries_of_causal_calls_see(name, data):
    # the first queries see no key, or the first keys are seen by all; of three queries all are compared
    for rows, columns, most in ((700, 500, 3.0), (70, 90, 3.0), (3, 200, 1.01)):
        query, key, value = sample(data, rows, columns)
        call = {"value": value, "is_causal": True, "backend": "grid:32"}
        estimate = sortattn.grid_error(query, key, name, **call).item()
        error = surrogate.exact_error(query, key, value, name, "grid:32", is_causal=True)
        # where all values have a node, both are rounding
        if error > 1e-5:
            assert 1 / most < estimate / error < most


def test_the_estimate_of_nothing_is_zero():
    for rows, columns in ((0, 3), (3, 0), (0, 0)):
        assert sortattn.grid_error(torch.zeros(2, rows, 4), torch.zeros(2, columns, 4)).item() == 0


@main_kernels
@both_masks
def test_the_error_falls_with_the_number_of_nodes(name, causal):
    query, key, value = sample(normal, 900, 900)
    errors = [
        surrogate.exact_error(query, key, value, name, f"grid:{nodes}", is_causal=causal) for nodes in (16, 32, 64, 128)
    ]
    for before, after in zip(errors, errors[1:], strict=False):
        assert after < before / 2**1.4
    assert errors[2] < 0.01


@main_kernels
def test_gradients_come_nearer_with_the_number_of_nodes(name):
    inputs = sample(normal)
    gradient = torch.randn(2, 500, 16, generator=torch.Generator().manual_seed(1))
    results = {}
    for backend in ("reference", "grid:32", "grid:128"):
        points = leaves(*inputs)
        results[backend] = torch.autograd.grad(
            sortattn.kernel_attention(*points, name, backend=backend), points, gradient
        )  # fmt: skip
    exact = results["reference"]
    for i in range(3):
        coarse, fine = (relative_error(results[backend][i], exact[i]) for backend in ("grid:32", "grid:128"))
        assert fine < coarse / (1.6 if i < 2 else 6)
    assert relative_error(results["grid:128"][0], exact[0]) < 0.2
    assert relative_error(results["grid:128"][2], exact[2]) < 0.01


@main_kernels
def test_the_correction_makes_the_error_smaller(name, monkeypatch):
    from sortattn.ops.grid import api

    inputs = sample(normal, 900, 900)
    corrected = surrogate.exact_error(*inputs, name, "grid:32")
    monkeypatch.setattr(api, "correct", lambda sample, nodes, *rest: torch.zeros(*nodes.shape, nodes.shape[2]))
    assert corrected < 0.93 * surrogate.exact_error(*inputs, name, "grid:32")


def test_offsets_do_no_harm():
    query, key, value = sample(normal)
    query, key = ((part * 256).round() / 256 for part in (query, key))
    for name in ("add_laplace", "add_bump"):
        plain = sortattn.kernel_attention(query, key, value, name, backend="grid")
        moved = sortattn.kernel_attention(query + 100, key + 100, value, name, backend="grid")
        assert_close(moved, plain, 1e-5)


# degenerate calls


@both_masks
@pytest.mark.parametrize(
    "shape",
    [(3, 0, 2, 2), (0, 3, 2, 2), (0, 0, 2, 2), (3, 4, 2, 0), (1, 1, 1, 1)],
    ids=["no_keys", "no_queries", "neither", "no_channels", "one_point"],
)
def test_empty_and_single_inputs(shape, causal):
    for name in MAIN:
        points = leaves(*draw(Shape((2,), *shape), torch.float32))
        output = sortattn.kernel_attention(*points, name, is_causal=causal, backend="grid")
        gradients = torch.autograd.grad(output.sum(), points)
        if shape == (1, 1, 1, 1):
            assert_close(output, sortattn.kernel_attention(*points, name, backend="reference"), 1e-4)
        else:
            assert (output == 0).all()
            assert all((part == 0).all() for part in gradients)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@both_masks
@main_kernels
def test_what_is_no_number_stays_in_its_head(name, causal, bad):
    inputs = draw(Shape((3, 2), 40, 50, 3, 4), torch.float32)
    clean = sortattn.kernel_attention(*inputs, name, is_causal=causal, backend="grid")
    for i in range(3):
        parts = [part.clone() for part in inputs]
        parts[i][1, 0, 7, 1] = bad
        output = sortattn.kernel_attention(*parts, name, is_causal=causal, backend="grid")
        assert output[1, 0].isnan().all()
        output[1, 0] = clean[1, 0]
        assert torch.equal(output, clean)


def test_what_is_no_number_stays_in_its_head_of_a_group():
    query, key, value = draw(Shape((1, 4), 40, 50, 3, 4), torch.float32)
    query[0, 1, 5] = torch.nan
    output = sortattn.kernel_attention(query, key[:, :2], value[:, :2], "add_laplace", enable_gqa=True, backend="grid")
    assert output[0, 1].isnan().all()
    assert output[0, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("scale", [1e-20, 1e-3, 1e3, 1e15])
@main_kernels
def test_points_of_any_scale_give_finite_sums(name, scale):
    query, key, value = sample(normal, 60, 80)
    points = leaves(query * scale, key * scale, value)
    output = sortattn.kernel_attention(*points, name, backend="grid")
    assert output.isfinite().all()
    assert all(part.isfinite().all() for part in torch.autograd.grad(output.sum(), points))


@both_masks
@pytest.mark.usefixtures("cpu_only")
def test_results_are_the_same_bits_for_any_number_of_threads(causal, threads):
    inputs = draw(Shape((2, 2), 600, 700, 9, 10), torch.float32)
    gradient = cotangent(Shape((2, 2), 600, 700, 9, 10), torch.float32)
    results = []
    for count in (1, 2, 2):
        threads(count)
        points = leaves(*inputs, torch.tensor([0.5, 1.0]))
        output = sortattn.kernel_attention(
            *points[:3], "add_laplace", bandwidth=points[3], is_causal=causal, backend="grid"
        )  # fmt: skip
        results.append([output, *torch.autograd.grad(output, points, gradient)])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


# the setting


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("", 64), ("16", 16), ("128", 128), ("1024", 1024)],
)
def test_the_number_of_nodes_is_given_or_the_default(setting, expected):
    assert options.count(setting, resolve("add_riesz"), 64) == expected


@main_kernels
@pytest.mark.parametrize("tolerance", [1e-2, 3e-3, 1e-3])
def test_a_tolerance_is_met_on_unit_normal_data(name, tolerance):
    query, key, value = sample(normal, 900, 900, dims=16)
    assert surrogate.exact_error(query, key, value, name, f"grid:{tolerance}") < tolerance


def test_a_tolerance_out_of_reach_is_refused():
    points = torch.randn(1, 20, 3)
    with pytest.raises(ValueError, match="would need .* nodes a dimension, more than 1024"):
        sortattn.kernel_attention(points, points, points, "add_laplace", backend="grid:1e-9")


def test_a_batch_of_nothing_gives_nothing():
    points = torch.randn(0, 20, 3)
    assert sortattn.kernel_attention(points, points, points, "add_riesz", backend="grid").shape == (0, 20, 3)


@pytest.mark.parametrize("name", ["grid:7", "grid:many", "grid:64.5", "grid:-1", "grid:2000", "grid:nan"])
def test_a_wrong_setting_is_a_clear_error(name):
    with pytest.raises(ValueError, match="must name a whole number of nodes from 8 to 1024"):
        sortattn.kernel_attention(*draw(SHAPE, torch.float32), "add_riesz", backend=name)


def test_other_backends_take_no_setting():
    with pytest.raises(ValueError, match="unknown backend 'tiled:64'"):
        sortattn.kernel_attention(*draw(SHAPE, torch.float32), "add_riesz", backend="tiled:64")


def test_jumps_are_refused():
    kernel = sortattn.Spline([-1.0, 1.0], [0.0, 0.0, 0.0], jumps=[1.0, -1.0])
    with pytest.raises(RuntimeError, match="a grid would smear the jumps of this spline"):
        sortattn.kernel_attention(*draw(SHAPE, torch.float32), kernel, backend="grid")


def test_the_estimate_is_of_a_grid():
    query, key, _ = draw(SHAPE, torch.float32)
    with pytest.raises(ValueError, match="backend must be 'grid' or 'grid:NODES', got 'tiled'"):
        sortattn.grid_error(query, key, "add_riesz", backend="tiled")


def test_slopes_change_where_the_formula_says():
    assert slope_jumps(resolve("add_bump"))[1].tolist() == [1.0, -2.0, 1.0]
    assert slope_jumps(resolve("add_laplace"))[1].tolist() == [-2.0]
    assert slope_jumps(resolve("add_riesz"))[1].tolist() == [-2.0]
    # Matern 3/2 has no kink
    assert slope_jumps(sortattn.PolynomialExponential([1.0, 1.0]))[1].tolist() == [0.0]


def test_coefficients_of_a_kernel_get_their_gradients():
    inputs = draw(Shape((2,), 300, 310, 3, 4), torch.float64)
    for causal in (False, True):
        results = []
        for backend in ("grid:128", "reference"):
            slopes = torch.tensor([-0.25, 0.75, -0.5, 0.125], dtype=torch.float64, requires_grad=True)
            kernel = sortattn.Spline([-1.0, 0.5, 2.0], slopes, offset=1.0)
            output = sortattn.kernel_attention(*inputs, kernel, is_causal=causal, backend=backend)
            results.append(torch.autograd.grad(output.square().sum(), slopes)[0])
        assert_close(*results, 0.01)
