"""Checks of `interpreted` of what is CUDA in a call of the grid, emulated, beside Triton's kernels."""

import contextlib
from unittest import mock

import torch

from sortattn.kernels import resolve
from sortattn.ops.grid.gpu import decay, hopper, order
from sortattn.ops.grid.gpu.formula import formula
from sortattn.ops.grid.gpu.forward import collect
from sortattn.ops.grid.gpu.plan import plan
from sortattn.ops.grid.gpu.tables import Flags, Tables
from sortattn.ops.grid.gpu.transform import transform

from .cases import assert_close
from .emulation.emulator import EmulatedKernel


@contextlib.contextmanager
def emulated():
    """Calls are served by CUDA, as on a GPU with one multiprocessor; gives the names of the kernels that ran."""
    ran = set()

    def direct(found, known):
        kernel = EmulatedKernel(found.source, found.entry, found.defines, "warpgroup.h")

        def launch(grid, block, *arguments, shared):
            ran.add(found.entry)
            kernel(grid, block, *arguments)

        return launch

    here = {"here": lambda device: True, "processors": lambda device: 1, "direct": direct}
    with (
        mock.patch.multiple(hopper, **here),
        mock.patch.multiple(decay, compiles=lambda device: True, direct=direct),
        mock.patch.multiple(order, compiles=lambda device: True, direct=direct),
    ):
        yield ran


def _points(dims, dtype):
    """Queries and keys `(2, N, dims)`, and rows; from the ninth dimension on some bins have two nodes."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 70, dims), (2, 300, dims), (2, 300, 64))
    query, key, rows = (torch.randn(*shape, generator=generator) for shape in shapes)
    key[0, 7, 8] = 1000
    key[..., 9] = key[..., 9] / 100 + 5 * (key[..., 10] > 0)
    key[..., 11] = 0.3
    return query.to(dtype), key.to(dtype), rows.to(dtype)


def hopper_steps(name, dtype, dims, count):
    """Tables, and what queries read, each beside that of Triton from the same numbers."""
    query, key, rows = _points(dims, dtype)
    numbers, tau = formula(resolve(name), query.device), torch.tensor([0.5, 1.3])
    flags = Flags(*(torch.zeros(2, dtype=torch.int32) for _ in range(2)), 1)
    grid = plan(query, key, None, tau, numbers, count, flags)
    steps = grid.stats[:, :, 3:5].flatten(2)[..., 2 * count - 1]
    assert steps[:, :8].max() == 1
    assert steps[:, 8:].max() > 1

    largest, emulated_largest = (torch.zeros(2, dtype=torch.int32) for _ in range(2))
    tables = collect(grid, key, rows, None, largest)
    with emulated() as ran:
        own = collect(grid, key, rows, None, emulated_largest)
    assert ran == {"collect"}
    # weights are rounded to their type, and codes of 32 nodes have a bit more in Triton, where values are bfloat16
    bound = 4e-3 if dtype == torch.bfloat16 else 5e-4
    # without factors the last ramp is not looked at
    counted = slice(None if grid.factored else count - 1)
    assert_close(own.rows.double(), tables.rows.double(), bound)
    assert_close(own.counts[..., counted].double(), tables.counts[..., counted].double(), bound)
    assert torch.equal(emulated_largest.view(torch.float32), own.rows.abs().amax((1, 2, 3)))

    if grid.factored:
        for apart in (False, True):
            for factor in (None, torch.tensor([-0.3, 2.0])):
                compare_levels(grid, own, factor, apart)


def compare_levels(grid, tables, factor, apart):
    """What queries read of exponentials, by walks and by a product."""
    call = {"changes": True, "factor": factor, "apart": apart}
    wanted = transform(grid, tables, None, None, **call)
    with emulated() as ran:
        found = transform(grid, tables, None, None, **call)
    assert ran == {"change_levels"}
    assert torch.equal(found.unscale, wanted.unscale)
    count = grid.layout.count
    assert_close(found.base.double(), wanted.base.double(), 2e-6)
    assert_close(found.normaliser[:, :, :count].double(), wanted.normaliser[:, :, :count].double(), 2e-6)
    assert (found.rows[:, :, count - 1 : -1] == 0).all()
    # F at every node, to the rounding of float16, or of all changes before it
    one, other = (
        torch.cat([part.rows[:, :, -1:], part.rows[:, :, : count - 1]], 2).double().cumsum(2)
        for part in (found, wanted)
    )
    assert_close(one, other, 1e-3)
    assert_close(found.rows.double(), wanted.rows.double(), 2e-3)


def few_channels():
    """Channels that fill no block, and more than one, and less nodes than there is room for."""
    query, key, _ = _points(16, torch.float16)
    numbers = formula(resolve("add_laplace"), query.device)
    flags = Flags(*(torch.zeros(2, dtype=torch.int32) for _ in range(2)), 1)
    grid = plan(query, key, None, torch.tensor([0.5, 1.3]), numbers, 20, flags)
    for channels in (5, 70):
        rows = torch.randn(2, 300, channels, generator=torch.Generator().manual_seed(1)).half()
        tables = collect(grid, key, rows, None, torch.zeros(2, dtype=torch.int32))
        assert isinstance(tables, Tables)
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
        assert ran == {"sort_lines"}
        assert torch.equal(line[..., :used], wanted)
        assert (line[..., used : 1 << power] == torch.inf).all()
