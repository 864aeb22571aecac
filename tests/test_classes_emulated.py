"""Attention by classes of equal 16-bit coordinates, its CUDA kernels run on the CPU by an emulator."""

import contextlib

import pytest
import torch

import sortattn
from sortattn.cuda import launch
from sortattn.ops.sorted import classes, cuda_classes, room

from .cases import BOX, CASES
from .emulation.emulator import AVAILABLE, listing

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


@pytest.mark.parametrize("kind", ["ties", "shifted", "far", "one sided", "apart", "equal"])
@pytest.mark.parametrize("name", KERNELS)
def test_ties_offsets_and_outliers(name, kind, served):
    check(KERNELS[name], points(kind, 1, 150, 600, 2, 64, HALF))


@pytest.mark.parametrize("name", KERNELS)
def test_narrow_kernels(name, served):
    check(KERNELS[name], points("normal", 1, 150, 600, 2, 64, HALF), bandwidth=0.02)


@pytest.mark.parametrize("name", KERNELS)
def test_masks_groups_and_bandwidths_of_heads(name, served):
    query, key, value = points("normal", 4, 40, 50, 3, 8, HALF)
    mask = torch.rand(1, 50, generator=torch.Generator().manual_seed(4)) < 0.7
    query, key, value = query[None], key[None, ::2], value[None, ::2]
    check(KERNELS[name], (query, key, value), key_mask=mask, enable_gqa=True)
    bandwidth = torch.tensor([0.5, 1.0, 2.0, 1.0])
    check(KERNELS[name], (query, query, query), bandwidth=bandwidth)


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


@pytest.mark.parametrize("way", ["gradient", "jumps", "negative", "short", "ordered"])
def test_other_calls_are_walked_as_before(way, served, monkeypatch):
    query, key, value = points("normal", 1, 40, 50, 2, 8, HALF)
    kernel = "add_laplace"
    if way == "jumps":
        kernel = BOX.kernel
    if way == "negative":
        kernel = sortattn.PolynomialExponential([1.0, -1.0])
    if way == "short":
        monkeypatch.setattr(classes, "LEAST", {HALF: (1, 41)})
    if way == "gradient":
        value.requires_grad_()
    if way == "ordered":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    sortattn.kernel_attention(query, key, value, kernel, backend="sorted")
    assert not {"rank_classes", "gather"} & set(served)
