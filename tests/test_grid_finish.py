"""The last step of causal calls whose tables stay in registers: compiled, and emulated beside its definition."""

import pytest
import torch

from .cases import relative_error
from .emulation.emulator import AVAILABLE, EmulatedKernel
from .nvrtc import machine_code

pytest.importorskip("triton")

from sortattn.ops.grid.gpu import finish, march

HEADS, COUNT, PADDED, EPSILON = 3, 31, 32, 1e-3


@pytest.mark.parametrize("kind", ["riesz", "bump", "laplace"])
@pytest.mark.parametrize("dims", [16, 64, 128])
@pytest.mark.parametrize(("padded", "short"), [(32, False), (64, True)])
def test_it_compiles_as_for_a_user(dims, padded, short, kind):
    pytest.importorskip("cuda.core")
    chunk = march.CHUNKS[kind]
    kernel = finish.kernel_of(dims, padded, chunk, short, kind)
    # as many blocks as it is compiled for, each with 1 KiB for the system, fit into the memory of a multiprocessor
    blocks = 128 // chunk * ((4 if dims < 128 else 3) - (kind == "laplace"))
    assert blocks * (finish.shared_of(dims, chunk, kind) + 1024) <= 228 << 10
    for architecture in ("sm_90", "sm_120"):
        assert b"finish" in machine_code(kernel.source, kernel.defines, architecture, entry="finish", optimised=True)


def drawn(length, dims, size, dtype, shift):
    """Points of three heads, what is known of their nodes, and parts of sums: two of the first head, four of others."""
    generator = torch.Generator().manual_seed(0)
    query, key = (size * torch.randn(HEADS, length, dims, generator=generator) for _ in range(2))
    query, key = ((part + shift).to(dtype) for part in (query, key))
    value = torch.randn(HEADS, length, 64, generator=generator).half()
    nodes = torch.zeros(HEADS, dims, PADDED)
    both = torch.cat([query, key], 1).float()
    nodes[..., 1], nodes[..., COUNT // 2], nodes[..., COUNT - 2] = both.amin(1), both.median(1)[0], both.amax(1)
    sums = (100 * torch.randn(10, length, 64, generator=generator)).half()
    totals, unscale = 10 * torch.rand(10, length, generator=generator), torch.rand(10, generator=generator)
    return query, key, value, nodes, sums, totals, unscale


def by_definition(query, key, value, tau, chunk, kind):
    """What the keys of its own chunk give a query, and ones in their place, in float64."""
    query, key = (part.double() / tau.double()[:, None, None] for part in (query, key))
    if kind == "riesz":
        sizes = [part.abs().sum(2) for part in (query, key)]
        scores = sizes[0][:, :, None] + sizes[1][:, None] + query.shape[2] * EPSILON - torch.cdist(query, key, p=1)
    else:
        apart = (query[:, :, None] - key[:, None]).abs()
        scores = ((1 - apart).clamp(min=0) if kind == "bump" else torch.exp(-apart)).sum(3)
    place = torch.arange(query.shape[1])
    scores *= (place[:, None] >= place) & (place[:, None] // chunk == place // chunk)
    return scores @ value.double(), scores.sum(2)


def finished(
    length, dims, chunk, size=1.0, dtype=torch.float16, normalise=True, units=True, flags=(0, 0, 0), others=(0, 0, 0),
    kind="riesz", shift=0.0, moved=(),
):  # fmt: skip
    """The output and the sums of weights: of the kernel, and by the definition.

    Points have a `shift`, and in `moved` are queries (0) or keys (1) of every head, dimensions, and what is there then.
    """
    query, key, value, nodes, sums, totals, unscale = drawn(length, dims, size, dtype, shift)
    for side, place, where, to in moved:
        (query, key)[side][:, place, where] = to
    power = torch.tensor([1.0, 0.25, 1.0]) if dtype == torch.bfloat16 else None
    if not units:
        sums.zero_(), totals.zero_()
    # points closer to each other than the least float16 have a bandwidth of their size
    tau = torch.tensor([0.5, 1.0, 3.0]) * min(size, 1.0)
    out, weights = torch.empty(HEADS, length, 64, dtype=dtype), torch.empty(HEADS, length)
    kernel = finish.kernel_of(dims, PADDED, chunk, dtype == torch.bfloat16, kind)
    raised = [torch.tensor(heads, dtype=torch.int32) for heads in (flags, others)]
    emulated = EmulatedKernel(kernel.source, kernel.entry, kernel.defines, "warpgroup.h")
    for first, heads, each, own in ((0, 1, 2, slice(2)), (1, 2, 4, slice(2, None))):
        emulated(
            (-(-length // chunk), heads), chunk, query, key, value, nodes, tau,
            *(part[own].clone() for part in (sums, totals, unscale)), power, *raised,
            out, weights, first, each, length, COUNT, int(normalise), EPSILON,
        )  # fmt: skip
    values = value if power is None else value / power[:, None, None]
    wanted, wanted_weights = by_definition(query, key, values, tau, chunk, kind)
    # in every half of the channels those of a thread stand together
    parts = sums.double().view(10, length, 2, 4, 4, 2).transpose(3, 4).reshape(10, length, 64) * unscale[:, None, None]
    for head, (first, stop) in enumerate(((0, 2), (2, 6), (6, 10))):
        wanted[head] += parts[first:stop].sum(0)
        wanted_weights[head] += totals[first:stop].double().sum(0)
    if normalise:
        wanted /= wanted_weights[..., None]
    return out, weights, wanted, wanted_weights


def bounds(kind, dims, dtype):
    """Of the output and of weights, of scores in halves: roundings of terms and scores, and one of the output."""
    # add_laplace has three roundings to bfloat16 in a term, each 8e-4 on average (2^-9 at most), so 1.4e-3 of it. Those
    # of other dimensions are others: of the sum that is 1.4e-3 sqrt(sum of t^2) / (sum of t), about 2e-3 / sqrt(dims)
    # of normal points with half their deviation as bandwidth, and more for pairs with few terms that count
    more = 3e-3 / dims**0.5 if kind == "laplace" else 0.0
    return {torch.float16: 6e-4, torch.bfloat16: 2.4e-3}[dtype] + more, 3e-4 + more


def assert_as_defined(found, kind, dims, dtype, least=0.0):
    out, weights, wanted, wanted_weights = found
    bound, bound_of_weights = (max(one, least) for one in bounds(kind, dims, dtype))
    for one, other in zip(out, wanted, strict=True):
        assert relative_error(one, other) < bound
    for one, other in zip(weights, wanted_weights, strict=True):
        assert relative_error(one, other) < bound_of_weights


@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 1.0), (torch.float16, 1e4), (torch.bfloat16, 1.0), (torch.bfloat16, 1e9), (torch.bfloat16, 1e-7)],
)
@pytest.mark.parametrize(("length", "dims", "chunk"), [(8, 64, 64), (136, 64, 64), (264, 16, 128), (72, 48, 64)])
def test_pairs_and_parts_are_summed_as_defined(length, dims, chunk, size, dtype, units):
    # of the larger size in float16 heads hold points whose differences are no float16
    assert_as_defined(finished(length, dims, chunk, size, dtype, units=units), "riesz", dims, dtype)


@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
@pytest.mark.parametrize("kind", ["bump", "laplace"])
@pytest.mark.parametrize(("dtype", "units"), [(torch.float16, True), (torch.float16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize(
    ("length", "dims", "chunk"), [(8, 64, 64), (136, 64, 64), (264, 16, 128), (72, 48, 64), (40, 128, 64)]
)
def test_terms_of_differences_are_summed_as_defined(length, dims, chunk, dtype, units, kind):
    assert_as_defined(finished(length, dims, chunk, dtype=dtype, units=units, kind=kind), kind, dims, dtype)


@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
@pytest.mark.parametrize("kind", ["bump", "laplace"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_where_all_points_are_does_not_matter_to_differences(dtype, kind):
    # points of so many digits are the same few in all dimensions, and so are roundings of their exponentials
    least = 1.5e-3 if kind == "laplace" else 0.0
    assert_as_defined(finished(72, 64, 64, dtype=dtype, units=False, kind=kind, shift=100.0), kind, 64, dtype, least)


@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kind", "place"), [("bump", 4e4), ("laplace", 1e3)])
@pytest.mark.parametrize("who", ["query", "key", "both", "both in one dimension"])
def test_points_too_far_out_for_16_bits_change_no_other_chunk(who, kind, place, dtype):
    moved = {
        "query": [(0, 70, 5, place), (0, 75, slice(None), place)],
        "key": [(1, 66, 5, place), (1, 67, slice(None), -place)],
        # far from all others, and close to each other
        "both": [(0, 70, slice(None), place + place / 1024), (1, 66, slice(None), place)],
        "both in one dimension": [(0, 70, 5, place), (1, 66, 5, place)],
    }[who]
    options = {"dtype": dtype, "units": False, "normalise": False, "kind": kind}
    clean, found = (finished(160, 48, 64, **options, moved=some) for some in ((), moved))
    assert_as_defined(found, kind, 48, dtype)
    others = [*range(64), *range(128, 160)]
    assert torch.equal(found[0][:, others], clean[0][:, others])


@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
@pytest.mark.parametrize("kind", ["riesz", "bump", "laplace"])
def test_sums_are_left_as_they_are_where_they_are_asked_for(kind):
    out, weights, wanted, wanted_weights = finished(72, 64, 64, normalise=False, kind=kind)
    bound = bounds(kind, 64, torch.float16)[0]
    assert relative_error(out, wanted) < bound
    assert relative_error(weights, wanted_weights) < bound


@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
@pytest.mark.parametrize("kind", ["riesz", "bump", "laplace"])
def test_heads_with_a_flag_are_no_numbers(kind):
    clean = finished(72, 16, 64, kind=kind)[0]
    # such heads may have points that are none
    moved = [(0, 3, 7, torch.nan), (1, 5, 9, torch.inf)] if kind != "riesz" else []
    found = finished(72, 16, 64, flags=(1, 1, 1), moved=moved, kind=kind)[0]
    assert found.isnan().all()
    found = finished(72, 16, 64, flags=(0, 1, 0), kind=kind)[0]
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    assert finished(72, 16, 64, others=(0, 0, 1), kind=kind)[0][2].isnan().all()
