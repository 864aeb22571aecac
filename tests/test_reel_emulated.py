"""Gradients around wound lines, run on the CPU by an emulator, against the definition."""

import pytest
import torch

import sortattn
from sortattn.cuda import launch
from sortattn.ops.sorted import cuda_reel, cuda_sort, room

from .emulation.emulator import AVAILABLE, listing
from .emulation.walks import points, wind

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="the emulator is compiled with g++ on Linux"),
    pytest.mark.usefixtures("cpu_only"),
]

KERNELS = {
    "add_bump": sortattn.KERNELS["add_bump"],
    "hat": sortattn.Spline([-1.5, 0.0, 1.5], [0.0, 2.0, -2.0, 0.0]),
}


@pytest.fixture
def wound(monkeypatch):
    """The cells of the lines of backward passes."""
    return wind(monkeypatch, slopes=(True,))


def outcome(kernel, given, backend, dtype, **options):
    """The gradients of queries, keys and values."""
    leaves = [part.to(dtype).requires_grad_() for part in given]
    rows = sortattn.kernel_attention(*leaves, kernel, backend=backend, **options)
    weights = torch.linspace(-1, 1, rows.numel(), dtype=torch.float64).reshape(rows.shape).mul(1e3).sin().to(dtype)
    return torch.autograd.grad((rows * weights).sum(), leaves)


def check(kernel, given, tolerance=3e-6, bandwidth=1.25, **options):
    expected = outcome(kernel, given, "reference", torch.float64, bandwidth=bandwidth, **options)
    found = outcome(kernel, given, "sorted", torch.float32, bandwidth=bandwidth, **options)
    for got, wanted in zip(found, expected, strict=True):
        assert (got - wanted).norm() <= tolerance * wanted.norm()


# few; more items than the warps of a block have at a time; many queries between two keys; few of them
SHAPES = {
    "small": (2, 90, 70, 3, 5),
    "long": (1, 700, 900, 2, 64),
    "many": (1, 900, 130, 1, 20),
    "few": (1, 7, 600, 1, 64),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["normal", "shifted", "nearly ties"])
@pytest.mark.parametrize("name", KERNELS)
def test_gradients_around_wound_lines_match_the_definition(name, kind, shape, wound):
    given = points(kind, *SHAPES[shape])
    mask = torch.rand(SHAPES[shape][0], SHAPES[shape][2], generator=torch.Generator().manual_seed(4)) < 0.7
    check(KERNELS[name], given, key_mask=mask)
    assert all(wound)


@pytest.mark.parametrize("cells", [1, 2, 5, 8])
def test_any_number_of_cells_with_queries_beyond_them(cells, wound):
    query, key, value = points("normal", 1, 200, 300, 2, 8)
    high = 1.25 * cells - 0.01
    key = torch.linspace(0.01, high, 300)[None, torch.randperm(300), None].expand(1, 300, 2).contiguous()
    query = torch.linspace(0.02, high - 0.01, 200)[None, :, None].repeat(1, 1, 2)
    # these may see little, as few as are not in a sample
    query[0, 50:54] = torch.tensor([-0.4, high + 0.4, -3.0, high + 3.0])[:, None]
    check("add_bump", (query, key, value), tolerance=1e-5)
    assert wound == [cells, cells]


@pytest.mark.parametrize("way", ["equal", "at a node", "nearly"])
def test_ties_have_half_of_the_step(way, wound):
    """Among many points that are not tied, so that lines are wound; some lie closer than parts can tell."""
    query, key, value = points("normal", 2, 700, 800, 2, 20)
    # such that differences are exact
    key[:, 300:320] = (key[:, 300:320] * 2048).round() / 2048
    query[:, 500:520] = key[:, 300:320]
    if way == "at a node":
        query[:, 500:510] += 1.25
        query[:, 510:520] -= 1.25
    if way == "nearly":
        query[:, 500:520] += torch.tensor([1e-9, -1e-9] * 10)[:, None]
        key[:, 300:320] = query[:, 500:520] * (1 + 1.2e-7)
    # several of either kind at a place
    query[:, 520:530], key[:, 320:325] = query[:, 500:510], key[:, 300:305]
    check("add_bump", (query, key, value))
    assert all(wound)


def test_points_that_are_alike_are_walked_as_they_are(wound):
    """There are no pairs of all of them to go through; other lines of the head are wound."""
    query, key, value = points("normal", 1, 300, 400, 2, 8)
    query[..., 0], key[..., 0] = (query[..., 0] * 4).round() / 4, (key[..., 0] * 4).round() / 4
    check("add_bump", (query, key, value))
    assert [bool(cells) for cells in wound] == [False, True]


def test_a_bandwidth_that_rounding_changes_is_not_wound(wound):
    """Between it and what is left of it in float32 there may be pairs of points."""
    given = points("normal", 1, 100, 150, 2, 8)
    check("add_bump", given, bandwidth=1.3)
    check("add_bump", given, bandwidth=torch.tensor(1.3))
    assert [bool(cells) for cells in wound] == [False, False, True, True]


def test_lines_that_are_too_long_are_walked_as_they_are(wound, monkeypatch):
    entries = []
    monkeypatch.setattr(launch, "Kernel", listing(entries))
    query, key, value = points("normal", 2, 100, 150, 3, 8)
    query[..., 1], key[..., 1] = query[..., 1] * 9, key[..., 1] * 9
    check("add_bump", (query, key, value))
    assert [bool(cells) for cells in wound] == [True, False, True] * 2
    assert {"reel", "untie", "trade", "settle", "bridge"} <= set(entries)


def test_values_of_one_sign_do_not_cancel(wound):
    query, key, value = points("normal", 1, 900, 1000, 2, 8)
    check("add_bump", (query, key, value + 3), tolerance=1e-5)
    assert all(wound)


# queries before the first key are in the sums of its cell until they are passed, and these are of their size
@pytest.mark.parametrize(("side", "tolerance"), [(1, 2e-5), (-1, 1e-3)])
def test_the_few_queries_that_see_little_do_not_spoil_others(wound, side, tolerance):
    """Their gradients are a hundred times as large."""
    query, key, value = points("normal", 1, 1000, 300, 2, 8)
    key, query = 0.1 * key, 0.1 * query
    edge = key.amax(1) if side > 0 else key.amin(1)
    query[0, 500:503] = edge + side * 1.24
    query[0, 503] = edge + side * 1.251
    check("add_bump", (query, key, value), tolerance=tolerance)
    assert all(wound)


def test_what_rounding_takes_from_sums_is_kept_from_round_to_round(wound, monkeypatch):
    """Without it the gradients of values have an error of 8.3e-7 in so many rounds."""
    monkeypatch.setattr(cuda_reel, "WARPS", 1)
    given = points("normal", 1, 6000, 6007, 1, 8)
    (*_, expected), (*_, found) = (
        outcome("add_bump", given, backend, dtype, bandwidth=1.25)
        for backend, dtype in (("reference", torch.float64), ("sorted", torch.float32))
    )
    assert (found - expected).norm() <= 5e-7 * expected.norm()
    assert all(wound)


def test_a_warp_looks_for_the_begin_of_its_stretches_thirty_two_at_a_time(wound, monkeypatch):
    monkeypatch.setattr(cuda_reel, "WARPS", 2)
    check("add_bump", points("normal", 1, 1500, 1507, 1, 8))
    assert all(wound)


def test_gradients_are_made_along_lines_where_the_cache_is_small(wound, monkeypatch):
    entries = []
    monkeypatch.setattr(launch, "Kernel", listing(entries))
    monkeypatch.setattr(room, "device", lambda device: room.Device(1, 1, 227 << 10))
    query, key, value = points("normal", 2, 330, 400, 2, 40)
    query[:, 100:110] = key[:, 100:110]
    check("add_bump", (query, key, value))
    assert {"reel", "untie", "deliver"} <= set(entries)
    assert all(wound)


def test_groups_of_heads_with_bandwidths_of_their_own(wound, monkeypatch):
    monkeypatch.setattr(room, "WORKSPACE", 0)
    query, key, value = (part[None] for part in points("normal", 4, 60, 80, 2, 8))
    check("add_bump", (query, key, value), bandwidth=torch.tensor([0.9, 1.7, 1.2, 2.5]))
    assert all(wound)


def test_rows_are_summed_in_chunks(wound, monkeypatch):
    monkeypatch.setattr(cuda_reel, "_CHUNK", 130)
    check("add_bump", points("normal", 1, 500, 600, 17, 8))
    assert all(wound)


def test_long_lines_are_wound_and_sorted_in_stretches(wound, monkeypatch):
    monkeypatch.setattr(cuda_sort, "_sorter", lambda count, shared: (256, 4))
    check("add_bump", points("normal", 1, 1500, 1507, 2, 8))
    assert all(wound)
