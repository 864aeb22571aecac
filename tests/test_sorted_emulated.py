"""The arithmetic of the sorted backend's CUDA kernels, run on the CPU by an emulator, against the definition.

What an emulator cannot show, that warps which run at a time do not disturb each other, is for a GPU to show.
"""

import math

import pytest
import torch

import sortattn
from sortattn.cuda import launch
from sortattn.ops.sorted import classes, cuda, cuda_sort, cuda_walk, quotient, room
from sortattn.ops.sorted.quotient import _SOURCE as QUOTIENT
from sortattn.ops.sorted.tracks import tracks_of

from .emulation.emulator import AVAILABLE, EmulatedKernel, listing
from .emulation.walks import KERNELS, emulate, outcome, points

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="the emulator is compiled with g++ on Linux"),
    pytest.mark.usefixtures("cpu_only"),
]


@pytest.fixture
def emulated(monkeypatch):
    """Sends sorted calls on CPU tensors through the code for GPUs."""
    return emulate(monkeypatch)


# few; more sources than a block of moments has, and runs that begin in the middle; more channels than a warp takes; for
# the keys, windows with few sources, and few ties among them
SHAPES = {
    "small": (2, 9, 7, 3, 5),
    "runs": (1, 150, 600, 1, 64),
    "wide": (1, 70, 40, 2, 100),
    "few": (1, 40, 2000, 1, 8),
}


@pytest.mark.parametrize(
    ("shape", "kind"),
    [(shape, "ties") for shape in SHAPES]
    + [("small", "same"), ("few", "few ties")]
    + [("runs", kind) for kind in ("normal", "few ties", "nearly ties", "shifted", "far")],
)
@pytest.mark.parametrize("name", KERNELS)
def test_sums_and_gradients_match_the_definition(name, shape, kind, emulated, monkeypatch):
    if kind == "far" and name == "add_riesz":
        pytest.skip("its values grow with the coordinates")
    monkeypatch.setattr(cuda_walk, "_SHORT", 32)
    # runs of a track are short, and atomics are used, as without the deterministic mode
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    given = points(kind, *SHAPES[shape])
    # 1.3 is no number of float32
    bandwidth = 1.3 if kind == "nearly ties" else 1.25
    expected = outcome(KERNELS[name], given, "reference", torch.float64, bandwidth)
    for part, got, wanted in zip(
        ("output", "query", "key", "value"),
        outcome(KERNELS[name], given, "sorted", torch.float32, bandwidth),
        expected,
        strict=True,
    ):
        # as the operator's fake kernel has it; a compiled graph relies on that
        assert got.is_contiguous(), part
        error = (got - wanted).norm() / wanted.norm().clamp(min=1e-3)
        assert error < (2e-6 if part in ("output", "value") else 1e-5), (part, error)


@pytest.mark.parametrize("jumps", [False, True], ids=["continuous", "jumps"])
@pytest.mark.parametrize("kind", ["normal", "ties", "few ties"])
def test_kernels_with_many_nodes_match_the_definition(kind, jumps, emulated, monkeypatch):
    """Whose nodes are loops in batches that are full of ties; at a bandwidth of 1.25 points are tied at all of them."""
    monkeypatch.setattr(cuda_walk, "_SHORT", 32)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    nodes, slopes = [-1.2, -0.8, 0.0, 0.4, 1.2], [0.0, 1.0, 0.5, -0.5, -0.75, 0.0]
    kernel = sortattn.Spline(nodes, slopes, jumps=[0.5, 0.0, 0.0, 0.0, -0.5] if jumps else None)
    given = points(kind, 1, 150, 300, 2, 40)
    expected = outcome(kernel, given, "reference", torch.float64)
    for got, wanted in zip(outcome(kernel, given, "sorted", torch.float32), expected, strict=True):
        assert (got - wanted).norm() < 1e-5 * wanted.norm()


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "one sided"])
def test_rows_of_a_single_node_are_read_once(kind, emulated, monkeypatch):
    """By blocks of warps that hand their sums on; with more stretches than warps, and masked keys."""
    entries = []
    monkeypatch.setattr(launch, "Kernel", listing(entries))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    query, key, value = points(kind, 1, 300, 1900, 2, 50)
    if kind == "zeros":
        query, key = query.relu(), key.relu()
    if kind == "one sided":
        query, key = query.abs() + 0.1, key.abs() + 0.1
    mask = torch.rand(1, 1900, generator=torch.Generator().manual_seed(4)) < 0.7
    output = sortattn.kernel_attention(query, key, value, "add_riesz", key_mask=mask, backend="sorted")
    wide = (part.double() for part in (query, key, value))
    expected = sortattn.kernel_attention(*wide, "add_riesz", key_mask=mask, backend="reference")
    assert (output - expected).norm() < 1e-6 * expected.norm()
    assert {"sum_halves", "relay"} <= set(entries)
    assert "summarise" not in entries


@pytest.mark.parametrize("early", [False, True])
def test_long_heads_are_walked_one_by_one_and_all_but_the_first_begin_early(early, emulated, monkeypatch):
    launches = []

    class Noted(EmulatedKernel):
        def __init__(self, source, entry, defines=()):
            self.name, self.lets = entry, ("EARLY", 1) in defines
            super().__init__(source, entry, defines)

        def __call__(self, *arguments, early=False, **options):
            launches.append((self.name, early, self.lets))
            super().__call__(*arguments, **options)

    monkeypatch.setattr(launch, "Kernel", Noted)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    # no head fits into the cache
    monkeypatch.setattr(room, "device", lambda device: room.Device(1, 1, 227 << 10, early))
    query, key, value = points("normal", 3, 100, 700, 2, 20)
    output = sortattn.kernel_attention(query, key, value, "add_riesz", backend="sorted")
    expected = sortattn.kernel_attention(query.double(), key.double(), value.double(), "add_riesz", backend="reference")
    assert (output - expected).norm() < 1e-6 * expected.norm()
    walks = [flags for name, *flags in launches if name == "relay"]
    assert walks == [[False, early], [early, early], [early, early]]


@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_values_that_are_no_numbers_spoil_their_head_alone(name, number, emulated, monkeypatch):
    """Also in the last row, which has no neighbour in its tile, and the last channel."""
    entries = []
    monkeypatch.setattr(launch, "Kernel", listing(entries))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    query, key, value = points("normal", 3, 40, 333, 2, 20)
    fine = sortattn.kernel_attention(query, key, value, name, backend="sorted")
    # folded lines are summed on either side of zero, by which the values are looked at
    assert ("look" in entries) == (name != "add_riesz")
    for place in ((1, 332, 19), (1, 0, 0), (1, 160, 7)):
        spoilt = value.clone()
        spoilt[place] = number
        output = sortattn.kernel_attention(query, key, spoilt, name, backend="sorted")
        assert output[1].isnan().all()
        assert (output[[0, 2]] - fine[[0, 2]]).norm() <= 1e-6 * fine[[0, 2]].norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("channels", [20, 64, 100])
def test_rows_of_16_bits_are_walked_as_they_are(channels, dtype, emulated, monkeypatch):
    """With masked keys, groups of heads, ties and zeros; what is no number stays in its head."""
    entries = []
    monkeypatch.setattr(launch, "Kernel", listing(entries))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(classes, "here", lambda query, dtype: dtype.itemsize == 2)
    query, key, value = (part.to(dtype) for part in points("normal", 4, 150, 300, 2, channels))
    query, key, value = query[None], key[None, ::2], value[None, ::2]
    key[..., ::5, :], query[..., 3, :] = 0.0, 0.0
    options = {"key_mask": torch.rand(1, 300, generator=torch.Generator().manual_seed(4)) < 0.7, "enable_gqa": True}
    output = sortattn.kernel_attention(query, key, value, "add_riesz", backend="sorted", **options)
    wide = [part.double() for part in (query, key, value)]
    expected = sortattn.kernel_attention(*wide, "add_riesz", backend="reference", **options)
    assert output.dtype == dtype
    # nothing but the result is rounded
    assert (output - expected).norm() <= (expected.to(dtype) - expected).norm() + 1e-6 * expected.norm()
    assert {"sum_halves", "relay"} <= set(entries)
    query[0, 1, 7, 1] = float("inf")
    spoilt = sortattn.kernel_attention(query, key, value, "add_riesz", backend="sorted", **options)
    assert spoilt[0, 1].isnan().all()
    assert spoilt[0, [0, 2, 3]].equal(output[0, [0, 2, 3]])


@pytest.mark.parametrize(
    ("length", "items", "most"), [(40, 4, 9), (2100, 4, 9), (4500, 8, 1)], ids=["short", "long", "merged"]
)
def test_what_is_no_number_is_found_where_it_is_sorted(length, items, most, emulated, monkeypatch):
    """In queries, keys or values, of lines that are sorted at once, in stretches or in runs that are merged."""
    monkeypatch.setattr(cuda_sort, "_most_parts", lambda shared: most)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(cuda_sort, "_sorter", lambda count, shared: (256, items))
    given = points("normal", 4, length, length + 9, 2, 8)
    expected = sortattn.kernel_attention(*given, "add_laplace", backend="sorted")
    (query, key, value), number = given, float("nan")
    query[1, length - 1, 1], key[2, 4, 0], value[3, 5, 6] = number, -float("inf"), number
    output = sortattn.kernel_attention(query, key, value, "add_laplace", backend="sorted")
    assert output[1:].isnan().all()
    assert output[0].equal(expected[0])


@pytest.mark.parametrize("name", ["add_bump", "box"])
def test_a_window_of_many_blocks_is_summed_by_groups_of_them(name, emulated, monkeypatch):
    monkeypatch.setattr(cuda_walk, "_SHORT", 32)
    given = points("normal", 1, 70, 12_000, 1, 20)
    expected = outcome(KERNELS[name], given, "reference", torch.float64)
    # the gradient of a value is a sum over the queries, which are few
    for got, wanted in list(zip(outcome(KERNELS[name], given, "sorted", torch.float32), expected, strict=True))[:2]:
        assert (got - wanted).norm() <= 2e-6 * wanted.norm()


@pytest.mark.parametrize(
    ("name", "bandwidth", "shift", "sizes"),
    # normalisers of thousands of terms of one sign; a window that takes in and loses many sources along a run
    [("add_riesz", 1.0, 100.0, (1, 16, 16_384, 1, 8)), ("add_bump", 0.1, 0.0, (1, 128, 1024, 2, 16))],
    ids=["many_alike", "narrow"],
)
def test_rounding_does_not_add_up(name, bandwidth, shift, sizes, emulated, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    query, key, value = points("normal", *sizes)
    query, key = query + shift, key + shift
    output = sortattn.kernel_attention(query, key, value, name, bandwidth=bandwidth, backend="sorted")
    wide = (part.double() for part in (query, key, value))
    expected = sortattn.kernel_attention(*wide, name, bandwidth=bandwidth, backend="reference")
    assert (output - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("name", ["add_bump", "learned"])
def test_heads_that_are_walked_one_after_the_other_are_put_together(name, emulated, monkeypatch):
    monkeypatch.setattr(room, "WORKSPACE", 0)
    query, key, value = points("normal", 3, 40, 50, 2, 5)
    mask = torch.rand(3, 50, generator=torch.Generator().manual_seed(4)) < 0.7
    assert len(cuda.groups(query, key, value, KERNELS["add_bump"].terms())) == 3

    def outcome(backend, dtype):
        leaves = [part.to(dtype).requires_grad_() for part in (query, key, value, torch.tensor([0.5, 1.0, 2.0]))]
        kernel = name
        if name == "learned":
            leaves.append(torch.tensor([1.0, 0.5], dtype=torch.float64, requires_grad=True))
            kernel = sortattn.PolynomialExponential(leaves[-1])
        rows = sortattn.kernel_attention(*leaves[:3], kernel, bandwidth=leaves[3], key_mask=mask, backend=backend)
        return [rows.detach(), *torch.autograd.grad(rows.square().sum(), leaves)]

    for got, wanted in zip(outcome("sorted", torch.float32), outcome("reference", torch.float64), strict=True):
        assert got.shape == wanted.shape
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("ordered", [False, True], ids=["atomics", "ordered"])
@pytest.mark.parametrize("kind", ["normal", "ties", "far"])
def test_sign_sums_and_their_gradients_match_the_definition(kind, ordered, emulated, monkeypatch):
    monkeypatch.setattr(cuda_walk, "_SHORT", 32)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: ordered)
    query, key, value = points(kind, 2, 150, 300, 2, 5)
    weight = torch.randn(2, 150, 5, generator=torch.Generator().manual_seed(3))

    def outcome(backend, dtype):
        lines = [part.to(dtype) for part in (query, key)]
        rows = [part.to(dtype).requires_grad_() for part in (value, weight)]
        sums = sortattn.weighted_sign_sum(*lines, *rows, backend=backend)
        factors = torch.linspace(-1, 1, sums.numel(), dtype=torch.float64).reshape(sums.shape).sin().to(dtype)
        return [sums.detach(), *torch.autograd.grad((sums * factors).sum(), rows)]

    for got, wanted in zip(outcome("sorted", torch.float32), outcome("reference", torch.float64), strict=True):
        assert (got - wanted).norm() <= 2e-6 * wanted.norm()


@pytest.mark.parametrize("name", KERNELS)
def test_without_atomics_and_in_float64(name, emulated):
    given = points("ties", 2, 40, 50, 2, 70)
    expected = outcome(KERNELS[name], given, "reference", torch.float64)
    for got, wanted in zip(outcome(KERNELS[name], given, "sorted", torch.float64), expected, strict=True):
        assert (got - wanted).norm() <= 1e-12 * wanted.norm().clamp(min=1e-3)


@pytest.mark.parametrize(
    "count",
    [1, 700, 1500, 4096, 17_000],
    ids=["one", "a_run", "more_keys_a_thread", "a_full_block", "merged_runs"],
)
@pytest.mark.parametrize("kind", ["normal", "ties", "few_ties", "equal", "bfloat16", "far", "no_numbers"])
def test_lines_are_sorted_and_ties_keep_their_order(kind, count, emulated):
    lines = torch.randn(1, count, 2, generator=torch.Generator().manual_seed(1))
    if kind == "ties":
        lines = (lines * 3).round()
    if kind == "few_ties":
        # so few that buckets are not crowded
        lines = (lines * count / 8).round() / count
    if kind == "equal":
        lines[:] = 1.5
    if kind == "bfloat16":
        lines = lines.bfloat16().float()
    if kind == "far":
        lines[0, : count // 3] *= 1e30
    if kind == "no_numbers":
        lines[0, ::7], lines[0, 1::7], lines[0, 2::7] = math.nan, -math.inf, -0.0
    found = cuda.sort_lines(lines)
    # what is no number stands at zero, and there is one zero
    clean = lines.nan_to_num(0.0, 0.0, 0.0).add(0.0).transpose(1, 2)
    places, order = clean.sort(dim=-1, stable=True)
    assert torch.equal(found.order, order.int())
    assert torch.equal(found.places, places)


class Unmerged(EmulatedKernel):
    """Does nothing for lines that would have to be sorted in runs and merged."""

    def __init__(self, source, entry, defines=()):
        super().__init__(source, entry, defines)
        self.entry = entry

    def __call__(self, *arguments, **options):
        if self.entry not in ("sort_rest", "merge_runs"):
            super().__call__(*arguments, **options)


def check_sorted(found, lines):
    places, order = lines.transpose(1, 2).sort(dim=-1, stable=True)
    assert torch.equal(found.order, order.int())
    assert torch.equal(found.places, places)


# more lines than a block splits at a time, and fewer
@pytest.mark.parametrize("dims", [2, 11])
def test_a_long_line_without_many_ties_is_split_and_not_merged(dims, emulated, monkeypatch):
    monkeypatch.setattr(launch, "Kernel", Unmerged)
    lines = torch.randn(1, 40_000, dims, generator=torch.Generator().manual_seed(1))
    lines[0, 5], lines[0, 17] = lines[0, 30_000], lines[0, 20_000]
    check_sorted(cuda.sort_lines(lines), lines)


@pytest.mark.parametrize("spread", [5.0, 40.0], ids=["heavy", "beyond_floats"])
def test_a_long_line_with_heavy_tails_is_split_and_not_merged(spread, emulated, monkeypatch):
    """Most of its stretches begin close to each other, as seen from its ends."""
    monkeypatch.setattr(launch, "Kernel", Unmerged)
    # crowded stretches are sorted by digits then
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    lines = torch.randn(1, 70_000, 3, generator=torch.Generator().manual_seed(1))
    lines = (lines.sign() * (spread * lines.abs()).exp()).clamp(-3e38, 3e38)
    found = cuda.sort_lines(lines)
    assert torch.equal(found.places, lines.transpose(1, 2).sort(dim=-1).values)
    assert torch.equal(lines.transpose(1, 2).gather(2, found.order.long()), found.places)
    assert torch.equal(found.order.sort(dim=-1).values, torch.arange(70_000).int().expand(1, 3, -1))


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_no_number_is_found_among_ties(deterministic, emulated, monkeypatch):
    """In lines that are not split, if ties keep their order, or have too long a stretch."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    lines = torch.randn(2, 20_000, 3, generator=torch.Generator().manual_seed(1)).round()
    lines[1, 7, 2] = math.nan
    unfit = torch.zeros(2, 1, dtype=torch.int32)
    cuda_sort.sort_lines(lines, cuda_sort.Look(unfit))
    assert unfit.tolist() == [[0], [1]]


@pytest.mark.parametrize("processors", [1, 2, 5])
def test_lines_that_are_merged_are_shared_out_among_blocks(processors, emulated, monkeypatch):
    """Those with many ties, between others."""
    monkeypatch.setattr(room, "device", lambda device: room.Device(processors, 50 << 20, 227 << 10))
    lines = torch.randn(2, 40_000, 3, generator=torch.Generator().manual_seed(1))
    lines[:, :, 1] = lines[:, :, 1].round()
    check_sorted(cuda.sort_lines(lines), lines)


def test_a_gpu_with_little_shared_memory_sorts_shorter_stretches(emulated, monkeypatch):
    sizes = []

    class Sized(EmulatedKernel):
        def __call__(self, *arguments, shared=0):
            sizes.append(shared)
            super().__call__(*arguments, shared=shared)

    monkeypatch.setattr(launch, "Kernel", Sized)
    monkeypatch.setattr(room, "device", lambda device: room.Device(1, 50 << 20, 99 << 10))
    lines = torch.randn(1, 20_000, 2, generator=torch.Generator().manual_seed(1))
    found = cuda.sort_lines(lines)
    places, order = lines.transpose(1, 2).sort(dim=-1, stable=True)
    assert torch.equal(found.order, order.int())
    assert torch.equal(found.places, places)
    assert 0 < max(sizes) < 99 << 10


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_line_of_more_stretches_than_there_is_room_for_is_merged(most, emulated, monkeypatch):
    monkeypatch.setattr(cuda_sort, "_most_parts", lambda shared: most)
    lines = torch.randn(2, 40_000, 3, generator=torch.Generator().manual_seed(1))
    found = cuda.sort_lines(lines)
    places, order = lines.transpose(1, 2).sort(dim=-1, stable=True)
    assert torch.equal(found.order, order.int())
    assert torch.equal(found.places, places)


@pytest.mark.parametrize("shared", [99, 163, 227])
def test_no_length_asks_for_more_shared_memory_than_there_is(shared, monkeypatch):
    asked = []

    class Sized:
        def __init__(self, source, entry, defines=()):
            self._defines = dict(defines)

        def __call__(self, *arguments, shared=0):
            asked.append(shared)

    monkeypatch.setattr(launch, "Kernel", Sized)
    monkeypatch.setattr(room, "device", lambda device: room.Device(100, 50 << 20, shared << 10))
    for exponent in range(10, 27):
        cuda_sort.sort_lines(torch.empty(1, 2**exponent + 1, 1, device="meta"))
    # beside a few words of the kernel's own
    assert max(asked) <= (shared << 10) - 16


@pytest.mark.parametrize("kind", ["bfloat16", "ties"])
def test_a_long_line_with_ties_may_have_them_in_any_order(kind, emulated, monkeypatch):
    """Without the deterministic mode; its stretches are sorted by digits, or it is merged if one is too long."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    lines = torch.randn(1, 40_000, 2, generator=torch.Generator().manual_seed(1))
    lines = lines.bfloat16().float() if kind == "bfloat16" else (lines * 2).round()
    found = cuda.sort_lines(lines)
    assert torch.equal(found.places, lines.transpose(1, 2).sort(dim=-1).values)
    assert torch.equal(found.order.sort(dim=-1).values, torch.arange(40_000).int().expand(1, 2, -1))
    assert torch.equal(lines.transpose(1, 2).gather(2, found.order.long()), found.places)


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_quotients_match_what_the_operators_do_on_a_cpu(floor):
    generator = torch.Generator().manual_seed(2)
    problems, group, rows, channels = 3, 2, 5, 40
    query, key, value = (
        torch.randn(problems, n, 4, dtype=torch.float64, generator=generator) for n in (group * rows, 7, 7)
    )
    query[1, 7, 2], key[2, 3, 1] = math.nan, math.inf
    unfit = torch.zeros(problems, group, dtype=torch.int32)
    defines = (("REAL", "double"),)
    EmulatedKernel(QUOTIENT, "look", defines)(
        (problems * (group + 2) * 3,), 256, query, key, value, unfit, rows * 4, 7 * 4, 7 * 4, group, 3, 0
    )
    assert torch.equal(unfit != 0, quotient.unfit(query, key, value, group) != 0)
    assert (unfit != 0).tolist() == [[False, False], [False, True], [True, True]]

    sums, grad = (
        torch.randn(problems, group * rows, channels, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    total = torch.randn(problems, group * rows, dtype=torch.float64, generator=generator)
    total[0, 0], total[0, 1] = 0.0, 1e-310
    number, found = problems * group * rows, torch.empty_like(sums)
    blocks = (math.ceil(number / 8),)
    for lanes in (16, 32):
        EmulatedKernel(QUOTIENT, "divide", defines)(
            blocks, 256, sums, total, unfit, found.zero_(), number, rows, channels, channels, lanes, floor
        )
        torch.testing.assert_close(found, quotient.quotient(sums, total, unfit, floor), equal_nan=True)
    by_sums, by_total = torch.empty_like(sums), torch.empty_like(total)
    EmulatedKernel(QUOTIENT, "divide_backward", defines)(
        blocks, 256, grad, sums, total, unfit, by_sums, by_total, number, rows, channels, floor
    )
    for got, wanted in zip(
        (by_sums, by_total), quotient.quotient_backward(grad, sums, total, unfit, floor), strict=True
    ):
        torch.testing.assert_close(got, wanted, equal_nan=True)


def test_rows_begin_where_a_lane_can_load_all_its_channels_at_once(emulated):
    memory = torch.randn(1 + 40 * 64)
    value = memory[1:].view(1, 40, 64)
    query, key = torch.randn(2, 1, 40, 3).unbind()
    lines = cuda.sort_lines(query), cuda.sort_lines(key)
    terms = sortattn.KERNELS["add_riesz"].terms()
    walk = cuda_walk.Walk(tracks_of(terms, False), *lines, value, None, 1.0)
    assert value.data_ptr() % 16
    assert walk.rows.data_ptr() % 16 == 0
    assert torch.equal(walk.rows, value)
