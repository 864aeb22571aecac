"""Calls like one before, whose launches are known, on the CPU with the kernels of the tiled backend emulated."""

import dataclasses
import gc
import threading
import weakref

import pytest
import torch

import sortattn
from sortattn.ops import repeated
from sortattn.ops.direct import eager
from sortattn.ops.tiled import cuda, ordinary

from .cases import assert_close
from .definition import FORWARD, GRADIENT
from .emulation import walks
from .emulation.device import emulate
from .emulation.emulator import AVAILABLE

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")


@pytest.fixture
def long_ways(cpu_only, monkeypatch):
    """How many calls have been looked at afresh, on a CPU that takes the way of CUDA devices."""
    emulate(monkeypatch)
    counted, honest = [], ordinary.problem

    def problem(*arguments):
        counted.append(arguments)
        return honest(*arguments)

    monkeypatch.setattr(ordinary, "problem", problem)
    return counted


def draw(rows=20, columns=30, dims=8, channels=8, dtype=torch.float32):
    return [torch.randn(1, 2, *shape, dtype=dtype) for shape in ((rows, dims), (columns, dims), (columns, channels))]


def attention(points, kernel="add_laplace", **options):
    return sortattn.kernel_attention(*points, kernel, backend="tiled", **options)


@pytest.mark.parametrize(
    ("sizes", "kernel"),
    [
        ((20, 30, 8, 8), "add_laplace"),
        ((20, 30, 8, 5), "add_bump"),
        # too long for the kernels of short sequences, and for blocks that look through their inputs by themselves
        ((100, 120, 8, 8), "add_riesz"),
        ((100, 170, 8, 5), "add_laplace"),
        ((100, 170, 8, 5), "laplace"),
    ],
)
def test_a_second_call_takes_the_short_way_to_the_definition(sizes, kernel, long_ways):
    for bandwidth in (None, 1.7):
        attention(draw(*sizes), kernel, bandwidth=bandwidth)
        before, points = len(long_ways), draw(*sizes)
        rows = attention(points, kernel, bandwidth=bandwidth)
        assert len(long_ways) == before
        wanted = sortattn.kernel_attention(
            *(part.double() for part in points), kernel, bandwidth=bandwidth, backend="reference"
        )
        assert_close(rows, wanted, FORWARD[torch.float32])
        assert rows.shape == wanted.shape


@pytest.mark.parametrize(("rows", "kernel"), [(30, "add_bump"), (100, "add_laplace"), (100, "laplace")])
def test_a_second_call_with_gradients_takes_the_short_way_to_theirs(rows, kernel, long_ways):
    gradients = []
    for dtype, backend in ((torch.float32, "tiled"), (torch.float32, "tiled"), (torch.float64, "reference")):
        torch.manual_seed(1)
        points = [part.to(dtype).requires_grad_() for part in draw(rows)]
        before = len(long_ways)
        output = sortattn.kernel_attention(*points, kernel, backend=backend)
        looks = len(long_ways) - before
        with torch.no_grad():
            # which is not what the backward pass takes for the rows
            output.mul_(2)
        gradients.append(torch.autograd.grad(output.square().sum(), points))
        if backend == "tiled":
            assert looks == (len(gradients) == 1)
    first, second, wanted = gradients
    for one, other, right in zip(first, second, wanted, strict=True):
        assert torch.equal(one, other)
        assert_close(one, right, GRADIENT[torch.float32])


def test_a_second_call_in_float64_takes_the_short_way_to_the_definition(long_ways):
    attention(draw(100, 170, dtype=torch.float64))
    before, points = len(long_ways), draw(100, 170, dtype=torch.float64)
    rows = attention(points)
    assert len(long_ways) == before
    assert_close(rows, sortattn.kernel_attention(*points, backend="reference"), FORWARD[torch.float64])


def test_16_bits_take_the_short_way_if_they_are_not_cast(long_ways):
    for dtype in (torch.float16, torch.bfloat16):
        for rows, looks in ((30, 1), (100, 2)):
            points, before = draw(rows, dtype=dtype), len(long_ways)
            first, second = attention(points), attention(points)
            assert torch.equal(first, second)
            assert len(long_ways) == before + looks


def test_only_a_call_like_the_one_before_takes_the_short_way(long_ways):
    points = draw()
    query, key, value = points
    attention(points, bandwidth=1.0)
    differing = (
        lambda: attention(points),
        lambda: attention(points, bandwidth=2.0),
        lambda: attention(points, bandwidth=1),
        lambda: attention(points, "add_bump", bandwidth=1.0),
        lambda: attention(points, is_causal=True, bandwidth=1.0),
        lambda: attention((query[..., :10, :], key, value), bandwidth=1.0),
        lambda: attention((query, key, value[..., :5]), bandwidth=1.0),
        lambda: attention([part.double() for part in points], bandwidth=1.0),
        # tensors that lie differently, or ask for a gradient
        lambda: attention((query.mT.contiguous().mT, key, value), bandwidth=1.0),
        lambda: attention((query, key, value.clone().requires_grad_()), bandwidth=1.0),
        lambda: attention((query, key, torch.nn.Parameter(value)), bandwidth=1.0),
    )
    for call in differing:
        before = len(long_ways)
        call()
        assert len(long_ways) == before + 1
    before = len(long_ways)
    attention(points, bandwidth=1.0)
    assert len(long_ways) == before


def test_what_the_checks_refuse_is_refused_after_a_call_that_is_equal_to_it(long_ways):
    points = draw()
    attention(points, bandwidth=1.0)
    with pytest.raises(TypeError, match="bandwidth"):
        attention(points, bandwidth=True)
    with pytest.raises(TypeError, match="query"):
        attention(([1.0], *points[1:]), bandwidth=1.0)
    with pytest.raises(ValueError, match="unknown backend"):
        sortattn.kernel_attention(*points, backend="tile", bandwidth=1.0)


def test_flags_and_bandwidths_that_are_none_are_refused_on_both_ways(long_ways):
    points = draw()
    for _ in range(2):
        attention(points, is_causal=True, bandwidth=1.0)
        with pytest.raises(TypeError, match="is_causal"):
            attention(points, is_causal=1, bandwidth=1.0)
        with pytest.raises(ValueError, match="bandwidth"):
            attention(points, bandwidth=float("inf"))


def test_a_kernel_that_cannot_be_looked_up_is_served(long_ways):
    @dataclasses.dataclass
    class Mine(type(sortattn.KERNELS["add_laplace"])):
        pass

    points = draw()
    known = len(repeated._known.launches)
    wide = (part.double() for part in points)
    wanted = sortattn.kernel_attention(*wide, "add_laplace", bandwidth=0.7, backend="reference")
    assert_close(attention(points, Mine(), bandwidth=0.7), wanted, FORWARD[torch.float32])
    # nor do kernels of users take the place of others
    assert len(repeated._known.launches) == known


@pytest.mark.parametrize("named", [False, True], ids=["object", "name"])
def test_a_default_bandwidth_that_changes_is_no_constant(named, long_ways, monkeypatch):
    kernel, points = sortattn.KERNELS["add_laplace"], draw()
    before = attention(points, kernel.name if named else kernel)
    monkeypatch.setattr(kernel, "bandwidth", 7.0)
    after = attention(points, kernel.name if named else kernel)
    assert not torch.equal(before, after)
    assert torch.equal(after, attention(points, kernel, bandwidth=7.0))


def test_a_call_that_is_traced_is_no_ordinary_one(long_ways):
    seen = []

    def call(x):
        seen.append(eager())
        return x * 2

    torch.jit.trace(call, torch.zeros(3), check_trace=False)
    assert seen == [False]
    assert eager()


def test_autocast_and_maps_take_the_long_way(long_ways, monkeypatch):
    points = draw()
    attention(points)
    before = len(long_ways)
    mapped = torch.vmap(lambda *parts: attention(parts))(*(part[None] for part in points))
    assert_close(mapped[0], attention(points).double(), FORWARD[torch.float32])
    assert len(long_ways) > before
    before = len(long_ways)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    attention(points)
    assert len(long_ways) == before + 1


def test_changed_precision_and_chosen_backends_are_looked_at_afresh(long_ways):
    points = draw()
    attention(points)
    attention(points)
    before = len(long_ways)
    sortattn.set_precision("rounding")
    try:
        attention(points)
    finally:
        sortattn.set_precision("exact")
    assert len(long_ways) == before + 1


def test_launches_belong_to_a_thread(long_ways):
    points = draw()
    wanted = attention(points)
    before, found = len(long_ways), []
    threads = [threading.Thread(target=lambda: found.append(attention(points))) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len(long_ways) == before + 2
    assert all(torch.equal(rows, wanted) for rows in found)


def test_a_thread_remembers_so_many_calls_and_no_more(long_ways, monkeypatch):
    monkeypatch.setattr(repeated, "_MOST", 3)
    for rows in (5, 6, 7, 8, 9):
        attention(draw(rows))
        assert 0 < len(repeated._known.launches) <= 3


@pytest.mark.parametrize("rows", [30, 170])
def test_a_thread_keeps_no_tensors_of_its_calls(rows, long_ways):
    for learning in (False, True):
        points = [part.requires_grad_(learning) for part in draw(rows)]
        output = attention(points)
        again = attention(points)
        kept = [weakref.ref(part) for part in (*points, output, again)]
        del points, output, again
        long_ways.clear()
        gc.collect()
        assert not any(ref() is not None for ref in kept)


def test_a_call_on_another_device_than_the_current_one_takes_the_long_way(long_ways, monkeypatch):
    points = draw()
    attention(points)
    monkeypatch.setattr(repeated, "stream_on", lambda device: None)
    before = len(long_ways)
    attention(points)
    assert len(long_ways) == before + 1


def test_calls_without_numbers_are_not_kept(long_ways, monkeypatch):
    monkeypatch.setattr(cuda, "prepared", None)
    for sizes in ((0, 30, 8, 8), (20, 0, 8, 8), (20, 30, 8, 0)):
        for _ in range(2):
            attention(draw(*sizes))


@pytest.fixture
def long_sorts(cpu_only, monkeypatch):
    """How many sorted calls have been looked at afresh, on a CPU that takes the way of CUDA devices."""
    walks.emulate(monkeypatch)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    counted, honest = [], sortattn.attention.make_problem

    def make_problem(*arguments, **options):
        counted.append(arguments)
        return honest(*arguments, **options)

    monkeypatch.setattr(sortattn.attention, "make_problem", make_problem)
    return counted


@pytest.mark.parametrize("kernel", ["add_riesz", "add_laplace", "add_bump"])
def test_a_second_sorted_call_takes_the_short_way_to_the_definition(kernel, long_sorts):
    for bandwidth in (None, 1.7):
        sortattn.kernel_attention(*draw(), kernel, bandwidth=bandwidth, backend="sorted")
        before, points = len(long_sorts), draw()
        rows = sortattn.kernel_attention(*points, kernel, bandwidth=bandwidth, backend="sorted")
        assert len(long_sorts) == before
        wide = (part.double() for part in points)
        wanted = sortattn.kernel_attention(*wide, kernel, bandwidth=bandwidth, backend="reference")
        assert_close(rows, wanted, FORWARD[torch.float32])
        assert rows.shape == wanted.shape


def test_a_head_that_is_no_number_stays_alone_in_a_second_sorted_call(long_sorts):
    points = draw()
    fine = sortattn.kernel_attention(*points, "add_riesz", backend="sorted")
    for part in range(3):
        spoilt = [one.clone() for one in points]
        spoilt[part][0, 1, 3, 2] = float("inf")
        rows = sortattn.kernel_attention(*spoilt, "add_riesz", backend="sorted")
        assert rows[0, 1].isnan().all()
        assert_close(rows[0, 0], fine[0, 0].double(), FORWARD[torch.float32])


def test_sorted_calls_that_are_not_alike_take_the_long_way(long_sorts, monkeypatch):
    points = draw()

    def looks(*given, **options):
        before = len(long_sorts)
        for _ in range(2):
            sortattn.kernel_attention(*given, "add_bump", backend="sorted", **options)
        return len(long_sorts) - before

    assert looks(*points) == 1
    assert looks(*points, key_mask=torch.ones(1, 30, dtype=torch.bool)) == 2
    assert looks(*points, bandwidth=torch.tensor([1.0, 2.0])) == 2
    assert looks(*(part.double() for part in points)) == 2
    assert looks(points[0], points[1][:, :1], points[2][:, :1]) == 2
    assert looks(*(part.transpose(-1, -2).contiguous().transpose(-1, -2) for part in points)) == 2
    assert looks(*(part.clone().requires_grad_() for part in points)) == 2
    assert looks(*points) == 0
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert looks(*points) == 2
