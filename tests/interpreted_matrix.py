"""Checks of `interpreted` that look at the kernel between nodes alone, for kernels that have no name too."""

import torch

from sortattn.kernels import PolynomialExponential, Spline, resolve
from sortattn.ops.grid import correction
from sortattn.ops.grid.gpu.formula import formula
from sortattn.ops.grid.gpu.grid import Grid
from sortattn.ops.grid.gpu.language import STATS
from sortattn.ops.grid.gpu.layout import Layout
from sortattn.ops.grid.gpu.matrix import matrix as kernel_matrix
from sortattn.ops.grid.nodes import place
from sortattn.ops.grid.surrogate import slope_jumps

from .cases import assert_close

KERNELS = {
    "spline": Spline([-1.0, 0.5], [0.5, 1.0, -0.25], offset=1.0),
    "matern": PolynomialExponential([1.0, 1.0]),
}


def matrix():
    """The kernel between nodes with its correction, beside that of torch's operations in float64."""
    # the rows of one program, and of two
    for count in (20, 80):
        compare_matrices(count)


def compare_matrices(count):
    generator = torch.Generator().manual_seed(0)
    tau = torch.tensor([0.7, 1.9])
    sample = torch.randn(2, 3, 200, generator=generator, dtype=torch.float64)
    sample[:, 0] = (sample[:, 0] * 2).round() / 2
    nodes, _ = place(sample.mT[:, :100], sample.mT[:, 100:], None, tau.double(), count)
    nodes = nodes.float()
    data = correction._occupation(sample, nodes.double())
    layout = Layout(count, torch.float32)
    padding = (0, layout.padded - count + 1)
    stats = torch.stack([data.inside, data.at_start, data.at_end], 2).float()
    # without what only `locate` reads
    stats = torch.nn.functional.pad(stats, (*padding, 0, STATS.value - 3)).contiguous()
    width = nodes.diff(dim=-1) / tau[:, None, None]
    padded = torch.nn.functional.pad(nodes, (0, layout.padded - count), value=torch.inf)
    for kernel in (*KERNELS.values(), *map(resolve, ("add_bump", "add_laplace"))):
        numbers = formula(kernel, nodes.device)
        across = (2 * (width / 2).tanh() if numbers.exponential else width) / 24 * data.inside
        starts, ends = across * data.at_start**2, across * data.at_end**2
        stats[:, :, -1, : count - 1] = starts
        stats[:, :, -1, count - 1] = 0
        stats[:, :, -1, 1:count] += ends
        largest = torch.zeros(2, dtype=torch.int32)
        phi = kernel_matrix(Grid(padded, stats, tau, layout, numbers), largest)
        assert torch.equal(largest.view(torch.float32), phi.abs().amax((1, 2, 3)))
        extra = correction.correct(sample, nodes, tau, *slope_jumps(kernel), numbers.exponential)
        difference = nodes.double()[..., :, None] - nodes.double()[..., None, :]
        plain = kernel.univariate(difference / tau.double()[:, None, None, None])
        found = phi[..., :count, :count].double() - plain
        # the kernel itself is in float32, and some corrections are zero
        assert_close(found, extra, 1e-3, scale=1e-2)
