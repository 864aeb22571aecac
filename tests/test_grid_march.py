"""Causal calls whose tables stay in registers: the kernel for Hopper, compiled, emulated, and on a GPU that has it."""

import importlib
import pkgutil

import pytest
import torch

import sortattn

from .cases import Shape, draw, relative_error
from .emulation.emulator import AVAILABLE, EmulatedKernel
from .nvrtc import machine_code
from .test_cuda_memory import Meter

pytest.importorskip("triton")

from sortattn.ops.grid import gpu
from sortattn.ops.grid.gpu import causal, finish, launch, march, record
from sortattn.ops.grid.gpu.formula import formula
from sortattn.ops.grid.gpu.grid import Grid
from sortattn.ops.grid.gpu.language import STATS
from sortattn.ops.grid.gpu.layout import Layout
from sortattn.ops.grid.gpu.starts import WIDE


@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("padded", [32, 64])
def test_it_compiles_as_for_a_user(padded, tables):
    pytest.importorskip("cuda.core")
    chunk = march.CHUNKS["riesz"]
    kernel = march.kernel_of(padded, tables, chunk, "riesz", False)
    assert kernel.exactly
    assert march.shared_of(padded, tables, chunk, "riesz") <= 227 << 10
    assert b"march" in machine_code(kernel.source, kernel.defines, "sm_90a", entry="march", optimised=True)


def marched(padded, tables, chunk, length, dims, size_of_values=1.0, power=None):
    """What every block of dimensions gives queries of the keys before their chunk: by the kernel, and in float64."""
    generator = torch.Generator().manual_seed(0)
    count, size = padded - 1, 256 * tables // padded
    nodes = torch.linspace(-3, 3, count) + 0.1 * torch.rand(dims, count, generator=generator)
    nodes[:, count // 2] = 0
    nodes = torch.nn.functional.pad(nodes, (0, 1), value=torch.inf)[None].contiguous()
    stats = torch.zeros(1, dims, STATS.value, padded)
    stats[..., -1, 1 : count - 1] = 0.02 * torch.rand(dims, count - 2, generator=generator)
    tau = torch.tensor([1.3])
    query, key = (
        torch.randint(512, 512 * (count - 2), (1, dims, length), dtype=torch.int16, generator=generator)
        for _ in range(2)
    )
    factor = 1.0 if power is None else power
    rows = (size_of_values * factor * torch.randn(1, length, 64, generator=generator)).half()
    chunks = -(-length // chunk)
    starts = 100 * size_of_values * torch.randn(1, chunks, WIDE, generator=generator)
    starts[..., 64:] /= size_of_values
    largest = torch.stack([part.float().abs().max() / factor for part in rows[0].split(chunk)])[None]
    units = dims // size
    out, totals, unscale = torch.empty(units, length, 64).half(), torch.empty(units, length), torch.empty(units)
    found = march.kernel_of(padded, tables, chunk, "riesz", False)
    EmulatedKernel(found.source, found.entry, found.defines, "warpgroup.h")(
        (units, 1), 128 * (tables + 2),
        query, key, rows, nodes, stats, tau, starts, largest, None if power is None else torch.tensor([power]),
        out, totals, unscale, 0, length, dims, count, 1e-3,
    )  # fmt: skip
    # in every half of the channels those of a thread stand together
    sums = out.double().view(units, length, 2, 4, 4, 2).transpose(3, 4).reshape(units, length, 64)
    found = torch.cat([sums * unscale[:, None, None], totals[..., None].double()], 2)

    # what a key adds to the change of F behind a node, see `riesz`
    own, other = ((part[0, :, :, None].double() / 512 - torch.arange(padded)).clamp(0, 1) for part in (query, key))
    cells = nodes[0, :, :count].double() * (2 / tau)
    above, below = cells.clamp(min=0).diff(dim=1)[:, None], cells.clamp(max=0).diff(dim=1)[:, None]
    extra = 2 * stats[0, :, None, -1].double()
    hats = torch.cat([torch.ones(dims, length, 1), other[..., :-1]], 2) - other
    last = count - 1
    adds = above * other[..., :last] - below * (1 - other[..., :last])
    adds += extra[..., 1 : last + 1] * hats[..., 1 : last + 1] - extra[..., :last] * hats[..., :last]
    place = torch.arange(length) // chunk
    pairs = torch.einsum("dqg,dkg->dqk", own[..., :last], adds) * (place[:, None] > place)
    values = torch.cat([rows[0].double() / factor, torch.ones(length, 1)], 1)
    wanted = pairs.unflatten(0, (units, size)).sum(1) @ values
    wanted[0] += (starts.cumsum(1) - starts)[0, place, :65]
    return found, wanted


# one chunk, and a last one that is not full
@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
@pytest.mark.parametrize(
    ("padded", "tables", "chunk", "length", "dims"),
    [(32, 2, 64, 40, 16), (32, 2, 64, 328, 32), (32, 1, 128, 392, 16), (64, 2, 128, 136, 8), (64, 1, 64, 72, 8)],
)
def test_queries_read_what_the_keys_before_their_chunk_have_left(padded, tables, chunk, length, dims):
    found, wanted = marched(padded, tables, chunk, length, dims)
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one[:, :64], other[:, :64]) < 1e-3
        assert relative_error(one[:, 64], other[:, 64]) < 1e-3


@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
@pytest.mark.parametrize(("size", "power"), [(12_000.0, None), (1e-5, None), (1e9, 2.0**-18)])
def test_large_and_small_values_take_no_digits_from_the_weights(size, power):
    found, wanted = marched(32, 1, 128, 4096, 8, size, power)
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one[:, :64], other[:, :64]) < 6e-4
        assert relative_error(one[:, 64], other[:, 64]) < 6e-4


def served(monkeypatch, dtype=torch.float16, length=64, channels=64, count=32, dims=64, name="add_riesz", **other):
    from sortattn.ops.grid.gpu import grid as grid_module

    monkeypatch.setattr(march, "here", lambda device: True)
    monkeypatch.setattr(grid_module, "FAST", True)
    kernel = formula(sortattn.kernels.resolve(name), torch.device("cpu"))
    nodes = torch.zeros(1, dims, Layout(count, dtype).padded)
    grid = Grid(nodes, nodes, torch.ones(1), Layout(count, dtype), kernel)
    query, value = (torch.zeros(1, length, columns, dtype=dtype) for columns in (dims, channels))
    call = {"query": query, "key": query, "value": value, "weight": None, "group": 1} | other
    return march.serves(grid, **call)


def test_it_serves_calls_of_its_kind_alone(monkeypatch):
    for name in ("add_riesz", "add_bump", "add_laplace"):
        assert served(monkeypatch, name=name)
    assert served(monkeypatch, count=64)
    assert served(monkeypatch, dtype=torch.bfloat16)
    assert served(monkeypatch, count=40, dims=16)
    unaligned = torch.zeros(1 + 64 * 64, dtype=torch.float16)[1:].view(1, 64, 64)
    others = (
        {"dtype": torch.float32},
        {"value": torch.zeros(1, 64, 64, dtype=torch.bfloat16)},
        {"length": 65},
        {"length": 0},
        {"channels": 32},
        {"count": 12},
        {"count": 72},
        {"dims": 48, "count": 8},
        {"name": sortattn.PolynomialExponential([1.0, 1.0])},
        {"group": 2},
        {"weight": torch.ones(1, 64)},
        {"query": torch.zeros(1, 32, 64)},
        {"query": unaligned},
        {"key": unaligned},
        {"value": unaligned},
    )
    assert not any(served(monkeypatch, **other) for other in others)


@pytest.mark.parametrize("problems", [1, 8, 33, 48, 66, 100])
@pytest.mark.parametrize("each", [1, 4, 8])
def test_a_last_wave_of_few_blocks_has_smaller_ones(problems, each):
    first = march.divided(problems, each, 132)
    assert 0 <= first <= problems
    if first < problems:
        # full waves, as far as whole heads fill them, and one more
        full = problems * each // 132 * 132
        assert full - each < first * each <= full
        assert (problems - first) * 2 * each <= 132


@pytest.mark.parametrize("padded", [32, 64])
@pytest.mark.parametrize("dims", [16, 48, 64, 128])
def test_waves_have_all_heads_once_and_take_no_more_than_the_inputs(dims, padded):
    each = dims * padded // 512
    for problems in range(1, 200):
        # bytes for a point
        inputs = problems * 2 * (2 * dims + 64)
        turns = list(march.waves(problems, each, 132, inputs // 132))
        assert [n for first, heads, _ in turns for n in range(first, first + heads)] == list(range(problems))
        blocks = [heads * each * 2 // tables for _, heads, tables in turns]
        assert all(number * 132 <= inputs or number <= 132 for number in blocks)
        # as many full waves as with all heads at a time, but for what whole heads leave of each
        assert sum(-(-number // 132) for number in blocks) <= -(-problems // (132 // each)) + (problems * each > 132)


class Nothing:
    """In place of a kernel."""

    def __getitem__(self, programs):
        return self

    def __call__(self, *arguments, **options):
        return None


@pytest.mark.parametrize("length", [4096, 16_384])
@pytest.mark.parametrize("count", [32, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_a_call_takes_no_more_than_twice_its_inputs_and_the_output(name, dtype, count, length, monkeypatch):
    for part in pkgutil.iter_modules(gpu.__path__):
        step = importlib.import_module(f"{gpu.__name__}.{part.name}")
        for kernel in [part for part in dir(step) if part.endswith("_kernel")]:
            monkeypatch.setattr(step, kernel, Nothing())
        if hasattr(step, "FAST"):
            monkeypatch.setattr(step, "FAST", True)
    for step in (march, finish):
        monkeypatch.setattr(step, "direct", lambda kernel, known: Nothing())
    monkeypatch.setattr(march, "here", lambda device: True)
    monkeypatch.setattr(march, "processors", lambda device: 132)
    # memory that nobody touches
    query, key, value = (torch.empty(48, length, 64, dtype=dtype) for _ in range(3))
    kernel = formula(sortattn.kernels.resolve(name), query.device)
    with Meter(query, key, value) as meter:
        found = causal.forward(query, key, value, None, torch.ones(48), kernel, count, 1, True)
    inputs, output = 3 * value.nbytes, found.out.nbytes
    # nodes and what is known of them do not grow with the length
    tables = found.grid.nodes.nbytes + found.grid.stats.nbytes
    assert output + inputs // 2 < meter.most < output + 2 * inputs + 2 * tables


def test_its_launches_are_part_of_recorded_calls():
    launched = []

    def kernel(grid, block, *arguments, shared):
        launched.append((grid, block, arguments, shared))

    with record.Recorder() as recorder:
        launch.direct(kernel, launch.Known())((4, 2), 512, "address", 7, shared=99)
        assert recorder.complete
        ((compiled, programs, arguments),) = recorder.launches
        record.straight(compiled, programs)("stream", *arguments)
        assert launched == [((4, 2), 512, ("address", 7), 99)] * 2
        launch.direct(kernel, None)((4, 2), 512, shared=99)
        assert not recorder.complete


@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [32, 64])
# of forty heads most have blocks of twice the size
@pytest.mark.parametrize(("length", "heads"), [(72, 3), (136, 3), (264, 3), (1000, 3), (1000, 40)])
def test_calls_on_hopper_are_near_the_definition_and_have_the_same_bits(
    count, length, heads, dtype, name, device, monkeypatch
):
    if device == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    called, run = [], march.march
    monkeypatch.setattr(march, "march", lambda *what: called.append(0) or run(*what))
    points = [part.to(device) for part in draw(Shape((heads,), length, length, 64, 64), dtype)]
    if dtype == torch.bfloat16:
        # more than a float16 holds, and less
        points[2][1] *= 1e9
        points[2][2] *= 1e-9
    call = {"kernel": name, "is_causal": True}
    exact = sortattn.kernel_attention(*(part.double() for part in points), **call, backend="tiled")
    outputs = [sortattn.kernel_attention(*points, **call, backend=f"grid:{count}") for _ in range(4)]
    assert called
    # that of the nodes, and of one rounding of the output
    most = ({32: 2e-3, 64: 1e-3}[count] + (2e-3 if dtype == torch.bfloat16 else 0)) * (
        4 if name == "add_laplace" else 1
    )
    assert all(relative_error(one, other) < most for one, other in zip(outputs[0], exact, strict=True))
    assert all(torch.equal(output, outputs[0]) for output in outputs)
