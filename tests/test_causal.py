"""Causal sums by sorting: how they are cut, and that every query sees each key before it once."""

from dataclasses import dataclass

import pytest
import torch

import sortattn
from sortattn.kernels import SidedKernel
from sortattn.ops import causal
from sortattn.ops.tiled.inputs import Inputs

from .cases import CASES, SIDED, Shape, assert_close, cotangent, draw, leaves
from .definition import FORWARD, GRADIENT, check, define

real_chunks = pytest.mark.real_chunks
every_sided = pytest.mark.parametrize("case", [CASES[name] for name in SIDED], ids=SIDED)
LENGTHS = [(1, 1), (1, 40), (40, 1), (16, 16), (17, 17), (33, 33), (50, 81), (81, 50), (128, 128)]


@dataclass(frozen=True)
class Counter:
    """Counts which keys the queries of parts see: tensors that hold their own indices tell."""

    seen: torch.Tensor

    def add(self, part: causal._Part, indices: torch.Tensor) -> None:
        queries, keys = part.of_queries(indices), part.of_keys(indices)
        for some, others in zip(queries.reshape(-1, part.size), keys.reshape(-1, part.size), strict=True):
            pairs = torch.ones(part.size, part.size, dtype=torch.long)
            self.seen[some[:, None], others] += pairs.tril() if part.masked else pairs


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100, 257])
def test_the_parts_of_a_call_hold_every_pair_once(length):
    points = torch.zeros(1, length, 1)
    cut = causal._Cut.of(Inputs(points, points, points, None, None, None, 1.0, "add_bump", True, 1, True, False))
    assert cut.room >= length
    indices = torch.arange(cut.room)[None, None]
    counter = Counter(torch.zeros(cut.room, cut.room, dtype=torch.long))
    for part in cut.parts():
        counter.add(part, indices)
    assert torch.equal(counter.seen, torch.ones_like(counter.seen).tril())


@pytest.mark.parametrize(("rows", "columns"), LENGTHS, ids=[f"M{m}-N{n}" for m, n in LENGTHS])
@every_sided
def test_output_and_gradients_match_the_definition_at_all_lengths(case, rows, columns, device):
    shape = Shape((2, 2), rows, columns, 3, 4)
    points, gradient = draw(shape, torch.float64, device), cotangent(shape, torch.float64, device)
    options = {"bandwidth": torch.tensor([0.7, 2.0], dtype=torch.float64, device=device), "is_causal": True}
    check(define(case, points, gradient, **options), case, points, gradient, backend="sorted", **options)


@every_sided
def test_masks_groups_and_kernel_sums(case, device):
    query, key, value = draw(Shape((2, 4), 70, 90, 3, 4), torch.float64, device)
    points = leaves(query, key[:, :2], value[:, :2])
    mask = (torch.rand(2, 90, generator=torch.Generator().manual_seed(0)) < 0.6).to(device)
    mask[1, :50] = False
    results = []
    for backend in ("sorted", "reference"):
        options = {"key_mask": mask, "is_causal": True, "enable_gqa": True, "backend": backend}
        for function in (sortattn.kernel_attention, sortattn.kernel_sum):
            output = function(*points, case.kernel, bandwidth=1.5, **options)
            results.append([output.detach(), *torch.autograd.grad(output.square().sum(), points)])
    for one, other in zip(results[:2], results[2:], strict=True):
        assert_close(one[0], other[0], FORWARD[torch.float64])
        for part, wanted in zip(one[1:], other[1:], strict=True):
            assert_close(part, wanted, GRADIENT[torch.float64])


@pytest.mark.parametrize("kernel", ["spline", "polynomial_exponential"])
def test_coefficients_are_learned(kernel, device):
    points = draw(Shape((2,), 50, 61, 3, 4), torch.float64, device)
    results = []
    for backend in ("sorted", "tiled"):
        if kernel == "spline":
            numbers = leaves(torch.tensor([-0.25, 0.75, -0.5]), torch.tensor([0.5, 0.25]))
            made = sortattn.Spline([-1.0, 0.5], numbers[0], jumps=numbers[1], offset=1.0)
        else:
            numbers = leaves(torch.tensor([1.0, 0.5, 0.25]))
            made = sortattn.PolynomialExponential(numbers[0])
        output = sortattn.kernel_attention(*points, made, is_causal=True, backend=backend)
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), numbers)])
    assert_close(results[0][0], results[1][0], FORWARD[torch.float64])
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        # coefficients in float32
        assert_close(one, other.double(), GRADIENT[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_sixteen_bits_cost_no_more_than_rounding_the_output(name, dtype, device):
    points = draw(Shape((2, 3), 100, 100, 8, 8), dtype, device)
    exact = [part.double() for part in points]
    output = sortattn.kernel_attention(*points, name, is_causal=True, backend="sorted")
    assert output.dtype == dtype
    wanted = sortattn.kernel_attention(*exact, name, is_causal=True, backend="reference")
    assert_close(output, wanted, FORWARD[dtype])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_head(bad, device):
    query, key, value = draw(Shape((3,), 60, 60, 3, 4), torch.float32, device)
    for given in (query, key, value):
        given[1, 57, 0] = bad
        output = sortattn.kernel_attention(query, key, value, "add_laplace", is_causal=True, backend="sorted")
        given[1, 57, 0] = 1.0
        assert output[1].isnan().all()
        assert output[::2].isfinite().all()


@pytest.mark.parametrize("channels", [0, 1])
@every_sided
def test_no_channels_and_few(case, channels, device):
    points = leaves(*draw(Shape((2,), 50, 41, 3, channels), torch.float64, device))
    output = sortattn.kernel_attention(*points, case.kernel, is_causal=True, backend="sorted")
    exact = sortattn.kernel_attention(*points, case.kernel, is_causal=True, backend="reference")
    assert_close(output, exact, FORWARD[torch.float64])
    found, wanted = (torch.autograd.grad(part.square().sum(), points) for part in (output, exact))
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, GRADIENT[torch.float64])


def test_a_kernel_of_another_kind_is_refused_with_a_reason():
    class Mine(SidedKernel):
        name = "mine"

        def terms(self):
            return sortattn.KERNELS["add_bump"].terms()

    points = torch.randn(2, 20, 3)
    with pytest.raises(RuntimeError, match="kernels by name, Spline and PolynomialExponential, not mine"):
        sortattn.kernel_attention(points, points, points, Mine(), is_causal=True, backend="sorted")


@every_sided
def test_heads_by_rounds_have_the_same_results(case, device, monkeypatch):
    query, key, value = draw(Shape((4, 6), 50, 61, 3, 4), torch.float64, device)
    points = leaves(query, key[:, :3], value[:, :3])
    bandwidth = torch.linspace(0.5, 2.0, 6, dtype=torch.float64, device=device).requires_grad_()
    results = []
    for least in (causal._WORKSPACE, 0):
        monkeypatch.setattr(causal, "_WORKSPACE", least)
        monkeypatch.setattr(causal.room, "WORKSPACE", least)
        # twelve heads, or twenty-four where bandwidths tell those of a group apart
        for tau in (1.5, bandwidth):
            given = [*points, tau] if isinstance(tau, torch.Tensor) else points
            output = sortattn.kernel_attention(
                *points, case.kernel, bandwidth=tau, is_causal=True, enable_gqa=True, backend="sorted"
            )
            results.append([output.detach(), *torch.autograd.grad(output.square().sum(), given)])
    for one, other in zip(results[:2], results[2:], strict=True):
        for part, wanted in zip(one, other, strict=True):
            assert_close(part, wanted, FORWARD[torch.float64])


def test_rounds_take_heads_in_equal_parts(monkeypatch):
    def rounds(heads: int, backward: bool) -> list[int]:
        points = torch.zeros(1, 1, 1).expand(heads, 8192, 64)
        inputs = Inputs(points, points, points, None, None, None, 1.0, "add_bump", True, 1, True, False)
        return [some.stop - some.start for some in causal._rounds(inputs, backward)]

    # of 6 MB each
    assert rounds(4, False) == [4]
    assert rounds(16, False) == [8, 8]
    assert rounds(16, True) == [4, 4, 4, 4]
    assert rounds(0, False) == [0]


def test_later_keys_change_nothing(device):
    query, key, value = draw(Shape((2,), 100, 100, 3, 4), torch.float64, device)
    before = sortattn.kernel_attention(query, key, value, "add_bump", is_causal=True, backend="sorted")
    key[:, 60:], value[:, 60:] = 5.0, -7.0
    after = sortattn.kernel_attention(query, key, value, "add_bump", is_causal=True, backend="sorted")
    assert_close(after[:, :60], before[:, :60], FORWARD[torch.float64])
    assert not torch.allclose(after[:, 60:], before[:, 60:])


@real_chunks
@pytest.mark.parametrize("shift", [0.0, 100.0], ids=["centred", "shifted_by_100"])
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_the_promise_holds_at_3000(name, shift, device):
    shape = Shape((2,), 3000, 3000, 16, 16)
    query, key, value = draw(shape, torch.float32, device)
    if name != "add_riesz":
        query, key = query + shift, key + shift
    points, gradient = leaves(query, key, value), cotangent(shape, torch.float32, device)
    exact = leaves(*(part.double() for part in points))
    results = []
    for given, backend in ((points, "sorted"), (exact, "tiled")):
        output = sortattn.kernel_attention(*given, name, is_causal=True, backend=backend)
        results.append([output.detach(), *torch.autograd.grad(output, given, gradient.to(output))])
    assert_close(results[0][0], results[1][0], FORWARD[torch.float32])
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        assert_close(one, other, GRADIENT[torch.float32])


@real_chunks
@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("name", ["add_riesz", "matern32"])
def test_one_thread_and_two_give_the_same_bits(name, threads):
    points = leaves(*draw(Shape((2,), 2500, 2500, 5, 7), torch.float32))
    results = []
    for count in (1, 2):
        threads(count)
        output = sortattn.kernel_attention(*points, CASES[name].kernel, is_causal=True, backend="sorted")
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), points)])
    assert all(map(torch.equal, *results))


@real_chunks
@pytest.mark.usefixtures("cpu_only")
def test_long_calls_are_cut_and_short_ones_are_one_chunk():
    def cut(length: int, kernel: str) -> causal._Cut:
        points = torch.zeros(1, 1, 1).expand(1, length, 1)
        return causal._Cut.of(Inputs(points, points, points, None, None, None, 1.0, kernel, True, 1, True, False))

    assert cut(2048, "add_bump").levels == 0
    assert cut(5000, "add_bump")[-2:] == (2, 1250)
    # whose pairs take longer
    assert cut(1000, "spline").levels == 2
