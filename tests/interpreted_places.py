"""Checks of `interpreted` that look at places of points alone, and at what is counted from them."""

import itertools

import torch

from sortattn.kernels import resolve
from sortattn.ops.grid.gpu.collect import count_ramps
from sortattn.ops.grid.gpu.formula import formula
from sortattn.ops.grid.gpu.locate import locate
from sortattn.ops.grid.gpu.plan import plan
from sortattn.ops.grid.gpu.tables import Flags

from .cases import assert_close


def awkward(dims):
    """Points `(1, 60, dims)`, and flags for them.

    An outlier, beside which all others are in one bin; clusters; ties; one value alone; in other dimensions nothing of
    that.
    """
    points = torch.randn(1, 60, dims, generator=torch.Generator().manual_seed(0))
    points[0, 7, 0] = 1000
    points[..., 1] = points[..., 1] / 100 + 5 * (points[..., 2] > 0)
    points[..., 2] = points[..., 2].round()
    points[..., 3] = 0.3
    return points.half(), Flags(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 1)


def cells_of(grid, points, count):
    """Coordinates in float64, their cells by a search, and where these begin and end."""
    nodes, x = grid.nodes[..., :count].double().contiguous(), points.mT.double().contiguous()
    cell = (torch.searchsorted(nodes, x, right=True) - 1).clamp(0, count - 2)
    return x, cell, nodes.gather(2, cell), nodes.gather(2, cell + 1)


def places():
    """The cells and shares of points beside a search in float64, and the sums of ramps beside the ramps themselves."""
    points, flags = awkward(4)
    steps = set()
    # with more than 64 nodes there are two blocks of them, and no codes
    for count in (12, 40, 72):
        # all dimensions in one block, where the fullest bin decides how all are searched, and each for itself
        for some in (points, *(part.contiguous() for part in points.split(1, 2))):
            grid = plan(some, some, None, torch.ones(1), formula(resolve("add_bump"), some.device), count, flags)
            x, cell, start, stop = cells_of(grid, some, count)
            wanted = cell + (x - start) / torch.where(stop > start, stop - start, 1.0)
            for kind, bits in ((torch.float32, 9), (torch.int16, 9), (torch.int16, 8))[: 3 if count <= 64 else 1]:
                found = locate(grid, some, kind=kind, bits=bits).first
                shown = found.double() / (1 << bits if kind == torch.int16 else 1)
                assert (shown - wanted).abs().max() <= (0.8 / (1 << bits) if kind == torch.int16 else 1e-4)
                for chunk in (0, 16):
                    ramps = (shown[..., None] - torch.arange(count)).clamp(0, 1)
                    parts = ramps.split(chunk or 60, 2)
                    sums = torch.stack([part.sum(2) for part in parts])
                    counted = count_ramps(grid, found, chunk, bits)[..., :count].double()
                    # of two blocks, a point behind the first one is the 512th part short of a whole one there
                    assert_close(counted.reshape(sums.shape), sums, 1e-6 if kind == torch.int16 else 2e-3)
            steps |= set(grid.stats[0, :, 3:5].flatten(1)[:, 2 * count - 1].tolist())
    assert min(steps) == 1
    assert max(steps) > 2


def words():
    """Codes and factors of exponentials beside their definition in float64, and the sums of ramps times factors."""
    # wide cells and narrow ones, and a dimension with nothing of that
    points, flags = awkward(5)
    kernel, steps = formula(resolve("add_laplace"), points.device), set()
    for count, tau in itertools.product((12, 40), (torch.tensor([0.3]), torch.tensor([4.0]))):
        for some in (points, points.repeat(1, 1, 4), *(part.contiguous() for part in points.split(1, 2))):
            grid = plan(some, some, None, tau, kernel, count, flags)
            x, cell, start, stop = cells_of(grid, some, count)
            # weights of both nodes times `sinh(h)`, with no exponent above zero
            low, high, width = ((part / tau.double()) for part in (x - start, stop - x, stop - start))
            first, second = ((one - width).exp() - (-one - width).exp() for one in (high, low))
            both = torch.where(width > 0, first + second, 1.0)
            share = torch.where(width > 1e-9, second / both, 0.0)
            factor = torch.where(width > 1e-9, both / (1 - (-2 * width).exp()), 1.0)
            for bits, kind, unit, bound in ((9, torch.float16, 2.0**-15, 1e-3), (8, torch.bfloat16, 2.0**-127, 4e-3)):
                found = locate(grid, some, kind=torch.int32, bits=bits).first
                code = (found & 0xFFFF).double() / (1 << bits)
                own = (found >> 16).to(torch.int16).view(kind).double() * unit
                assert (code - cell - share).abs().max() <= 2 / (1 << bits)
                assert (own - factor).abs().max() <= bound
                ramps = (code[..., None] - torch.arange(grid.layout.padded)).clamp(0, 1)
                # the last one is one everywhere
                ramps[..., -1] = 1
                sums = (ramps * own[..., None]).sum(2)
                assert_close(count_ramps(grid, found, bits=bits).double(), sums, 1e-3)
            steps |= set(grid.stats[0, :, 3:5].flatten(1)[:, 2 * count - 1].tolist())
    # those in one look-up, and those by a search
    assert min(steps) == 1
    assert max(steps) > 2
