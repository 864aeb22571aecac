"""Causal calls of add_bump and add_laplace with tables in registers: F at the nodes, emulated beside its definition."""

import math

import pytest
import torch

from .cases import relative_error
from .emulation.emulator import AVAILABLE, EmulatedKernel
from .levels import VALUES, key_weights
from .nvrtc import machine_code

pytest.importorskip("triton")

from sortattn.ops.grid.gpu import march
from sortattn.ops.grid.gpu.language import STATS

TAU = {"bump": 1.3, "laplace": 0.5}


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("padded", [32, 64])
@pytest.mark.parametrize("kind", ["bump", "laplace"])
def test_it_compiles_as_for_a_user(kind, padded, tables, short):
    pytest.importorskip("cuda.core")
    kernel = march.kernel_of(padded, tables, march.CHUNKS[kind], kind, short)
    assert march.shared_of(padded, tables, march.CHUNKS[kind], kind) <= 227 << 10
    assert b"march" in machine_code(kernel.source, kernel.defines, "sm_90a", entry="march", optimised=True)


def marched(kind, padded, tables, chunk, length, dims, short=False, offset=0.0, size_of_values=1.0, wide=False):
    """What every block of dimensions gives queries of the keys before their chunk: by the kernel, and in float64."""
    generator = torch.Generator().manual_seed(0)
    count, size, dtype = padded - 1, 256 * tables // padded, torch.bfloat16 if short else torch.float16
    nodes = (torch.linspace(-3, 3, count) + 0.1 * torch.rand(dims, count, generator=generator)).sort(1).values
    if wide:
        # a cell of many bandwidths, as beside an outlier
        nodes[:, count // 2 :] += 500
    nodes += offset
    stats = torch.zeros(1, dims, STATS.value, padded)
    stats[..., -1, 1 : count - 1] = 0.02 * torch.rand(dims, count - 2, generator=generator)
    key = 1.2 * torch.randn(1, length, dims, generator=generator)
    if wide:
        key[:, ::3] += 500
    key = (key + offset).to(dtype)
    code = torch.randint(512, 512 * (count - 2), (1, dims, length), dtype=torch.int16, generator=generator)
    places, factor = code, torch.ones(1, dims, length)
    if kind == "laplace":
        factor = 0.5 + 0.5 * torch.rand(1, dims, length, generator=generator)
        bits = (factor * 32768).half().view(torch.int16).int()
        places, factor = bits << 16 | code, (factor * 32768).half().float() / 32768
    rows = (size_of_values * torch.randn(1, length, 64, generator=generator)).half()
    largest = torch.stack([part.float().abs().max() for part in rows[0].split(chunk)])[None]
    units = dims // size
    out, totals, unscale = torch.empty(units, length, 64).half(), torch.empty(units, length), torch.empty(units)
    found = march.kernel_of(padded, tables, chunk, kind, short)
    padding = torch.nn.functional.pad(nodes, (0, 1), value=torch.inf)[None].contiguous()
    EmulatedKernel(found.source, found.entry, found.defines, "warpgroup.h")(
        (units, 1), 128 * (tables + 2),
        places, key, rows, padding, stats, torch.tensor([TAU[kind]]), None, largest, None,
        out, totals, unscale, 0, length, dims, count, 1e-3,
    )  # fmt: skip
    # in every half of the channels those of a thread stand together
    sums = out.double().view(units, length, 2, 4, 4, 2).transpose(3, 4).reshape(units, length, 64)
    found = torch.cat([sums * unscale[:, None, None], totals[..., None].double()], 2)

    extra = stats[0, :, -1, :count].double()
    tau = torch.full((dims, 1), TAU[kind], dtype=torch.float64)
    adds = key_weights(kind, nodes.double(), key[0].T.double(), extra, tau)
    hats = (1 - (code[0, :, :, None].double() / 512 - torch.arange(count)).abs()).clamp(min=0)
    place = torch.arange(length) // chunk
    pairs = torch.einsum("dqg,dkg->dqk", hats * factor[0, :, :, None], adds) * (place[:, None] > place)
    values = torch.cat([rows[0].double(), torch.ones(length, 1)], 1)
    return found, pairs.unflatten(0, (units, size)).sum(1) @ values


# weights, tables and what is left of the sums are halves: each is rounded once, to 2^-12 of itself as a mean
TOLERANCE = 3 * 2**-12


# one chunk, and a last one that is not full
@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
@pytest.mark.parametrize("kind", ["bump", "laplace"])
@pytest.mark.parametrize(
    ("padded", "tables", "chunk", "length", "dims", "short"),
    [
        (32, 2, 64, 40, 16, False),
        (32, 2, 64, 328, 32, False),
        # of add_laplace two of these chunks fit into shared memory, not three
        (32, 2, 128, 520, 16, False),
        (32, 1, 128, 392, 16, True),
        (64, 2, 128, 136, 8, True),
        (64, 1, 64, 72, 8, False),
    ],
)
def test_queries_read_what_the_keys_before_their_chunk_have_left(kind, padded, tables, chunk, length, dims, short):
    found, wanted = marched(kind, padded, tables, chunk, length, dims, short)
    if length > chunk:
        assert wanted.abs().max() > 1
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one[:, :64], other[:, :64]) < TOLERANCE
        assert relative_error(one[:, 64], other[:, 64]) < TOLERANCE


@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
@pytest.mark.parametrize("kind", ["bump", "laplace"])
@pytest.mark.parametrize("case", [{"offset": 100.0}, {"wide": True}, {"size_of_values": 1e4}, {"size_of_values": 1e-5}])
def test_offsets_outliers_and_sizes_of_values_take_no_digits(kind, case):
    found, wanted = marched(kind, 32, 1, 64, 200, 8, **case)
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one[:, :64], other[:, :64]) < TOLERANCE
        assert relative_error(one[:, 64], other[:, 64]) < TOLERANCE


@pytest.mark.parametrize("kind", ["bump", "laplace"])
def test_the_correction_has_the_area_of_hats(kind):
    nodes = torch.linspace(-2, 2, 41, dtype=torch.float64)[None]
    extra = torch.full((1, 41), 0.004, dtype=torch.float64)
    key = torch.linspace(-0.5, 0.5, 20001, dtype=torch.float64)[None]
    tau = TAU[kind]
    found = key_weights(kind, nodes, key, extra, torch.tensor([[tau]], dtype=torch.float64))[0, :, 20]
    more = found - VALUES[kind]((nodes[0, 20] - key[0]) / tau)
    area = more.mean() / tau
    # one of height c = 2 extra is c h wide
    assert math.isclose(area.item(), 2 * 0.004 * 0.1 / tau, rel_tol=0.03)
