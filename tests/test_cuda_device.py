"""What only a GPU has: graphs, streams, calls that wait for nothing, and tensors of more than 2^31 numbers."""

import threading

import pytest
import torch

import sortattn
from sortattn.ops.sorted import cuda, cuda_coil, cuda_reel

from .cases import CASES, Shape, assert_close, cotangent, draw, leaves, refusal
from .definition import FORWARD, GRADIENT
from .test_promises import check_some_queries

SHAPE = Shape((2, 3), 70, 130, 40, 24)
CALLS = [
    ("add_riesz", "tiled"), ("add_laplace", "tiled"), ("add_bump", "tiled"), ("laplace", "tiled"), ("spline", "tiled"),
    ("add_riesz", "sorted"), ("add_laplace", "sorted"), ("add_bump", "sorted"),
]  # fmt: skip
every_call = pytest.mark.parametrize(("name", "backend"), CALLS, ids=["-".join(call) for call in CALLS])


@pytest.fixture(autouse=True)
def _cuda_only(device):
    if device != "cuda":
        pytest.skip("a property of CUDA devices; run with --device cuda")


def attend(name, backend, points, gradient=None, **options) -> list[torch.Tensor]:
    """The output, and the gradients of the points if there is one of the output."""
    output = sortattn.kernel_attention(*points, CASES[name].kernel, backend=backend, **options)
    return [output] if gradient is None else [output, *torch.autograd.grad(output, points, gradient)]


def agree(one, other, dtype=torch.float32) -> None:
    for i, (first, second) in enumerate(zip(one, other, strict=True)):
        assert_close(first, second, GRADIENT[dtype] if i else FORWARD[dtype])


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@every_call
def test_a_captured_graph_replays_with_other_numbers(name, backend, backward, device):
    if refusal(backend, CASES[name], device):
        return
    points = draw(SHAPE, torch.float32, device)
    points = leaves(*points) if backward else points
    gradient = cotangent(SHAPE, torch.float32, device) if backward else None
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # what a first call compiles and allocates is no part of the graph
        attend(name, backend, points, gradient)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(name, backend, points, gradient)
    others = draw(SHAPE, torch.float32, device, seed=7)
    with torch.no_grad():
        for part, other in zip(points, others, strict=True):
            part.copy_(other)
    graph.replay()
    agree(results, attend(name, backend, leaves(*others) if backward else others, gradient))


def hat(width: float) -> sortattn.Spline:
    return sortattn.Spline([-width, 0.0, width], [0.0, 1.0, -1.0, 0.0])


def capture(call) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph, output


def overwrite() -> None:
    """Fills the free memory of torch's cache in pieces as small as the numbers of a kernel."""
    parts = [torch.full((128,), torch.nan, device="cuda") for _ in range(20_000)]
    torch.cuda.synchronize()
    del parts


@pytest.mark.parametrize("backend", ["sorted", "tiled", "grid:32"])
def test_a_graph_is_replayed_when_its_kernel_is_gone(backend, device):
    points, kernels = draw(SHAPE, torch.float32, device), [hat(1.0)]

    def call() -> torch.Tensor:
        return sortattn.kernel_attention(*points, kernels[0], backend=backend)

    wanted = call()
    graph, output = capture(call)
    kernels.clear()
    for number in range(300):
        sortattn.kernel_attention(*points, hat(2.0 + number / 100), backend=backend)
    overwrite()
    graph.replay()
    assert_close(output, wanted, FORWARD[torch.float32])


@pytest.mark.parametrize("backend", ["sorted", "tiled"])
def test_what_a_graph_was_the_first_to_need_serves_other_calls(backend, device):
    points, kernel = draw(SHAPE, torch.float32, device), hat(1.5)

    def call(kernel: sortattn.Spline = kernel) -> torch.Tensor:
        return sortattn.kernel_attention(*points, kernel, backend=backend)

    # compiles, with other numbers
    call(hat(3.0))
    graph, output = capture(call)
    wanted = sortattn.kernel_attention(*(part.double() for part in points), kernel, backend="reference")
    assert_close(call(), wanted, FORWARD[torch.float32])
    graph.replay()
    assert_close(output, wanted, FORWARD[torch.float32])
    del graph, output
    overwrite()
    assert_close(call(), wanted, FORWARD[torch.float32])


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@every_call
def test_a_call_waits_for_nothing(name, backend, backward, device):
    if refusal(backend, CASES[name], device):
        return
    points = leaves(*draw(SHAPE, torch.float32, device))
    gradient = cotangent(SHAPE, torch.float32, device) if backward else None
    attend(name, backend, points, gradient)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(name, backend, points, gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_call
def test_a_side_stream_is_followed(name, backend, device):
    if refusal(backend, CASES[name], device):
        return
    host = [part.pin_memory() for part in draw(SHAPE, torch.float32)]
    gradient = cotangent(SHAPE, torch.float32).pin_memory()
    wanted = attend(name, backend, leaves(*(part.to(device) for part in host)), gradient.to(device))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # the inputs come late: a kernel on another stream would read what is not there yet
        torch.cuda._sleep(50_000_000)
        points = leaves(*(part.to(device, non_blocking=True) for part in host))
        results = attend(name, backend, points, gradient.to(device, non_blocking=True))
        # and the results are taken away on the same stream
        copies = [part.detach().clone() for part in results]
    side.synchronize()
    agree(copies, wanted)


@pytest.mark.parametrize(
    ("name", "backend"), [("add_riesz", "tiled"), ("laplace", "tiled"), ("add_laplace", "sorted"), ("add_bump", "auto")]
)
def test_the_default_compiler_compiles_it(name, backend, device):
    if backend != "auto" and refusal(backend, CASES[name], device):
        return
    torch.compiler.reset()

    def call(query, key, value):
        return sortattn.kernel_attention(query, key, value, name, backend=backend) * 2

    fast = torch.compile(call, fullgraph=True)
    gradient = cotangent(SHAPE, torch.float32, device)

    def run(function):
        points = leaves(*draw(SHAPE, torch.float32, device))
        output = function(*points)
        return [output, *torch.autograd.grad(output, points, gradient)]

    agree(run(fast), run(call))
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("backend", ["tiled", "sorted"])
def test_a_step_of_training_under_autocast_with_scaled_losses(backend, dtype, device):
    torch.manual_seed(0)
    layer = sortattn.KernelAttention(32, 4, kernel="add_laplace").to(device)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device)
    inputs = torch.randn(2, 50, 32, device=device)
    before = [part.detach().clone() for part in layer.parameters()]
    with torch.autocast(device, dtype):
        loss = layer(inputs).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimiser)
    scaler.update()
    assert all(part.isfinite().all() for part in layer.parameters())
    assert any(not torch.equal(part, old) for part, old in zip(layer.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump", "laplace", "riesz", "spline", "matern52"])
def test_tiled_sums_have_the_same_bits_every_time(name, device):
    points, gradient = leaves(*draw(SHAPE, torch.float32, device)), cotangent(SHAPE, torch.float32, device)
    first = attend(name, "tiled", points, gradient)
    for _ in range(3):
        assert all(
            torch.equal(one, other) for one, other in zip(attend(name, "tiled", points, gradient), first, strict=True)
        )


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_repeated_calls_of_threads_streams_and_graphs_disturb_none_of_them(name, backward, device):
    # kernels of short sequences, blocks that look through their inputs by themselves, and a launch that does it before
    shapes = [Shape((1, 3), rows, rows, 64, 64) for rows in (60, 128, 320)]
    given = [leaves(*draw(shape, torch.float32, device, seed=seed)) for shape in shapes for seed in range(4)]
    gradients = [cotangent(shape, torch.float32, device) if backward else None for shape in shapes for _ in range(4)]
    with torch.set_grad_enabled(backward):
        wanted = [attend(name, "tiled", *pair) for pair in zip(given, gradients, strict=True)]
    # without the nodes of the leaves, which belong to this stream and would be captured with it
    wanted = [[part.detach() for part in results] for results in wanted]
    captured, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.set_grad_enabled(backward), torch.cuda.graph(graph, stream=captured):
        played = [attend(name, "tiled", *pair) for pair in zip(given, gradients, strict=True)]
    differing = []

    def work(first: int) -> None:
        with torch.set_grad_enabled(backward), torch.cuda.stream(torch.cuda.Stream()):
            for i in range(first, first + 10 * len(given)):
                at = i % len(given)
                results = attend(name, "tiled", given[at], gradients[at])
                if not all(map(torch.equal, results, wanted[at])):
                    differing.append(at)
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(3 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        with torch.cuda.stream(captured):
            graph.replay()
    for thread in threads:
        thread.join()
    captured.synchronize()
    assert not differing
    for results, right in zip(played, wanted, strict=True):
        assert all(map(torch.equal, results, right))


@pytest.mark.parametrize("dims", [64, 100])
@pytest.mark.parametrize("size", [1.0, 30.0, 100.0, 1e-30, 1e25], ids="outlier{:g}".format)
@pytest.mark.parametrize("name", ["add_riesz", "laplace", "add_laplace"])
def test_outliers_leave_the_other_points_their_digits(name, size, dims, device):
    # distances are summed as integers where these have digits enough; one point far out leaves too few
    query, key, value = draw(Shape((2,), 70, 130, dims, 8), torch.float32, device)
    if size < 1 or size > 1e20:
        query, key = query * size, key * size
        bandwidth = CASES[name].bandwidth(dims) * size
    else:
        query[0, 0, 1] = key[0, 5, 2] = size
        bandwidth = CASES[name].bandwidth(dims)
    actual = sortattn.kernel_attention(query, key, value, name, bandwidth=bandwidth, backend="tiled")
    wanted = sortattn.kernel_attention(
        query.double(), key.double(), value.double(), name, bandwidth=bandwidth, backend="reference"
    )
    assert_close(actual, wanted, FORWARD[torch.float32])


@pytest.mark.parametrize("name", ["add_laplace", "add_bump", "matern52"])
def test_rows_of_hardly_any_weight_keep_their_digits(name, device):
    # products on tensor cores are of halves, whose exponents are small: rows are scaled one by one
    query, key, value = draw(Shape((2,), 70, 130, 40, 8), torch.float32, device)
    # far out in all dimensions but one, where few keys are near
    query[:, 3] = 12.0
    query[:, 3, 0] = key[:, 7, 0] + 1.0
    value[:, :64] *= 1e-3
    bandwidth = CASES[name].bandwidth(40)
    actual = sortattn.kernel_attention(query, key, value, CASES[name].kernel, bandwidth=bandwidth, backend="tiled")
    inputs = (part.double() for part in (query, key, value))
    wanted = sortattn.kernel_attention(*inputs, CASES[name].kernel, bandwidth=bandwidth, backend="reference")
    assert_close(actual, wanted, FORWARD[torch.float32])
    assert_close(actual[:, 3], wanted[:, 3], FORWARD[torch.float32])


@pytest.fixture
def wound(monkeypatch):
    """Winds lines of a thousand points too; notes how, forward and, in the second list, backward."""
    monkeypatch.setattr(cuda_coil, "_LEAST", 1024)
    monkeypatch.setattr(cuda_reel, "_LEAST", 1024)
    noted, wind = ([], []), cuda_coil.wind

    def note(*given, slopes=False):
        windings = wind(*given, slopes=slopes)
        # not those of a rehearsal
        if not windings.is_meta:
            noted[slopes].append(windings.view(torch.int32)[..., 3].bool())
        return windings

    monkeypatch.setattr(cuda_coil, "wind", note)
    return noted


@pytest.mark.parametrize("channels", [64, 20])
@pytest.mark.parametrize("kind", ["normal", "shifted", "ties", "some lines too long"])
def test_wound_lines_match_the_definition(kind, channels, device, wound):
    """Several lines for every multiprocessor, with masked keys, in blocks of several warps."""
    query, key, value = draw(Shape((2, 3), 3000, 2500, 64, channels), torch.float32, device)
    if kind == "shifted":
        query, key = query + 100, key + 100
    if kind == "ties":
        query, key = (query * 4).round() / 4, (key * 4).round() / 4
    if kind == "some lines too long":
        query[..., ::2], key[..., ::2] = query[..., ::2] * 10, key[..., ::2] * 10
    mask = torch.arange(2500, device=device)[None].expand(2, -1) % 7 != 0
    output = sortattn.kernel_attention(query, key, value, "add_bump", key_mask=mask, backend="sorted")
    wide = (part.double() for part in (query, key, value))
    expected = sortattn.kernel_attention(*wide, "add_bump", key_mask=mask, backend="reference")
    assert_close(output, expected, FORWARD[torch.float32])
    if not torch.are_deterministic_algorithms_enabled():
        lines = torch.cat(wound[False])
        assert lines.any()
        assert lines.all() == (kind != "some lines too long")


@pytest.mark.parametrize("channels", [64, 20])
@pytest.mark.parametrize("kind", ["normal", "shifted", "same", "some lines too long", "along their lines"])
def test_gradients_around_wound_lines_match_the_definition(kind, channels, device, wound, monkeypatch):
    """Differences of points are exact, as the definition rounds them before it compares them with a node."""
    query, key, value = draw(Shape((3,), 1500, 1200, 64, channels), torch.float32, device)
    query, key = ((part * 2**18).round() / 2**18 for part in (query, key))
    if kind == "shifted":
        query, key = (((part + 8) * 2**18).round() / 2**18 for part in (query, key))
    if kind == "same":
        query[..., :30, :], query[..., 30:60, :] = key[..., :30, :], key[..., :30, :] + 1.5
    if kind == "some lines too long":
        query[..., ::2], key[..., ::2] = query[..., ::2] * 8, key[..., ::2] * 8
    if kind == "along their lines":
        monkeypatch.setattr(cuda, "_stands_along", lambda *sizes: True)
    mask = torch.arange(1200, device=device)[None].expand(3, -1) % 7 != 0

    def gradients(backend, dtype):
        leaves = [part.to(dtype).requires_grad_() for part in (query, key, value)]
        output = sortattn.kernel_attention(*leaves, "add_bump", key_mask=mask, backend=backend)
        weights = torch.linspace(-1e3, 1e3, output.numel(), dtype=torch.float64, device=device).sin()
        return torch.autograd.grad((output * weights.reshape(output.shape).to(dtype)).sum(), leaves)

    for got, wanted in zip(gradients("sorted", torch.float32), gradients("reference", torch.float64), strict=True):
        assert (got - wanted).norm() <= 3e-6 * wanted.norm()
    if not torch.are_deterministic_algorithms_enabled():
        lines = torch.cat(wound[True])
        assert lines.any()
        assert lines.all() == (kind != "some lines too long")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_sorted_sums_take_no_more_memory_than_their_inputs(name, backward, device):
    # beside inputs, output and gradients; what is less than 512 MiB is always to be had
    points = [torch.randn(48, 16_384, 64, device=device, requires_grad=backward) for _ in range(3)]
    gradient = torch.randn_like(points[2]) if backward else None
    attend(name, "sorted", points, gradient)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = attend(name, "sorted", points, gradient)
    inputs, outputs = (sum(part.numel() * part.element_size() for part in parts) for parts in (points, results))
    beside = torch.cuda.max_memory_allocated() - before - outputs
    assert beside <= inputs, f"{beside >> 20} MiB beside inputs of {inputs >> 20} MiB"


MANY = {"tiled": Shape(((1 << 19) + 1,), 64, 64, 64, 64), "sorted": Shape((129,), 1 << 18, 1 << 18, 64, 64)}


@pytest.mark.slow
@pytest.mark.parametrize("backend", MANY)
def test_tensors_of_more_than_two_to_the_31_numbers(backend, device):
    shape = MANY[backend]
    free, _ = torch.cuda.mem_get_info()
    if free < 90 << 30:
        pytest.skip("needs 90 GiB of free memory on the device")
    torch.manual_seed(0)
    query, key, value = (torch.randn(*shape.leading, shape.rows, 64, device=device) for _ in range(3))
    assert query.numel() > 1 << 31
    output = sortattn.kernel_attention(query, key, value, "add_laplace", backend=backend)
    for head in (0, shape.leading[0] // 2, shape.leading[0] - 1):
        alone = sortattn.kernel_attention(query[head], key[head], value[head], "add_laplace", backend=backend)
        assert_close(output[head], alone, FORWARD[torch.float32])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_a_million_queries_and_keys(name, device):
    check_some_queries(name, 1 << 20, 0.0, device, bound=5e-6)


@pytest.mark.parametrize("nodes", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_products_of_the_grid_are_right_for_every_number_of_nodes(dtype, nodes, device):
    """Blocks that divide everything, which the interpreter of the other tests is too slow for."""
    points = [part.to(device) for part in draw(Shape((2,), 2048, 2048, 64, 64), dtype)]
    found = sortattn.kernel_attention(*points, "add_riesz", backend=f"grid:{nodes}")
    wanted = sortattn.kernel_attention(*(part.double() for part in points), "add_riesz", backend="reference")
    assert_close(found, wanted, {16: 1e-2, 32: 4e-3, 64: 2e-3}[nodes] + FORWARD[dtype])
