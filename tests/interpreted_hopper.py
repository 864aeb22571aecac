"""Checks of `interpreted` of what is CUDA in a call of the grid, emulated, beside Triton's kernels."""

import contextlib
from unittest import mock

import torch

import sortattn
from sortattn.kernels import resolve
from sortattn.ops.grid.gpu import decay, hopper, launch, order
from sortattn.ops.grid.gpu.formula import formula
from sortattn.ops.grid.gpu.forward import collect
from sortattn.ops.grid.gpu.plan import plan
from sortattn.ops.grid.gpu.tables import Flags
from sortattn.ops.grid.gpu.transform import transform

from . import compiled, surrogate
from .cases import Shape, assert_close, draw
from .emulation.emulator import EmulatedKernel


@contextlib.contextmanager
def emulated():
    """Calls are served by CUDA, as on a GPU with one multiprocessor; gives the names of the kernels that ran."""
    ran = []

    def direct(found, known):
        kernel = EmulatedKernel(found.source, found.entry, found.defines, "warpgroup.h")

        def run(grid, block, *arguments, shared, boxes=None):
            ran.append(found.entry)
            kernel(grid, block, *arguments, boxes=boxes)

        return launch.direct(run, known)

    here = {"here": lambda device: True, "processors": lambda device: 1, "direct": direct}
    with (
        mock.patch.multiple(hopper, **here),
        mock.patch.multiple(decay, compiles=lambda device: True, direct=direct),
        mock.patch.multiple(order, compiles=lambda device: True, direct=direct),
    ):
        yield ran


def _points(dims, dtype, keys=300):
    """Queries and keys `(2, N, dims)`, and rows; from the ninth dimension on some bins have two nodes."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 70, dims), (2, keys, dims), (2, keys, 64))
    query, key, rows = (torch.randn(*shape, generator=generator) for shape in shapes)
    key[0, 7, 8] = 100
    key[..., 9] = key[..., 9] / 100 + 5 * (key[..., 10] > 0)
    key[..., 11] = 0.3
    return query.to(dtype), key.to(dtype), rows.to(dtype)


def _grid(query, key, name, tau, count):
    """The nodes of a call with two heads."""
    flags = Flags(*(torch.zeros(2, dtype=torch.int32) for _ in range(2)), 1)
    return plan(query, key, None, torch.tensor(tau), formula(resolve(name), query.device), count, flags)


def hopper_steps(name, dtype, dims, count, keys=300):
    """Tables beside their definition in float64, and what queries read beside that of Triton."""
    query, key, rows = _points(dims, dtype, keys)
    grid = _grid(query, key, name, [0.5, 1.3], count)
    steps = grid.stats[:, :, 3:5].flatten(2)[..., 2 * count - 1]
    assert steps[:, :8].max() == 1
    assert steps[:, 8:].max() > 1

    largest = torch.zeros(2, dtype=torch.int32)
    with emulated() as ran:
        own = collect(grid, key, rows, None, largest)
    assert ran == ["collect"]
    nodes, wide = grid.nodes[..., :count].double(), grid.bandwidth.double()[:, None, None, None]
    hats = surrogate.weights(key.mT.double(), nodes, wide, grid.formula.exponential)
    # a ramp is the sum of the hats behind it, and the last one of all
    ramps = hats.flip(-1).cumsum(-1).flip(-1)
    # a code is wrong by the 1024th part of a cell, in bfloat16 by the 512th; of factors there are eleven bits, or eight
    bound = 1.5e-3 if dtype == torch.bfloat16 else 5e-4
    for found, wanted in (
        (own.rows, ramps.mT @ rows.double()[:, None]),
        (own.counts[..., None], ramps.mT.sum(-1, keepdim=True)),
    ):
        assert_close(found[:, :, : count - 1], wanted[:, :, 1:], bound)
        assert_close(found[:, :, -1], wanted[:, :, 0], bound)
    assert torch.equal(largest.view(torch.float32), own.rows.abs().amax((1, 2, 3)))

    if grid.factored:
        for apart in (False, True):
            for factor in (None, torch.tensor([-0.3, 2.0])):
                compare_levels(grid, own, factor, apart)


def many_keys():
    """So many that stages are used again, and sums of weights taken off."""
    hopper_steps("add_riesz", torch.float16, 16, 32, keys=1100)
    hopper_steps("add_laplace", torch.bfloat16, 16, 64, keys=4200)


def compare_levels(grid, tables, factor, apart):
    """What queries read of exponentials, by walks and by a product."""
    call = {"changes": True, "factor": factor, "apart": apart}
    wanted = transform(grid, tables, None, None, **call)
    with emulated() as ran:
        found = transform(grid, tables, None, None, **call)
    assert ran == ["change_levels"]
    assert torch.equal(found.unscale, wanted.unscale)
    count = grid.layout.count
    assert_close(found.base.double(), wanted.base.double(), 2e-6)
    one, other = (part.normaliser[:, :, :count].double() for part in (found, wanted))
    assert_close(one, other, 2e-6)
    # however far from all keys, but for what an exponential of -80 loses, and numbers that float32 has not
    assert ((one - other)[..., 0].abs() <= 1e-4 * other[..., 0].abs() + 1e-36).all()
    assert (found.rows[:, :, count - 1 : -1] == 0).all()
    # F at every node, to the rounding of float16, or of all changes before it
    one, other = (
        torch.cat([part.rows[:, :, -1:], part.rows[:, :, : count - 1]], 2).double().cumsum(2)
        for part in (found, wanted)
    )
    assert_close(one, other, 1e-3)
    assert_close(found.rows.double(), wanted.rows.double(), 2e-3)


def far_nodes():
    """Weights at nodes that are far from all keys, and in narrow bandwidths, have their digits."""
    query, key, rows = _points(16, torch.float16)
    query[:, 0] = 40
    for tau in ([1.0, 0.01], [0.1, 100.0]):
        grid = _grid(query, key, "add_laplace", tau, 32)
        compare_levels(grid, collect(grid, key, rows, None, torch.zeros(2, dtype=torch.int32)), None, False)


def few_channels():
    """Channels that fill no block, and more than one, and less nodes than there is room for."""
    query, key, _ = _points(16, torch.float16)
    grid = _grid(query, key, "add_laplace", [0.5, 1.3], 20)
    for channels in (5, 70):
        rows = torch.randn(2, 300, channels, generator=torch.Generator().manual_seed(1)).half()
        tables = collect(grid, key, rows, None, torch.zeros(2, dtype=torch.int32))
        compare_levels(grid, tables, None, False)


def lines_in_order():
    """Lines of all lengths, with ties and infinities, are sorted."""
    generator = torch.Generator().manual_seed(0)
    for power, used in ((8, 256), (8, 130), (9, 512), (10, 1000), (11, 1500), (12, 4096)):
        line = torch.randn(2, 3, 2 << power, generator=generator)
        line[0, 1] = line[0, 1].round()
        line[1, 1, :used:7] = torch.inf
        wanted = line[..., :used].sort(-1).values
        with emulated() as ran:
            assert order.sort_lines(line, used, power, None)
        assert ran == ["sort_lines"]
        assert torch.equal(line[..., :used], wanted)
        assert (line[..., used : 1 << power] == torch.inf).all()


def played_with_cuda():
    """Calls with steps in CUDA are recorded and played too, with the same bits."""
    draws = [draw(Shape((1,), 20, 300, 16, 64), torch.float16, seed=seed) for seed in range(4)]
    for name, kernels in (("add_riesz", ["collect"]), ("add_laplace", ["collect", "change_levels"])):

        def call(points, name=name):
            return sortattn.kernel_attention(*points, name, backend="grid:32")

        with emulated():
            wanted = [call(points) for points in draws]
        with emulated() as ran, compiled.stand_ins() as launched:
            for turn, (points, other) in enumerate(zip(draws, wanted, strict=True)):
                assert torch.equal(call(points), other)
                # of Triton by addresses: survey, nodes, places of queries, what these read, and nodes to nodes
                assert len(launched) == max(0, turn - 1) * (6 - len(kernels))
        assert ran == kernels * 4
