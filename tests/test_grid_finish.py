"""The last step of causal calls whose tables stay in registers: compiled, and emulated beside its definition."""

import pytest
import torch

from .cases import relative_error
from .emulation.emulator import AVAILABLE, EmulatedKernel
from .nvrtc import machine_code

pytest.importorskip("triton")

from sortattn.ops.grid.gpu import finish, march

HEADS, COUNT, PADDED, EPSILON = 3, 31, 32, 1e-3


@pytest.mark.parametrize("dims", [16, 64, 128])
@pytest.mark.parametrize(("padded", "short"), [(32, False), (64, True)])
def test_it_compiles_as_for_a_user(dims, padded, short):
    pytest.importorskip("cuda.core")
    kernel = finish.kernel_of(dims, padded, march.CHUNK, short)
    # with less than 128 dimensions four blocks fit into the shared memory of a multiprocessor
    assert finish.shared_of(dims, march.CHUNK) <= 227 << 10 >> (2 if dims < 128 else 1)
    for architecture in ("sm_90", "sm_120"):
        assert b"finish" in machine_code(kernel.source, kernel.defines, architecture, entry="finish", optimised=True)


def drawn(length, dims, size, dtype):
    """Points of three heads, what is known of their nodes, and parts of sums: two of the first head, four of others."""
    generator = torch.Generator().manual_seed(0)
    query, key = ((size * torch.randn(HEADS, length, dims, generator=generator)).to(dtype) for _ in range(2))
    value = torch.randn(HEADS, length, 64, generator=generator).half()
    nodes = torch.zeros(HEADS, dims, PADDED)
    both = torch.cat([query, key], 1).float()
    nodes[..., 1], nodes[..., COUNT - 2] = both.amin(1), both.amax(1)
    sums = (100 * torch.randn(10, length, 64, generator=generator)).half()
    totals, unscale = 10 * torch.rand(10, length, generator=generator), torch.rand(10, generator=generator)
    return query, key, value, nodes, sums, totals, unscale


def by_definition(query, key, value, tau, chunk):
    """What the keys of its own chunk give a query, and ones in their place, in float64."""
    query, key = (part.double() / tau.double()[:, None, None] for part in (query, key))
    sizes = [part.abs().sum(2) for part in (query, key)]
    scores = sizes[0][:, :, None] + sizes[1][:, None] + query.shape[2] * EPSILON - torch.cdist(query, key, p=1)
    place = torch.arange(query.shape[1])
    scores *= (place[:, None] >= place) & (place[:, None] // chunk == place // chunk)
    return scores @ value.double(), scores.sum(2)


def finished(
    length, dims, chunk, size=1.0, dtype=torch.float16, normalise=True, units=True, flags=(0, 0, 0), others=(0, 0, 0)
):
    """The output and the sums of weights: of the kernel, and by the definition."""
    query, key, value, nodes, sums, totals, unscale = drawn(length, dims, size, dtype)
    power = torch.tensor([1.0, 0.25, 1.0]) if dtype == torch.bfloat16 else None
    if not units:
        sums.zero_(), totals.zero_()
    # points closer to each other than the least float16 have a bandwidth of their size
    tau = torch.tensor([0.5, 1.0, 3.0]) * min(size, 1.0)
    out, weights = torch.empty(HEADS, length, 64, dtype=dtype), torch.empty(HEADS, length)
    kernel = finish.kernel_of(dims, PADDED, chunk, dtype == torch.bfloat16)
    raised = [torch.tensor(heads, dtype=torch.int32) for heads in (flags, others)]
    EmulatedKernel(kernel.source, kernel.entry, kernel.defines, "warpgroup.h")(
        (-(-length // chunk), HEADS), chunk, query, key, value, nodes, tau, sums, totals, unscale, power, *raised,
        out, weights, 1, 2, length, COUNT, int(normalise), EPSILON,
    )  # fmt: skip
    values = value if power is None else value / power[:, None, None]
    wanted, wanted_weights = by_definition(query, key, values, tau, chunk)
    # in every half of the channels those of a thread stand together
    parts = sums.double().view(10, length, 2, 4, 4, 2).transpose(3, 4).reshape(10, length, 64) * unscale[:, None, None]
    for head, (first, stop) in enumerate(((0, 2), (2, 6), (6, 10))):
        wanted[head] += parts[first:stop].sum(0)
        wanted_weights[head] += totals[first:stop].double().sum(0)
    if normalise:
        wanted /= wanted_weights[..., None]
    return out, weights, wanted, wanted_weights


@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 1.0), (torch.float16, 1e4), (torch.bfloat16, 1.0), (torch.bfloat16, 1e9), (torch.bfloat16, 1e-7)],
)
@pytest.mark.parametrize(("length", "dims", "chunk"), [(8, 64, 64), (136, 64, 64), (264, 16, 128), (72, 48, 64)])
def test_pairs_and_parts_are_summed_as_defined(length, dims, chunk, size, dtype, units):
    # of the larger size in float16 heads hold points whose differences are no float16
    out, weights, wanted, wanted_weights = finished(length, dims, chunk, size, dtype, units=units)
    # halves: two roundings of terms and scores; one of the output
    for one, other in zip(out, wanted, strict=True):
        assert relative_error(one, other) < {torch.float16: 6e-4, torch.bfloat16: 2.4e-3}[dtype]
    for one, other in zip(weights, wanted_weights, strict=True):
        assert relative_error(one, other) < 3e-4


@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
def test_sums_are_left_as_they_are_where_they_are_asked_for():
    out, weights, wanted, wanted_weights = finished(72, 64, 64, normalise=False)
    assert relative_error(out, wanted) < 6e-4
    assert relative_error(weights, wanted_weights) < 6e-4


@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
def test_heads_with_a_flag_are_no_numbers():
    clean = finished(72, 16, 64)[0]
    found = finished(72, 16, 64, flags=(0, 1, 0))[0]
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    assert finished(72, 16, 64, others=(0, 0, 1))[0][2].isnan().all()
