"""Walks around wound lines, run on the CPU by an emulator, against the definition."""

import pytest
import torch

import sortattn
from sortattn.cuda import launch
from sortattn.ops.sorted import cuda_coil, cuda_sort, room
from sortattn.ops.sorted.tracks import tracks_of

from .emulation.emulator import AVAILABLE, EmulatedKernel, listing
from .emulation.walks import points, wind

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="the emulator is compiled with g++ on Linux"),
    pytest.mark.usefixtures("cpu_only"),
]

KERNELS = {
    "add_bump": sortattn.KERNELS["add_bump"],
    "hat": sortattn.Spline([-1.25, 0.0, 1.25], [0.0, 2.0, -2.0, 0.0]),
    "hollow": sortattn.Spline([-1.25, 0.0, 1.25], [0.0, -0.5, 0.5, 0.0]),
}


@pytest.fixture
def wound(monkeypatch):
    """The cells of all lines."""
    return wind(monkeypatch)


def check(query, key, value, kernel, tolerance=1e-6, **options):
    output = sortattn.kernel_attention(query, key, value, kernel, backend="sorted", **options)
    wide = [part.double() for part in (query, key, value)]
    expected = sortattn.kernel_attention(*wide, kernel, backend="reference", **options)
    assert (output - expected).norm() <= tolerance * expected.norm()


# few; more keys than the warps of a block have at a time; many queries between two keys
SHAPES = {"small": (2, 90, 70, 3, 5), "long": (1, 150, 1500, 2, 64), "many": (1, 900, 130, 1, 20)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["normal", "ties", "same", "shifted"])
@pytest.mark.parametrize("name", KERNELS)
def test_sums_around_wound_lines_match_the_definition(name, kind, shape, wound):
    query, key, value = points(kind, *SHAPES[shape])
    mask = torch.rand(SHAPES[shape][0], SHAPES[shape][2], generator=torch.Generator().manual_seed(4)) < 0.7
    check(query, key, value, KERNELS[name], key_mask=mask)
    assert all(wound)


@pytest.mark.parametrize("shift", [1e4, 1e5, -1e6])
def test_an_offset_costs_no_digits(shift, wound):
    """Nor do points that are close to the boundary of a cell, which a rounded product may be on the other side of."""
    query, key, value = points("normal", 1, 300, 400, 2, 8)
    check(query + shift, key + shift, value, "add_bump", tolerance=3e-7)
    assert all(wound)


@pytest.mark.parametrize("length", [1500, 2600], ids=["split", "merged"])
def test_long_lines_are_wound_and_sorted_in_stretches(length, wound, monkeypatch):
    monkeypatch.setattr(cuda_sort, "_sorter", lambda count, shared: (256, 4))
    if length == 2600:
        monkeypatch.setattr(cuda_sort, "_most_parts", lambda shared: 1)
    query, key, value = points("normal", 1, length, length + 7, 2, 8)
    check(query, key, value, "add_bump")
    assert all(wound)


def test_as_many_cells_as_there_is_room_for_with_queries_beyond_them(wound):
    query, key, value = points("normal", 1, 200, 300, 2, 8)
    # from the first to the last cell, and queries from before to behind them
    key = torch.linspace(0.01, 8 * 1.5 - 0.01, 300)[None, torch.randperm(300), None].expand(1, 300, 2).contiguous()
    query = torch.linspace(-2.0, 14.0, 200)[None, :, None].expand(1, 200, 2).contiguous()
    sums = sortattn.kernel_sum(query, key, value, "add_bump", backend="sorted")
    expected = sortattn.kernel_sum(*(part.double() for part in (query, key, value)), "add_bump", backend="reference")
    assert (sums - expected).norm() <= 1e-6 * expected.norm()
    assert wound == [8, 8]


def test_values_of_one_sign_do_not_cancel(wound):
    query, key, value = points("normal", 1, 200, 3000, 2, 8)
    check(query, key, value + 3, "add_bump")
    assert all(wound)


def test_lines_that_are_too_long_are_walked_as_they_are(wound):
    """Of a head some lines may be wound, and others not: such with many cells, or coordinates far out."""
    query, key, value = points("normal", 2, 100, 150, 3, 8)
    query[..., 1], key[..., 1] = query[..., 1] * 9, key[..., 1] * 9
    key[1, 3, 2], key[1, 5, 2] = 1e30, -1e30
    check(query, key, value, "add_bump")
    assert [bool(cells) for cells in wound] == [True, False, True, True, False, False]


def test_whole_tables_of_cells_are_written(wound, monkeypatch):
    """Those of lines that are not wound, and of cells that a line has not, are copied with the others."""
    tables = []

    class Poisoned(EmulatedKernel):
        def __init__(self, source, entry, defines=()):
            super().__init__(source, entry, defines)
            self.entry = entry

        def __call__(self, grid, block, *arguments, **options):
            if self.entry == "begin_cells":
                tables.append(arguments[2].fill_(torch.nan))
            super().__call__(grid, block, *arguments, **options)
            if self.entry == "begin_cells":
                assert tables[-1].isfinite().all()

    monkeypatch.setattr(launch, "Kernel", Poisoned)
    query, key, value = points("normal", 2, 60, 70, 3, 8)
    query[..., 1], key[..., 1] = query[..., 1] * 9, key[..., 1] * 9
    check(query, key, value, "add_bump")
    assert len(tables) == 1
    assert any(wound)
    assert not all(wound)


def test_lines_with_queries_at_the_edge_of_all_they_see_are_not_wound(wound):
    """There sums of whole cells would cancel; as it is, 1 - |u| has lost digits already."""
    query, key, value = points("normal", 1, 200, 300, 2, 8)
    # two clusters, and queries between them that see little of one
    key = 0.001 * key + torch.where(torch.arange(300) % 2 == 0, 0.0, 2.99)[:, None]
    query = 0.0001 * query + 1.495
    check(query, key, value, "add_bump", tolerance=5e-5)
    assert not any(wound)
    # whatever keys are there that are masked, which stand among the others
    check(query, key, value, "add_bump", tolerance=5e-5, key_mask=torch.arange(300)[None] % 4 < 2)
    assert not any(wound)


def test_queries_beyond_all_keys_have_nothing(wound):
    query, key, value = points("normal", 1, 60, 80, 2, 8)
    # the last of them see no key
    query[:, 50:] += 40
    check(query, key, value, "add_bump")
    assert all(wound)


def test_the_few_queries_that_see_little_of_the_cells_around_keep_their_digits(wound):
    """Among many others, so that lines are wound; some see no key at all, and have zeros."""
    query, key, value = points("normal", 1, 1000, 300, 2, 8)
    # narrower than a window, with nothing on either side
    key = 0.1 * key
    query = 0.1 * query
    query[0, 500:503] = key.amax(1) + 1.49
    query[0, 503] = key.amax(1) + 1.501
    query[0, 504] = key.amin(1) - 1.51
    output = sortattn.kernel_attention(query, key, value, "add_bump", backend="sorted")
    wide = [part.double() for part in (query, key, value)]
    expected = sortattn.kernel_attention(*wide, "add_bump", backend="reference")
    assert all(wound)
    assert (output - expected).norm() <= 1e-6 * expected.norm()
    assert (output[0, 500:503] - expected[0, 500:503]).norm() <= 2e-6 * expected[0, 500:503].norm()
    assert output[0, 503:505].eq(0).all()


def test_groups_of_heads_with_bandwidths_of_their_own(wound, monkeypatch):
    monkeypatch.setattr(room, "WORKSPACE", 0)
    query, key, value = (part[None] for part in points("normal", 4, 60, 80, 2, 8))
    bandwidth = torch.tensor([0.9, 1.7, 1.2, 2.5])
    check(query, key[:, ::2], value[:, ::2], "add_bump", bandwidth=bandwidth, enable_gqa=True)
    check(query, key, value, "add_bump", bandwidth=bandwidth)
    assert all(wound)


def test_what_is_no_number_stays_in_its_head(wound):
    query, key, value = points("normal", 3, 60, 80, 2, 8)
    expected = sortattn.kernel_attention(query, key, value, "add_bump", backend="sorted")
    key[1, 7, 0], value[2, 3, 4] = float("nan"), float("inf")
    output = sortattn.kernel_attention(query, key, value, "add_bump", backend="sorted")
    assert output[1:].isnan().all()
    assert output[0].equal(expected[0])


def test_a_pass_with_gradients_is_wound_both_ways(wound, monkeypatch):
    entries = []
    monkeypatch.setattr(launch, "Kernel", listing(entries))
    leaves = [part.requires_grad_() for part in points("normal", 1, 90, 150, 2, 8)]
    output = sortattn.kernel_attention(*leaves, "add_bump", backend="sorted")
    gradients = torch.autograd.grad(output.square().sum(), leaves)
    wide = [part.detach().double().requires_grad_() for part in leaves]
    expected = sortattn.kernel_attention(*wide, "add_bump", backend="reference")
    for got, wanted in zip(gradients, torch.autograd.grad(expected.square().sum(), wide), strict=True):
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()
    assert entries.count("coil") == entries.count("reel") == 1


@pytest.mark.parametrize(
    ("kernel", "pitch"),
    [
        ("add_bump", 1.0),
        (KERNELS["hat"], 1.25),
        ("add_laplace", 0.0),
        ("add_riesz", 0.0),
        # nodes that are not a cell apart, or jump, or are more than three
        (sortattn.Spline([-1.0, 0.5, 1.0], [0.0, 1.0, -3.0, 0.0]), 0.0),
        (sortattn.Spline([-1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], jumps=[1.0, 0.0, -1.0]), 0.0),
        (sortattn.Spline([-2.0, -1.0, 1.0, 2.0], [0.0, 1.0, 0.0, -1.0, 0.0]), 0.0),
    ],
)
def test_kernels_whose_nodes_are_a_cell_apart_are_wound(kernel, pitch):
    kernel = sortattn.KERNELS.get(kernel, kernel) if isinstance(kernel, str) else kernel
    assert cuda_coil.pitch(tracks_of(kernel.terms(), False)) == pitch
