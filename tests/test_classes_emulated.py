"""Attention by classes of equal 16-bit coordinates, its CUDA kernels run on the CPU by an emulator."""

import contextlib
from itertools import pairwise

import pytest
import torch

import sortattn
from sortattn.cuda import launch
from sortattn.ops.sorted import classes, cuda_classes, cuda_coil, cuda_spool, room

from .cases import BOX, CASES
from .emulation.emulator import AVAILABLE, EmulatedKernel, listing

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="the emulator is compiled with g++ on Linux"),
    pytest.mark.usefixtures("cpu_only"),
]
KERNELS = {
    "add_riesz": sortattn.KERNELS["add_riesz"],
    "add_laplace": sortattn.KERNELS["add_laplace"],
    "add_bump": sortattn.KERNELS["add_bump"],
    "matern32": CASES["matern32"].kernel,
}
HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.fixture
def served(monkeypatch):
    """Sends calls of 16 bits through the kernels for GPUs; the list of those that were launched."""
    launched = []
    monkeypatch.setattr(launch, "Kernel", listing(launched))
    monkeypatch.setattr(room, "device", lambda device: room.Device(2, 50 << 20, 227 << 10))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(classes, "here", lambda query, dtype: dtype in (HALF, BRAIN))
    monkeypatch.setattr(classes, "LEAST", {HALF: (1, 1), BRAIN: (1, 1)})
    # blocks of few warps, so that runs are not longer than the sequences of a test
    monkeypatch.setattr(cuda_classes, "crew_of", lambda terms, shared: (3, 2, 2))
    return launched


def points(kind, heads, rows, columns, dims, channels, dtype):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(heads, n, c, generator=generator) for n, c in ((rows, dims), (columns, dims), (columns, channels))
    )
    if kind == "ties":
        query, key = (query * 2).round() / 2, (key * 2).round() / 2
    if kind == "shifted":
        query, key = query + 100, key + 100
    if kind == "far":
        key[:, 5:9], query[:, :3] = key[:, 5:9] * 1000, query[:, :3] * 1000
    if kind == "one sided":
        query, key = query.abs(), key.abs()
    if kind == "apart":
        key = key - 5
    if kind == "equal":
        key[:] = 0.5
    return [part.to(dtype) for part in (query, key, value)]


def check(kernel, given, bandwidth=1.25, **options):
    """As close to float64 as the rounding of float32, of means of keys and of dimensions, and of the result allows."""
    dtype = given[0].dtype
    output = sortattn.kernel_attention(*given, kernel, bandwidth=bandwidth, backend="sorted", **options)
    wide, near = (
        sortattn.kernel_attention(
            *(part.to(kind) for part in given), kernel, bandwidth=bandwidth, backend="reference", **options
        )
        for kind in (torch.float64, torch.float32)
    )
    assert output.dtype == dtype
    assert output.isfinite().all()
    rounding = (near.to(dtype) - wide).norm()
    assert (output - wide).norm() <= 1.8 * rounding + 1e-5 * wide.norm()


SHAPES = {
    "small": (2, 9, 7, 3, 5),
    "one": (1, 1, 1, 2, 64),
    "runs": (1, 150, 600, 2, 64),
    "many_classes": (1, 700, 60, 1, 20),
    "wide": (1, 70, 100, 70, 130),
}


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", KERNELS)
def test_attention_matches_the_definition(name, shape, dtype, served):
    check(KERNELS[name], points("normal", *SHAPES[shape], dtype))
    assert {"rank_classes", "gather"} <= set(served)
    assert "walk" not in served


@pytest.mark.parametrize(("name", "walk"), [("add_laplace", "fade"), ("matern32", "relax")])
def test_an_exponential_alone_has_a_walk_of_its_own(name, walk, served):
    # stretches with no class, with more than a product has, and with more than are looked at together
    query, key, value = points("normal", 1, 400, 300, 2, 64, HALF)
    query[0, :150] = key[0, 40] + query[0, :150] / 64
    check(KERNELS[name], (query, key, value))
    assert {"fade", "relax"} & set(served) == {walk}


@pytest.mark.parametrize("kind", ["ties", "shifted", "far", "one sided", "apart", "equal"])
@pytest.mark.parametrize("name", KERNELS)
def test_ties_offsets_and_outliers(name, kind, served):
    check(KERNELS[name], points(kind, 1, 150, 600, 2, 64, HALF))


@pytest.mark.parametrize("name", KERNELS)
def test_narrow_kernels(name, served):
    check(KERNELS[name], points("normal", 1, 150, 600, 2, 64, HALF), bandwidth=0.02)


@pytest.mark.parametrize("name", ["add_laplace", "matern32"])
def test_queries_far_from_all_keys_have_their_mean(name, served):
    query, key, value = points("normal", 1, 60, 300, 1, 40, HALF)
    # weights of these are too small for sixteen bits, above all keys, below, and between two
    query[0, :20], query[0, 20:40] = query[0, :20] + 40, query[0, 20:40] - 40
    key[0, :3], query[0, 40:50] = 90, query[0, 40:50] + 62
    check(KERNELS[name], (query, key, value))


def test_a_polynomial_may_keep_weights_from_being_too_small(served):
    query, key, value = points("normal", 1, 20, 300, 1, 40, HALF)
    # the exponential is 1e-39, and the polynomial 2,800 times as large
    query, key = 112 + query / 16, key / 16
    check(CASES["matern52"].kernel, (query, key, value))


@pytest.mark.parametrize("name", KERNELS)
def test_masks_groups_and_bandwidths_of_heads(name, served):
    query, key, value = points("normal", 4, 40, 50, 3, 8, HALF)
    mask = torch.rand(1, 50, generator=torch.Generator().manual_seed(4)) < 0.7
    query, key, value = query[None], key[None, ::2], value[None, ::2]
    check(KERNELS[name], (query, key, value), key_mask=mask, enable_gqa=True)
    bandwidth = torch.tensor([0.5, 1.0, 2.0, 1.0])
    check(KERNELS[name], (query, query, query), bandwidth=bandwidth)


@pytest.mark.parametrize("name", KERNELS)
def test_every_sequence_has_its_own_mask(name, served):
    given = [part.unflatten(0, (3, 2)) for part in points("normal", 6, 40, 50, 2, 8, HALF)]
    check(KERNELS[name], given, key_mask=torch.rand(3, 50, generator=torch.Generator().manual_seed(4)) < 0.5)


# a walk of exponentials keeps no rows of keys, and needs less
@pytest.mark.parametrize(("share", "groups"), [(0.8, 1), (0.97, 5)], ids=["rounds", "groups"])
@pytest.mark.parametrize(
    ("name", "spaces"), [("add_riesz", (0.7, 0.7)), ("add_laplace", (0.6, 0.55)), ("add_bump", (0.7, 0.7))]
)
def test_heads_that_do_not_fit_together_go_one_by_one(name, spaces, share, groups, served, monkeypatch):
    monkeypatch.setattr(room, "WORKSPACE", 0)
    monkeypatch.setattr(cuda_classes, "_SPACE", spaces[groups > 1])
    monkeypatch.setattr(cuda_classes, "_SHARE", share)
    given = points("normal", 5, 100, 70, 2, 64, BRAIN)
    planned = cuda_classes.plan(given[0], given[2], KERNELS[name].terms())
    assert (planned.together, len(planned.groups)) == (1, groups)
    check(KERNELS[name], given)


@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_long_indices_and_classes_that_are_counted_in_turns(name, served, monkeypatch):
    monkeypatch.setattr(cuda_classes, "_SHORT", 64)
    monkeypatch.setattr(cuda_classes, "_ROOM", 48)
    monkeypatch.setattr(cuda_classes, "_STAGE", 40)
    query, key, value = points("normal", 1, 90, 300, 2, 32, HALF)
    # more alike than are put in order at a time
    key[:, 100:200] = 0.5
    check(KERNELS[name], (query, key, value))


@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_lines_of_more_points_than_threads_keep(name, served, monkeypatch):
    monkeypatch.setattr(cuda_classes, "_THREADS", 64)
    # neither are whole vectors, and classes of queries are more than are listed at a time
    check(KERNELS[name], points("normal", 1, 1203, 1301, 2, 32, HALF))


@pytest.mark.parametrize("least", [1, 3, 5])
@pytest.mark.parametrize("threads", [64, 1024])
def test_rounds_end_where_waves_are_full(threads, least):
    # a hundred heads of three lines, of which ten fit; eight lines are walked at a time
    heads, dims, size, wave = 100, 3, 7, 8
    counts = torch.full((heads, dims), size, dtype=torch.int32)
    offsets = torch.empty(heads, dims, dtype=torch.int64)
    limits = torch.empty(heads + 1, dtype=torch.int32)
    defines = ("BFLOAT", 0), ("LONG", 0), ("THREADS", threads)
    EmulatedKernel(cuda_classes.CLASSES, "divide_rounds", defines)(
        (1,), threads, counts, None, None, offsets, None, limits, heads, dims, 10 * dims * size, heads, wave, least
    )
    firsts = limits.unique().tolist()
    sizes = [after - before for before, after in pairwise(firsts)]
    # eight heads are three waves; those at the begin of a part that threads look at may have another number
    assert sum(sizes) == heads
    assert max(sizes) <= 10
    assert min(sizes[:-1]) >= least
    assert sizes.count(8) >= 10
    for first, after in pairwise(firsts):
        assert offsets[first:after].flatten().equal(size * torch.arange((after - first) * dims))


def test_rounds_have_room_for_heads_of_any_size():
    heads, dims = 40, 2
    counts = torch.randint(1, 60, (heads, dims), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    key_counts, capacity = counts.flip(0).contiguous(), 4 * 60 * dims
    offsets, key_offsets = (torch.empty(heads, dims, dtype=torch.int64) for _ in range(2))
    limits = torch.empty(21, dtype=torch.int32)
    defines = ("BFLOAT", 0), ("LONG", 0), ("THREADS", 64)
    EmulatedKernel(cuda_classes.CLASSES, "divide_rounds", defines)(
        (1,), 64, counts, key_counts, None, offsets, key_offsets, limits, heads, dims, capacity, 20, 6, 2
    )
    firsts = limits.unique().tolist()
    assert limits[-1] == heads
    for first, after in pairwise(firsts):
        mine = torch.stack([counts[first:after], key_counts[first:after]], -1).flatten().long()
        starts = torch.stack([offsets[first:after], key_offsets[first:after]], -1).flatten()
        assert starts.equal(mine.cumsum(0) - mine)
        assert mine.sum() <= capacity


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=["float16", "bfloat16"])
def test_all_numbers_have_their_code(dtype):
    # every number beside another one, in both places
    bits = torch.arange(1 << 16, dtype=torch.int32)
    both = torch.stack([torch.stack([bits, bits.flip(0)], 1), torch.stack([bits.roll(7), bits], 1)])
    codes, unfit = torch.empty(2, 2, 1 << 16, dtype=torch.int16), torch.zeros(2, dtype=torch.int32)
    defines = ("BFLOAT", int(dtype == BRAIN)), ("LONG", 0), ("THREADS", 64)
    EmulatedKernel(cuda_classes.CLASSES, "spread", defines)(
        (2 << 10,), 256, both.to(torch.uint16).view(dtype), codes, unfit, 1 << 16, 2, 1 << 16, 1, 0
    )
    numbers = both.to(torch.uint16).view(dtype).double()
    assert unfit.equal((~numbers.isfinite()).sum((1, 2), dtype=torch.int32))
    # zeros of both signs, and what is no number, have the code of zero; others are in their order
    found = codes.to(torch.int32).transpose(1, 2) & 0xFFFF
    special = ~numbers.isfinite() | (numbers == 0)
    assert (found[special] == 1 << 15).all()
    order = numbers[~special].argsort(stable=True)
    assert found[~special][order].diff().min() >= 0
    assert found[~special].unique().numel() == numbers[~special].unique().numel()


def test_a_gpu_with_little_shared_memory(served, monkeypatch):
    monkeypatch.setattr(room, "device", lambda device: room.Device(2, 50 << 20, (18 << 10) + 512))
    monkeypatch.setattr(cuda_classes, "_shared", lambda terms, width, shared: 0)
    check("add_laplace", points("normal", 1, 150, 600, 2, 64, HALF))


def test_tensors_that_begin_anywhere(served):
    query, key, value = points("normal", 2, 41, 51, 2, 6, HALF)
    moved = [torch.cat([part.flatten()[:1], part.flatten()])[1:].view(part.shape) for part in (query, key, value)]
    assert all(part.data_ptr() % 4 for part in moved)
    check("add_laplace", moved)


def test_what_is_no_number_stays_in_its_head(served):
    given = points("normal", 6, 40, 50, 2, 8, HALF)
    expected = sortattn.kernel_attention(*given, "add_laplace", backend="sorted")
    (query, key, value), spoilt = given, torch.tensor([1, 3, 4])
    query[1, 3, 1], key[3, 4, 0], value[4, 5, 6] = float("inf"), float("nan"), float("-inf")
    output = sortattn.kernel_attention(query, key, value, "add_laplace", backend="sorted")
    assert output[spoilt].isnan().all()
    rest = torch.tensor([0, 2, 5])
    assert output[rest].equal(expected[rest])


def test_zeros_of_both_signs_are_one_class(served):
    query, key, value = points("normal", 1, 40, 50, 1, 8, HALF)
    query[:, ::3], key[:, ::2] = -0.0, 0.0
    query[:, ::6] = 0.0
    for name in ("add_riesz", "add_laplace", "add_bump"):
        output = sortattn.kernel_attention(query, key, value, name, backend="sorted")
        assert output[:, 3].equal(output[:, 6])


def test_a_query_that_sees_no_key_gets_zeros(served):
    query, key, value = points("apart", 1, 40, 50, 1, 8, HALF)
    output = sortattn.kernel_attention(query, key, value, "add_bump", bandwidth=0.1, backend="sorted")
    assert not output[query[:, :, 0] > 0].any()


@pytest.fixture
def wound(monkeypatch):
    """How many cells each line of a call has that is wound, and which queries are summed once more."""
    cells, unsure = [], []
    wind, mend = cuda_coil.wind, cuda_coil.mend

    def winding(*arguments, **options):
        windings = wind(*arguments, **options)
        cells.extend(windings.view(torch.int32)[..., 3].flatten().tolist())
        return windings

    def mending(*arguments):
        unsure.append(arguments[-2].clone())
        mend(*arguments)

    monkeypatch.setattr(cuda_coil, "wind", winding)
    monkeypatch.setattr(cuda_coil, "mend", mending)
    return cells, unsure


@pytest.mark.parametrize(("dtype", "far"), [(HALF, -6e4), (BRAIN, -1e8), (BRAIN, -3e38)])
@pytest.mark.parametrize("name", ["add_laplace", "matern32"])
def test_a_key_far_away_costs_the_others_no_digits(name, dtype, far, served):
    query, key, value = points("normal", 1, 60, 600, 1, 40, dtype)
    # these are among the keys of one stretch with it
    query, key[0, 5] = query / 8 - 3, far
    check(KERNELS[name], (query, key, value), bandwidth=0.3 if dtype == HALF else 1.0)


@pytest.mark.parametrize("name", KERNELS)
def test_keys_that_are_masked_need_not_be_near_others(name, served):
    query, key, value = points("normal", 1, 60, 600, 1, 40, HALF)
    # the mean of all, where masked ones are put, is far from each
    key[0, ::2], key[0, 1::2] = key[0, ::2] + 30, key[0, 1::2] - 30
    mask = torch.arange(600)[None] % 3 > 0
    check(KERNELS[name], (query / 2, key, value), bandwidth=32.0 if name == "add_bump" else 1.0, key_mask=mask)


def test_an_infinite_number_of_bandwidths_is_far(served):
    query, key, value = points("normal", 1, 20, 30, 1, 8, HALF)
    key[0, :20] = query[0]
    check("add_laplace", (query, key, value), bandwidth=1e-39)


def test_keys_too_far_to_have_a_cell_are_on_no_wound_line(served, wound):
    query, key, value = points("normal", 1, 60, 600, 1, 40, BRAIN)
    key[0, 7], query[0, 3] = 4e9, 1e12
    check("add_bump", (query, key, value))
    assert wound[0] == [0]


def test_queries_between_clusters_see_nothing(served, wound):
    # with these numbers sums that should be zero are not, and positive
    generator = torch.Generator().manual_seed(4)
    value = torch.randn(1, 5000, 40, generator=generator).to(BRAIN)

    def between(low, high, some):
        return 1.25 * (low + (high - low) * torch.rand(1, some, 1, generator=generator)).to(BRAIN)

    key = torch.cat([between(0.6, 0.9, 2500), between(5.6, 5.9, 2500)], 1)
    query = torch.cat([between(2.2, 3.8, 60), between(0.6, 0.9, 1500)], 1)
    output = sortattn.kernel_attention(query, key, value, "add_bump", bandwidth=1.25, backend="sorted")
    assert wound[0] == [6]
    assert not output[:, :60].any()


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_a_few_keys_may_be_far_from_all_others(dtype, masked, served, wound):
    query, key, value = points("normal", 1, 300, 600, 2, 40, dtype)
    # seen by queries that see no other key, by some that do, and by none; in cells that are farther away than there are
    far = torch.tensor([-300.0, -7.5, 6.25, 8.0, 1000.0])
    key[0, 40:45, 0], key[0, 70:75, 1] = far, far
    query[0, 10:15, 0], query[0, 15:20] = far + 0.25, far[:, None]
    query[0, 20:25, 1] = far - 0.75
    mask = {"key_mask": torch.arange(600)[None] % 5 > 0} if masked else {}
    if masked:
        key[0, 45, 0] = 1000.0
    check("add_bump", (query, key, value), **mask)
    assert wound[0] == [6, 6]


def test_lines_with_many_keys_far_from_others_are_not_wound(served, wound):
    query, key, value = points("normal", 1, 100, 600, 2, 40, HALF)
    key[0, :50, 1] += 100
    check("add_bump", (query, key, value))
    assert wound[0] == [6, 0]


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("keys", "first", "last"), [(1, -0.95, 0.95), (3, -0.9, 2.9)], ids=["one place", "three places"]
)
def test_slopes_keep_their_digits_where_keys_are_tied(keys, first, last, dtype, served, wound):
    """Then a stretch is most of the circle, and what a class sees is far from where its slopes begin."""
    query, key, value = points("normal", 1, 200, 600, 1, 40, dtype)
    generator = torch.Generator().manual_seed(3)
    key[:] = 1.25 * torch.randint(0, keys, key.shape, generator=generator)
    query[:] = 1.25 * (first + (last - first) * torch.rand(query.shape, generator=generator))
    check("add_bump", (query, key, value))
    # means of values that leave no room for more
    check("add_bump", (query, key, value.float().abs().clamp(max=1).mul(1000).add(64000).to(dtype)))
    assert wound[0][0] > 0


@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=["float16", "bfloat16"])
def test_queries_that_see_little_of_what_is_near_are_summed_key_by_key(dtype, served, wound):
    query, key, value = points("normal", 1, 1000, 900, 1, 40, dtype)
    # of nine hundred keys between zero and one bandwidth all but one or two are just out of sight, or all of them
    generator = torch.Generator().manual_seed(3)
    query, key = (1.25 * torch.rand(1, n, 1, generator=generator).to(dtype) for n in (1000, 900))
    query[0, :6, 0] = torch.tensor([-1.245, -1.24, 2.49, 2.495, -1.25, 2.5])
    check("add_bump", (query, key, value))
    cells, (unsure,) = wound
    assert cells[0] in (1, 2)
    assert unsure[0, :4].all()
    assert unsure.sum() < 20


@pytest.mark.parametrize("bandwidth", [1.5, 0.3, 1e-3, 1e-38])
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=["float16", "bfloat16"])
def test_all_numbers_of_sixteen_bits_in_their_order_around_the_circle(dtype, bandwidth):
    circle = cuda_spool._circle(dtype, bandwidth, torch.device("cpu"))
    spots, turned = circle[: 2 << 16].view(-1, 2), circle[2 << 16 :].view(torch.uint16).int()
    parts, cells = spots[:, 0].view(torch.float32), spots[:, 1]
    assert parts.diff().min() >= 0
    assert parts.min() >= 0
    assert parts.max() < 1
    assert turned.sort().values.equal(torch.arange(1 << 16, dtype=torch.int32))
    # codes are in the order of the numbers, and that of zero is in the middle
    numbers = torch.tensor([0.0, 0.25, -0.25, 2.0, -60.0], dtype=dtype)
    bits = numbers.view(torch.int16).int() & 0xFFFF
    places = turned[torch.where(bits >= 1 << 15, 0xFFFF - bits, bits + (1 << 15))]
    period = torch.tensor(bandwidth, dtype=torch.float32).double()
    exact = numbers.double() / period
    near = exact.abs() < 1e9
    assert cells[places][near].equal(exact.floor().int()[near])
    assert torch.allclose(parts[places][near].double(), (exact - exact.floor())[near], atol=1e-7)


@pytest.mark.parametrize("way", ["long", "learned", "wide"])
def test_other_lines_are_walked_by_classes(way, served, monkeypatch):
    query, key, value = points("normal", 1, 90, 100, 2, 70 if way == "wide" else 20, HALF)
    if way == "long":
        monkeypatch.setattr(cuda_spool, "LONGEST", {HALF: 99})
    check("add_bump", (query, key, value), bandwidth=torch.tensor(1.25) if way == "learned" else 1.25)
    assert "spool" not in served
    assert {"ascend", "gather"} <= set(served)


@pytest.mark.parametrize("way", ["gradient", "jumps", "negative", "vanishing", "short", "ordered"])
def test_other_calls_are_walked_as_before(way, served, monkeypatch):
    query, key, value = points("normal", 1, 40, 50, 2, 8, HALF)
    kernel = "add_laplace"
    if way == "jumps":
        kernel = BOX.kernel
    if way == "negative":
        kernel = sortattn.PolynomialExponential([1.0, -1.0])
    if way == "vanishing":
        kernel = sortattn.PolynomialExponential([0.0, 0.0, 1.0])
    if way == "short":
        monkeypatch.setattr(classes, "LEAST", {HALF: (41, 1)})
    if way == "gradient":
        value.requires_grad_()
    if way == "ordered":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    sortattn.kernel_attention(query, key, value, kernel, backend="sorted")
    assert not {"rank_classes", "gather"} & set(served)
