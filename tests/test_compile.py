"""`torch.compile(fullgraph=True)` with lengths that change: no graph break, no recompilation, right gradients."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

import sortattn
from sortattn.cuda import support

from .cases import CASES, Shape, assert_close, cotangent, draw, leaves, refusal
from .definition import FORWARD, GRADIENT

# lengths with several tiles and blocks, and with less than one
LENGTHS = ((30, 40), (57, 91), (300, 310), (41, 25))
CALLS = [
    ("add_riesz", "sorted"), ("add_bump", "sorted"), ("matern32", "sorted"), ("laplace", "tiled"), ("spline", "tiled"),
    ("gauss", "tiled"), ("softmax", "reference"), ("elu", "linear"), ("add_laplace", "grid"), ("spline", "grid"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function, backend: str = "aot_eager"):
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


def no_more_graphs():
    """From here on, compiling anything is an error."""
    return torch.compiler.set_stance("fail_on_recompile")


def run(function, shape: Shape, device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    points = leaves(*draw(shape, dtype, device))
    output = function(*points)
    return [output.detach(), *torch.autograd.grad(output, points, cotangent(shape, dtype, device))]


def agree(one: list[torch.Tensor], other: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
    for i, (first, second) in enumerate(zip(one, other, strict=True)):
        assert_close(first, second, GRADIENT[dtype] if i else FORWARD[dtype])


@pytest.mark.parametrize(("name", "backend"), CALLS, ids=["-".join(call) for call in CALLS])
def test_one_graph_serves_all_lengths(name, backend, device):
    case = CASES[name]
    if refusal(backend, case, device):
        return

    def call(query, key, value):
        return sortattn.kernel_attention(query, key, value, case.kernel, bandwidth=2.0, backend=backend) * 2

    fast = compiled(call)
    shapes = [Shape((2, 2), rows, columns, 3, 4) for rows, columns in LENGTHS]
    agree(run(fast, shapes[0], device), run(call, shapes[0], device))
    with no_more_graphs():
        for shape in shapes[1:]:
            agree(run(fast, shape, device), run(call, shape, device))
    assert not counters["graph_break"]


@pytest.mark.parametrize(
    ("name", "backend", "kv_heads"),
    [("add_laplace", "tiled", 2), ("add_bump", "sorted", 2), ("softmax", "reference", 2), ("elu", "linear", 4)],
)
def test_causal_masked_and_grouped_calls_compile(name, backend, kv_heads, device):
    def call(query, key, value, mask):
        options = {"is_causal": True, "enable_gqa": kv_heads != 4, "backend": backend}
        return sortattn.kernel_attention(query, key, value, name, key_mask=mask, **options)

    fast = compiled(call)

    def compare(length):
        query, key, value = draw(Shape((2, 4), length, length, 3, 4), torch.float32, device)
        key, value = key[:, :kv_heads].contiguous(), value[:, :kv_heads].contiguous()
        mask = (torch.rand(2, length, generator=torch.Generator().manual_seed(0)) < 0.7).to(device)
        assert_close(fast(query, key, value, mask), call(query, key, value, mask), FORWARD[torch.float32])

    # one chunk of the linear backend is a graph of its own
    compare(150)
    with no_more_graphs():
        compare(170)
        compare(300)


@pytest.mark.parametrize("backend", ["tiled", "sorted"])
def test_learned_bandwidths_and_coefficients_compile(backend, device):
    if refusal(backend, CASES["spline"], device):
        return
    inputs = draw(Shape((2, 2), 30, 40, 3, 4), torch.float32, device)

    def call(bandwidth, slopes):
        kernel = sortattn.PolynomialExponential(slopes)
        return sortattn.kernel_attention(*inputs, kernel, bandwidth=bandwidth, backend=backend).square().sum()

    fast = compiled(call)
    results = []
    for function in (call, fast):
        numbers = leaves(torch.tensor([0.7, 1.3], device=device), torch.tensor([1.0, 0.5]))
        results.append(torch.autograd.grad(function(*numbers), numbers))
    for one, other in zip(*results, strict=True):
        assert_close(one, other, GRADIENT[torch.float32])


def test_auto_compiles_without_a_graph_break(device):
    def call(query, key, value):
        return sortattn.kernel_attention(query, key, value, "add_laplace")

    fast = compiled(call)
    for rows, columns in LENGTHS:
        shape = Shape((2, 2), rows, columns, 3, 4)
        agree(run(fast, shape, device), run(call, shape, device))
    assert not counters["graph_break"]


def test_the_module_compiles(device):
    module = sortattn.KernelAttention(8, 2, kernel="add_bump", learn_bandwidth=True, backend="tiled").to(device)
    fast = compiled(module)

    def compare(length):
        rows = torch.randn(2, length, 8, device=device)
        assert_close(fast(rows), module(rows), FORWARD[torch.float32])

    compare(20)
    with no_more_graphs():
        compare(33)
        compare(70)


def test_sums_compile(device):
    if device != "cpu":
        return

    def call(query, key, value, weight):
        signs = sortattn.weighted_sign_sum(query, key, value, weight, backend="sorted")
        return torch.cat([signs, sortattn.weighted_abs_sum(query, key, value, backend="sorted")], -1)

    fast = compiled(call)

    def compare(rows, columns):
        shape = Shape((2,), rows, columns, 3, 4)
        inputs = (*draw(shape, torch.float32), cotangent(shape, torch.float32))
        assert_close(fast(*inputs), call(*inputs), FORWARD[torch.float32])

    compare(*LENGTHS[0])
    with no_more_graphs():
        compare(*LENGTHS[1])


def test_errors_of_compiled_calls_are_the_same(device):
    def call(query, key, value):
        return sortattn.kernel_attention(query, key, value, "softmax", backend="sorted")

    with pytest.raises(Exception, match="cannot serve this call"):
        torch.compile(call, backend="eager")(*draw(Shape((2,), 3, 4, 2, 2), torch.float32, device))


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_only")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_compiles_forward_and_backward():
    def call(query, key, value):
        return sortattn.kernel_attention(query, key, value, "add_riesz", backend="sorted").relu()

    fast = compiled(call, "inductor")
    shapes = [Shape((2, 2), rows, columns, 3, 4) for rows, columns in LENGTHS[:2]]
    agree(run(fast, shapes[0], "cpu"), run(call, shapes[0], "cpu"))
    with no_more_graphs():
        agree(run(fast, shapes[1], "cpu"), run(call, shapes[1], "cpu"))


def test_whether_a_device_can_launch_kernels_is_a_constant_to_the_compiler(monkeypatch):
    # what finds that out looks for files, which the compiler cannot follow
    def look(device):
        with open(__file__) as file:
            return None if file.read() else "nothing there"

    monkeypatch.setattr(support, "_trouble", look)
    call = torch.compile(lambda x: x + (1.0 if support.trouble(0) is None else 2.0), fullgraph=True, backend="eager")
    assert call(torch.zeros(2)).tolist() == [1.0, 1.0]
