"""The kernels of the tiled backend, run on the CPU: every path through them, against the definition in float64."""

import pytest
import torch

import sortattn
from sortattn.ops.tiled import cuda_call, cuda_kernels, short
from sortattn.ops.tiled.inputs import Inputs

from .cases import CASES, Shape, assert_close, cotangent, draw, leaves
from .definition import FORWARD, GRADIENT, check, define
from .emulation.device import check_sides_of_steps, emulate
from .emulation.emulator import AVAILABLE, EmulatedKernel

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")

NAMES = [
    "add_riesz", "add_laplace", "add_bump", "laplace", "riesz", "matern52",
    pytest.param("spline", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _as_on_a_device(device, monkeypatch):
    """Calls on the CPU take the way of CUDA devices, and short ones that of long ones."""
    if device != "cpu":
        pytest.skip("a CUDA device needs no emulation")
    emulate(monkeypatch)
    monkeypatch.setattr(short, "serves", lambda inputs: False)
    # blocks look through the inputs by themselves, whatever the length
    monkeypatch.setattr(cuda_call, "_SHORT", 1 << 20)


def compare(name, query, key, value, **options):
    kernel = CASES[name].kernel
    actual = sortattn.kernel_attention(query, key, value, kernel, backend="tiled", **options)
    exact = (part.double() for part in (query, key, value))
    wanted = sortattn.kernel_attention(*exact, kernel, backend="reference", **options)
    assert_close(actual, wanted, FORWARD[torch.float32])
    return actual, wanted


@pytest.mark.parametrize("name", NAMES)
def test_every_path_of_the_forward_kernel_computes_the_definition(name):
    query, key, value = draw(Shape((1,), 70, 80, 33, 20), torch.float32)
    mask = torch.rand(1, 80, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[:, 70:] = False
    compare(name, query, key, value)
    compare(name, query, key, value, is_causal=True)
    masked, _ = compare(name, query, key, value, key_mask=mask)
    assert (masked[:, 0] != 0).any()
    # points of few dimensions and odd rows, which no 16 bytes hold; points so small or far out that integers or factors
    # do not serve
    compare(name, *draw(Shape((1,), 5, 70, 3, 5), torch.float32))
    far = query.clone()
    far[0, 0, 1] = 100.0
    compare(name, far, key, value)
    if name != "riesz":
        # whose squares are zero then
        compare(name, query * 1e-30, key * 1e-30, value, bandwidth=CASES[name].bandwidth(33) * 1e-30)
    # values that halves cannot hold
    compare(name, query, key, value * 1e-30)
    compare(name, query, key, value * 1e30)


@pytest.mark.parametrize("name", ["spline", "matern"])
def test_kernels_of_more_numbers_than_there_are_registers_for_compute_the_definition(name):
    generator = torch.Generator().manual_seed(3)
    count = cuda_kernels.KEPT + 1
    numbers = torch.rand(count + 1, generator=generator)
    if name == "spline":
        kernel = sortattn.Spline(torch.linspace(-2, 2, count), numbers, offset=5.0)
    else:
        kernel = sortattn.PolynomialExponential(numbers)
    shape = Shape((1,), 20, 30, 5, 3)
    query, key, value = draw(shape, torch.float32)
    gradients = []
    for dtype, backend in ((torch.float32, "tiled"), (torch.float64, "reference")):
        points = leaves(*(part.to(dtype) for part in (query, key, value)))
        output = sortattn.kernel_attention(*points, kernel, bandwidth=0.9, backend=backend)
        gradients.append([output, *torch.autograd.grad((output * cotangent(shape, dtype)).sum(), points)])
    for got, wanted in zip(*gradients, strict=True):
        assert_close(got, wanted, GRADIENT[torch.float32])


@pytest.mark.parametrize("bandwidth", [1.0, 1.3, 0.7, 3e-5, 2e9], ids=str)
def test_a_node_of_a_spline_is_met_where_a_quotient_is_that_node(bandwidth):
    nodes = torch.rand(40, generator=torch.Generator().manual_seed(4)) + 0.5
    tau, met = torch.tensor(bandwidth), 0
    for node in nodes.tolist():
        # the nearest differences, of which for some bandwidths none has the node as a quotient
        near = torch.tensor(node) * tau
        query = torch.stack([near.nextafter(torch.tensor(0.0)), near, near.nextafter(torch.tensor(torch.inf))])
        step = sortattn.Spline([node], [0.0, 0.0], jumps=[1.0])
        rows = sortattn.kernel_sum(
            query[:, None], torch.zeros(1, 1), torch.ones(1, 1), step, bandwidth=bandwidth, backend="tiled"
        )
        wanted = torch.where(query / tau == node, 0.5, (query / tau > node).float())
        assert torch.equal(rows[:, 0], wanted)
        met += (wanted == 0.5).sum()
    assert met > 20


@pytest.mark.parametrize("bandwidth", [1.3, 0.7, 3e-5, 2e9, 1 - 2**-30], ids=str)
def test_the_edge_of_a_bump_has_all_digits_of_the_bandwidth(bandwidth):
    key = torch.rand(1, 1, 40) * bandwidth
    # in every dimension a thousandth of the window inside of it
    query = key + bandwidth * (1 - 1e-3)
    rows = sortattn.kernel_sum(query, key, torch.ones(1, 1, 1), "add_bump", bandwidth=bandwidth, backend="tiled")
    assert abs(rows.item() / 40 - 1e-3) < 2e-7


@pytest.mark.parametrize("name", ["add_laplace", "laplace"])
def test_rows_that_end_between_the_numbers_of_a_thread_are_looked_through(name):
    query, key, value = draw(Shape((1,), 70, 80, 40, 20), torch.float32)
    compare(name, query + 100, key + 100, value)


def test_a_block_without_room_for_all_factors_computes_the_definition(monkeypatch):
    monkeypatch.setattr(cuda_kernels, "room_of", lambda device: 99 << 10)
    compare("add_laplace", *draw(Shape((1,), 70, 80, 33, 20), torch.float32))


@pytest.mark.parametrize("name", NAMES[:-1])
def test_two_groups_of_warps_compute_the_definition(name, monkeypatch):
    monkeypatch.setattr(cuda_kernels, "processors_of", lambda device: 1000)
    # of three tiles the groups have two and one, of one tile one has none
    shape = Shape((1,), 70, 140, 33, 20)
    query, key, value = draw(shape, torch.float32)
    mask = torch.rand(1, 140, generator=torch.Generator().manual_seed(2)) < 0.6
    compare(name, query, key, value, is_causal=True)
    compare(name, query, key, value, key_mask=mask)
    compare(name, query, key[:, :40], value[:, :40])
    case, gradient = CASES[name], cotangent(shape, torch.float32)
    check(define(case, (query, key, value), gradient), case, (query, key, value), gradient, backend="tiled")


@pytest.mark.parametrize("name", ["add_riesz", "add_bump"])
def test_blocks_of_fewer_rows_compute_the_definition(name, monkeypatch):
    monkeypatch.setattr(cuda_kernels, "processors_of", lambda device: 1)
    rows = []
    honest = cuda_call.Call.shape

    def shape_of(call, entry, count):
        rows.append(honest(call, entry, count)[0])
        return honest(call, entry, count)

    monkeypatch.setattr(cuda_call.Call, "shape", shape_of)
    # three tiles, the last of 8 rows and less
    shape = Shape((1,), 72, 70, 33, 20)
    query, key, value = draw(shape, torch.float32)
    mask = torch.rand(1, 70, generator=torch.Generator().manual_seed(2)) < 0.6
    compare(name, query, key, value, is_causal=True)
    compare(name, query, key, value, key_mask=mask)
    case, gradient = CASES[name], cotangent(shape, torch.float32)
    check(define(case, (query, key, value), gradient), case, (query, key, value), gradient, backend="tiled")
    assert set(rows) == {32}


@pytest.fixture
def streamed(monkeypatch):
    """Keys and values are made ready by a kernel before; the list of entries that were launched."""
    monkeypatch.setattr(cuda_call, "_SHORT", 0)
    monkeypatch.setattr(cuda_kernels, "walks", lambda device: True)
    launched, honest = [], cuda_kernels.chunks_of

    def chunks_of(*options):
        launched.append("chunks")
        return honest(*options)

    monkeypatch.setattr(cuda_kernels, "chunks_of", chunks_of)
    return launched


@pytest.mark.parametrize("name", cuda_kernels.STREAMED)
def test_a_walk_over_chunks_computes_the_definition(name, streamed):
    # three tiles of keys, of which the last has few, and slots of the ring that are taken several times
    query, key, value = draw(Shape((2,), 70, 140, 33, 20), torch.float32)
    mask = torch.rand(2, 140, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[:, 130:] = False
    compare(name, query, key, value)
    compare(name, query + 100, key + 100, value)
    compare(name, query, key, value, is_causal=True)
    compare(name, query, key, value, key_mask=mask)
    compare(name, query, key, value, bandwidth=torch.tensor([0.4, 0.7]))
    # all dimensions and channels there may be
    compare(name, *draw(Shape((1,), 65, 128, 64, 64), torch.float32))
    assert streamed


def test_a_walk_over_chunks_of_rows_that_no_16_bytes_hold_computes_the_definition(streamed):
    compare("add_laplace", *draw(Shape((1,), 66, 70, 3, 5), torch.float32))
    assert streamed


@pytest.mark.parametrize("name", cuda_kernels.STREAMED)
def test_a_walk_over_chunks_of_grouped_heads_computes_the_definition(name, streamed):
    query, key, value = draw(Shape((1, 2), 40, 70, 34, 5), torch.float32)
    compare(name, query, key[:, :1], value[:, :1], enable_gqa=True)
    compare(name, query, key[:, :1], value[:, :1], enable_gqa=True, is_causal=True)
    assert streamed


@pytest.mark.parametrize("name", cuda_kernels.STREAMED)
def test_heads_that_chunks_do_not_serve_are_summed_as_others(name, streamed):
    query, key, value = draw(Shape((2,), 70, 80, 33, 20), torch.float32)
    far = query.clone()
    far[0, 0, 1] = 100.0
    compare(name, far, key, value)
    compare(name, query, key, value * 1e30)
    compare(name, query, key, value * 1e-30, is_causal=True)
    assert streamed


@pytest.mark.parametrize("name", cuda_kernels.STREAMED)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_a_bad_number_spoils_no_other_head_of_a_walk_over_chunks(name, which, bad, streamed):
    inputs = draw(Shape((2,), 70, 70, 33, 8), torch.float32)
    inputs[which][1, -1, 2] = bad
    output = sortattn.kernel_attention(*inputs, name, backend="tiled")
    assert output[1].isnan().all()
    assert output[0].isfinite().all()
    assert streamed


@pytest.mark.parametrize("name", cuda_kernels.STREAMED)
def test_a_bad_query_shows_where_there_are_no_keys(name, streamed):
    query, key, value = draw(Shape((2,), 70, 0, 33, 8), torch.float32)
    query[1, 3, 2] = torch.nan
    output = sortattn.kernel_attention(query, key, value, name, backend="tiled")
    assert output[1].isnan().all()
    assert (output[0] == 0).all()
    assert streamed


@pytest.mark.parametrize(("power", "served"), [(-7, True), (6, True), (-9, False), (9, False)])
def test_chunks_serve_values_of_most_sizes(power, served, streamed):
    """The same bits but for the power of two, which heads that are summed otherwise do not have."""
    query, key, value = draw(Shape((1,), 70, 80, 33, 20), torch.float32)
    # as halves have all their digits, whatever the power
    value = (4 * value).round() / 4
    both = value, value * 2.0**power
    one, other = (sortattn.kernel_attention(query, key, part, "add_laplace", backend="tiled") for part in both)
    assert torch.equal(one * 2.0**power, other) is served
    assert streamed


@pytest.mark.parametrize("name", cuda_kernels.STREAMED)
def test_a_single_block_of_queries_is_summed_without_chunks(name, streamed):
    compare(name, *draw(Shape((2,), 64, 140, 33, 20), torch.float32))
    assert not streamed


@pytest.mark.parametrize("name", cuda_kernels.STREAMED)
def test_a_walk_over_chunks_has_gradients(name, streamed):
    shape = Shape((1,), 70, 80, 33, 20)
    case, inputs, gradient = CASES[name], draw(shape, torch.float32), cotangent(shape, torch.float32)
    check(define(case, inputs, gradient), case, inputs, gradient, backend="tiled")
    assert streamed


@pytest.mark.parametrize(("heads", "rows"), [(96, 64), (192, 32), (384, 64)])
def test_blocks_have_fewer_rows_where_multiprocessors_would_have_one_and_two(heads, rows, monkeypatch):
    monkeypatch.setattr(cuda_kernels, "processors_of", lambda device: 132)
    points = [torch.empty(heads, 64, 64)] * 3
    inputs = Inputs(*points, None, None, None, 1.0, "add_bump", False, 1, True, False)
    assert cuda_call.Call(inputs).shape("forward", 64) == (rows, 2 if heads == 96 else 1)


def compare_gradients(name, inputs, gradient, **options):
    """Of queries, keys, values and the bandwidth."""
    kernel = CASES[name].kernel
    # every head has its own
    bandwidth = torch.linspace(1.0, 1.2, inputs[0].shape[0]) * CASES[name].bandwidth(inputs[0].shape[-1])

    def gradients(dtype, backend):
        points = leaves(*(part.to(dtype) for part in (*inputs, bandwidth)))
        output = sortattn.kernel_attention(*points[:3], kernel, bandwidth=points[3], backend=backend, **options)
        return torch.autograd.grad(output, points, gradient.to(dtype))

    pairs = list(zip(gradients(torch.float32, "tiled"), gradients(torch.float64, "reference"), strict=True))
    # of the Riesz kernels the quotient hardly depends on the bandwidth: rounding is all there is of that gradient
    for actual, wanted in pairs[:3] if "riesz" in name else pairs:
        assert_close(actual, wanted, GRADIENT[torch.float32])


@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_every_path_of_the_backward_kernels_computes_the_definition(name):
    shape = Shape((1,), 70, 80, 33, 20)
    inputs, gradient = draw(shape, torch.float32), cotangent(shape, torch.float32)
    compare_gradients(name, inputs, gradient, is_causal=True)
    # ties are the rule, and a part of the keys is masked
    coarse = [*((part * 4).round() / 4 for part in inputs[:2]), inputs[2]]
    mask = torch.rand(1, 80, generator=torch.Generator().manual_seed(2)) < 0.6
    compare_gradients(name, coarse, gradient, key_mask=mask)
    # few dimensions and odd rows, which no 16 bytes hold; points far out, where factors do not serve
    small = Shape((2,), 5, 70, 3, 5)
    inputs, gradient = draw(small, torch.float32), cotangent(small, torch.float32)
    inputs[0][0, 0, 1] = 40.0
    compare_gradients(name, inputs, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["add_laplace", "add_bump"])
def test_a_gpu_with_little_shared_memory_has_gradients_too(name, dtype, monkeypatch):
    sizes = []

    def launched(kernel, grid, threads, *arguments, shared=0, **options):
        sizes.append(shared)
        return honest(kernel, grid, threads, *arguments, shared=shared, **options)

    honest = EmulatedKernel.__call__
    monkeypatch.setattr(EmulatedKernel, "__call__", launched)
    monkeypatch.setattr(cuda_kernels, "room_of", lambda device: 99 << 10)
    shape = Shape((1,), 66, 70, 5, 8)
    case, inputs, gradient = CASES[name], draw(shape, dtype), cotangent(shape, dtype)
    check(define(case, inputs, gradient), case, inputs, gradient, backend="tiled")
    assert 0 < max(sizes) <= 99 << 10


@pytest.mark.parametrize("rows", [65, 90], ids=lambda rows: f"N{rows}")
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_the_last_tile_of_a_sequence_may_be_short(name, rows):
    shape = Shape((1,), rows, rows, 9, 8)
    case, inputs, gradient = CASES[name], draw(shape, torch.float32), cotangent(shape, torch.float32)
    check(define(case, inputs, gradient), case, inputs, gradient, backend="tiled")
    # ties at the kinks of a kernel
    inputs = [*((part * 4).round() / 4 for part in inputs[:2]), inputs[2]]
    check(define(case, inputs, gradient), case, inputs, gradient, backend="tiled")


@pytest.mark.parametrize("name", ["add_riesz", "add_bump"])
def test_what_tensor_cores_cut_off_costs_no_digits(name):
    # in one dimension some queries have hardly any weight, and dS in a tile is of very different sizes
    shape = Shape((2, 3), 63, 100, 1, 7)
    case, inputs, gradient = CASES[name], draw(shape, torch.float32), cotangent(shape, torch.float32)
    check(define(case, inputs, gradient), case, inputs, gradient, backend="tiled")


@pytest.mark.parametrize("side", [1.0, -1.0], ids=["positive", "negative"])
def test_a_query_that_shares_next_to_nothing_with_its_keys_keeps_its_digits(side):
    query, key, value = draw(Shape((1,), 4, 300, 3, 8), torch.float32)
    query, key = side * query.abs(), -side * key.abs()
    key[0, 5] = side * 0.01
    compare("add_riesz", query, key, value)


def test_the_output_may_be_changed_in_place():
    shape = Shape((1, 2), 10, 70, 3, 8)
    inputs, gradient = draw(shape, torch.float32), cotangent(shape, torch.float32)

    def gradients(change):
        points = leaves(*inputs)
        output = change(sortattn.kernel_attention(*points, "add_riesz", backend="tiled"))
        return torch.autograd.grad(output, points, gradient)

    for one, other in zip(gradients(lambda x: x.mul_(2.0)), gradients(lambda x: x * 2.0), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
def test_an_ordinary_call_is_one_node_of_autograd(dtype):
    points = leaves(*draw(Shape((2, 2), 5, 7, 3, 4), dtype))
    output = sortattn.kernel_attention(*points, "add_bump", backend="tiled")
    before = [node.variable for node, _ in output.grad_fn.next_functions[:3]]
    assert all(one is other for one, other in zip(before, points, strict=True))
    assert output.shape == (2, 2, 5, 4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_an_ordinary_call_are_mapped():
    shape = Shape((2, 2), 5, 7, 3, 4)
    points = leaves(*draw(shape, torch.float32))
    output = sortattn.kernel_attention(*points, "add_bump", backend="tiled")

    def gradients(one):
        return torch.autograd.grad(output, points, one, retain_graph=True)

    several = torch.stack([cotangent(shape, torch.float32), torch.ones_like(output)])
    mapped = torch.func.vmap(gradients)(several)
    batched = torch.autograd.grad(output, points, several, retain_graph=True, is_grads_batched=True)
    for one, other, *wanted in zip(mapped, batched, *map(gradients, several), strict=True):
        assert torch.equal(one, torch.stack(wanted))
        assert torch.equal(other, torch.stack(wanted))


@pytest.mark.parametrize("leading", [(), (2, 2), (0, 2)], ids=["one", "heads", "none"])
def test_a_second_derivative_of_an_ordinary_call_is_refused(leading):
    points = leaves(*draw(Shape(leading, 5, 7, 3, 4), torch.float32))
    output = sortattn.kernel_attention(*points, "add_bump", backend="tiled")
    gradients = torch.autograd.grad(output.sum(), points, create_graph=True)
    assert [part.shape for part in gradients] == [part.shape for part in points]
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(gradients[0].sum(), points)


@pytest.mark.parametrize(
    "change",
    [
        {"query": None}, {"key": torch.zeros(2, 7, 4)}, {"key": torch.zeros(3)}, {"value": torch.zeros(2, 6, 4)},
        {"value": torch.zeros(2, 7, 4, dtype=torch.float64)}, {"query": torch.zeros(2, 5, 3, dtype=torch.int32)},
        {"bandwidth": -1.0}, {"bandwidth": True}, {"key_mask": torch.ones(5, 7, dtype=torch.bool)},
    ],
    ids=["no_query", "key_width", "key_vector", "value_rows", "mixed", "integer", "negative", "bool", "mask"],
)  # fmt: skip
def test_wrong_use_is_an_error_here_too(change):
    call = {"query": torch.zeros(2, 5, 3), "key": torch.zeros(2, 7, 3), "value": torch.zeros(2, 7, 4)} | change
    with pytest.raises((ValueError, TypeError)):
        sortattn.kernel_attention(**call, kernel="add_bump", backend="tiled")


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 3), (2, 3, 0)], ids=["no_batch", "no_queries", "no_keys"])
def test_empty_inputs_have_gradients(shape):
    problems, rows, columns = shape
    bandwidth = torch.tensor(2.0, requires_grad=True)
    points = leaves(*draw(Shape((problems,), rows, columns, 2, 2), torch.float32))
    output = sortattn.kernel_attention(*points, "add_bump", bandwidth=bandwidth, backend="tiled")
    assert (output == 0).all()
    gradients = torch.autograd.grad(output.sum(), (*points, bandwidth))
    assert all((part == 0).all() for part in gradients)


def test_rounding_does_not_choose_the_side_of_a_step():
    check_sides_of_steps()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", pytest.param("add_bump", marks=pytest.mark.slow)])
def test_inputs_of_16_bits_lose_no_more_than_their_rounding(name, dtype):
    shape = Shape((1,), 20, 70, 9, 8)
    inputs, gradient = draw(shape, dtype), cotangent(shape, dtype)

    def run(dtype, backend):
        points = leaves(*(part.to(dtype) for part in inputs))
        output = sortattn.kernel_attention(*points, CASES[name].kernel, backend=backend)
        return output, *torch.autograd.grad(output, points, gradient.to(dtype))

    for actual, wanted in zip(run(dtype, "tiled"), run(torch.float64, "reference"), strict=True):
        assert_close(actual, wanted, GRADIENT[dtype])


@pytest.mark.parametrize("name", ["laplace", "riesz"])
def test_the_gradients_of_kernels_of_a_distance(name):
    shape = Shape((1,), 10, 70, 6, 5)
    compare_gradients(name, draw(shape, torch.float32), cotangent(shape, torch.float32), is_causal=True)


def test_grouped_heads_have_gradients_of_their_own_queries():
    shape = Shape((1, 2), 40, 70, 6, 5)
    query, key, value = draw(shape, torch.float32)
    shared = [query, key[:, :1], value[:, :1]]
    gradient = cotangent(shape, torch.float32)
    for causal in (False, True):

        def gradients(dtype, backend, causal=causal):
            points = leaves(*(part.to(dtype) for part in shared))
            options = {"backend": backend, "enable_gqa": True, "is_causal": causal}
            output = sortattn.kernel_attention(*points, "add_riesz", **options)
            return torch.autograd.grad(output, points, gradient.to(dtype))

        for one, other in zip(gradients(torch.float32, "tiled"), gradients(torch.float64, "reference"), strict=True):
            assert_close(one, other, GRADIENT[torch.float32])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_wide_heads_are_computed_too(name):
    compare(name, *draw(Shape((1,), 10, 70, 70, 80), torch.float32))


@pytest.mark.parametrize("name", ["add_laplace", "add_bump"])
def test_rows_of_hardly_any_weight_keep_their_digits(name):
    query, key, value = draw(Shape((1,), 70, 130, 40, 8), torch.float32)
    query[:, 3] = 12.0
    query[:, 3, 0] = key[:, 7, 0] + 1.0
    actual, wanted = compare(name, query, key, value)
    assert_close(actual[:, 3], wanted[:, 3], FORWARD[torch.float32])


@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_a_bad_number_spoils_its_head_and_no_other(which, bad):
    inputs = draw(Shape((2,), 10, 70, 33, 8), torch.float32)
    inputs[which][1, -1, 2] = bad
    output = sortattn.kernel_attention(*inputs, "add_bump", is_causal=True, backend="tiled")
    assert output[1].isnan().all()
    assert output[0].isfinite().all()
