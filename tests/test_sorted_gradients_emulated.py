"""Gradients by the sorted backend's CUDA kernels, run on the CPU by an emulator, against the definition."""

import pytest
import torch

import sortattn
from sortattn.cuda import launch
from sortattn.ops.sorted import cuda_chain, cuda_trade, cuda_walk, room

from .cases import CASES
from .emulation.emulator import AVAILABLE, listing
from .emulation.walks import KERNELS, emulate, outcome, points

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="the emulator is compiled with g++ on Linux"),
    pytest.mark.usefixtures("cpu_only"),
]


@pytest.fixture
def emulated(monkeypatch):
    """Sends sorted calls on CPU tensors through the code for GPUs."""
    return emulate(monkeypatch)


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "one sided", "apart", "alike"])
@pytest.mark.parametrize(
    ("name", "way"),
    [("add_riesz", "chain"), ("add_riesz", "mutual"), ("add_laplace", "mutual"), ("add_bump", "trade")],
)
def test_one_walk_has_all_gradients(name, way, kind, emulated, monkeypatch):
    """With masked keys; points of both kinds among each other, equal, at zero, one kind behind the other, all alike."""
    entries = []
    monkeypatch.setattr(launch, "Kernel", listing(entries))
    monkeypatch.setattr(cuda_walk, "_SHORT", 32)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    if way == "mutual":
        monkeypatch.setattr(cuda_chain, "serves", lambda walk: False)
    query, key, value = points(kind, 2, 330, 400, 2, 50)
    if kind == "zeros":
        query, key = query.relu(), key.relu()
    if kind == "one sided":
        query, key = query.abs() + 0.1, key.abs() + 0.1
    if kind == "apart":
        query, key = query.abs() + 5, key.abs()
    if kind == "alike":
        query[..., 0], key[..., 0] = 0.5, 0.5
    mask = torch.rand(2, 400, generator=torch.Generator().manual_seed(4)) < 0.7

    def outcome(backend, dtype):
        leaves = [part.to(dtype).requires_grad_() for part in (query, key, value)]
        rows = sortattn.kernel_attention(*leaves, name, key_mask=mask, backend=backend)
        weights = torch.linspace(-1, 1, rows.numel(), dtype=torch.float64).reshape(rows.shape).mul(1e3).sin().to(dtype)
        return torch.autograd.grad((rows * weights).sum(), leaves)

    for got, wanted in zip(outcome("sorted", torch.float32), outcome("reference", torch.float64), strict=True):
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()
    assert {"chain", "mutual", "trade"} & set(entries) == {way}
    assert entries.count("walk") <= 1


SPLINES = {
    "hat": sortattn.Spline([-1.0, 0.0, 1.0], [0.0, 1.0, -1.0, 0.0]),
    "lopsided": sortattn.Spline([-1.0, 0.0, 1.0, 2.0], [0.0, 1.0, -1.5, 0.5, 0.0]),
    "many": sortattn.Spline(range(-3, 4), [0.0, 1.0, 0.5, -2.0, 1.5, -0.5, -0.5, 0.0]),
}


@pytest.mark.parametrize("kind", ["narrow", "clusters", "many queries", "few ties", "positive"])
@pytest.mark.parametrize("name", SPLINES)
def test_gradients_of_splines_have_their_digits_where_windows_are_small(name, kind, emulated, monkeypatch):
    """Windows of few keys, gaps wider than a window, more queries than a batch takes between two keys, many alike."""
    entries = []
    monkeypatch.setattr(launch, "Kernel", listing(entries))
    monkeypatch.setattr(cuda_walk, "_SHORT", 96)
    monkeypatch.setattr(cuda_trade, "LEG", 32)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    query, key, value = points(kind, 1, *((1500, 20) if kind == "many queries" else (280, 330)), 1, 40)
    if kind == "clusters":
        key[:, :30], query[:, ::7] = key[:, :30] * 0.3 + 20, query[:, ::7] * 0.3 + 20
    if kind == "positive":
        value += 3
    given, bandwidth = (query, key, value), 0.02 if kind == "narrow" else 0.5
    expected = outcome(SPLINES[name], given, "reference", torch.float64, bandwidth)
    found = outcome(SPLINES[name], given, "sorted", torch.float32, bandwidth)
    # of the queries, keys and values
    for got, wanted, error in zip(found[1:], expected[1:], (1e-6, 1e-6, 1e-5), strict=True):
        assert (got - wanted).norm() <= error * wanted.norm()
    assert {"trade", "settle", "bridge"} <= set(entries)
    assert entries.count("walk") == 1


@pytest.mark.parametrize("name", ["add_riesz", "add_bump"])
def test_inputs_of_16_bits_have_gradients_in_their_own_type(name, emulated):
    given = [part.bfloat16() for part in points("normal", 2, 40, 50, 2, 5)]

    def outcome(backend, dtype):
        leaves = [part.to(dtype).requires_grad_() for part in given]
        rows = sortattn.kernel_attention(*leaves, name, backend=backend)
        return [rows.detach(), *torch.autograd.grad(rows.square().sum(), leaves)]

    for got, wanted in zip(outcome("sorted", torch.bfloat16), outcome("reference", torch.float64), strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - wanted).norm() <= 8e-3 * wanted.norm()


@pytest.mark.parametrize("name", ["add_laplace", "matern32", "matern52"])
def test_a_wide_bandwidth_costs_no_digits_of_a_slope(name, emulated, monkeypatch):
    # close to zero p' - p is a small difference of the two
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    given = points("normal", 1, 40, 300, 2, 8)
    kernel = CASES[name].kernel
    expected = outcome(kernel, given, "reference", torch.float64, bandwidth=1000.0)
    for got, wanted in zip(outcome(kernel, given, "sorted", torch.float32, 1000.0), expected, strict=True):
        assert (got - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("kind", ["normal", "ties", "few ties", "same"])
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_gradients_are_made_along_lines_where_the_cache_is_small(name, kind, emulated, monkeypatch):
    """And put to their places afterwards; by whole tracks and by runs of them."""
    entries = []
    monkeypatch.setattr(launch, "Kernel", listing(entries))
    monkeypatch.setattr(room, "device", lambda device: room.Device(1, 1, 227 << 10))
    monkeypatch.setattr(cuda_walk, "_SHORT", 32)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    for shape in ((1, 150, 600, 1, 64), (2, 90, 70, 3, 40)):
        given = points(kind, *shape)
        expected = outcome(KERNELS[name], given, "reference", torch.float64)
        for got, wanted in zip(outcome(KERNELS[name], given, "sorted", torch.float32), expected, strict=True):
            assert (got - wanted).norm() < 1e-5 * wanted.norm()
    assert {"deliver", "settle"} <= set(entries)
