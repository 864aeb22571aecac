"""The surrogate of the grid written down densely, for float64 autograd: weights of every point on every node."""

import torch
from torch import Tensor

import sortattn
from sortattn.kernels import resolve
from sortattn.ops.grid.surrogate import surrogate
from sortattn.validation import make_problem

from . import dense

CHUNK = 256


def nodes_of(query: Tensor, key: Tensor, kernel, count: int, **options):
    """The nodes and the correction that the package finds for `(P, M, D)` and `(P, N, D)`."""
    chosen = resolve(kernel)
    problem = make_problem(query, key, key, chosen, **options)
    return surrogate(problem, chosen, problem.query, count)


def weights(points: Tensor, nodes: Tensor, tau: Tensor, exponential: bool) -> Tensor:
    """`(..., N)` points on `(..., G)` nodes: `(..., N, G)`, with the mean of both derivatives on a node."""
    spread = torch.sinh if exponential else (lambda x: x)
    s, x = points[..., :, None] / tau, nodes[..., None, :] / tau
    gap = spread(x.diff(dim=-1))
    # cells without any width hold no point
    gap = torch.where(gap > 0, gap, torch.inf)
    rising = torch.nn.functional.pad(spread(s - x[..., :-1]) / gap, (1, 0), value=torch.inf)
    falling = torch.nn.functional.pad(spread(x[..., 1:] - s) / gap, (0, 1), value=torch.inf)
    # on a node both are one, but for their last bits: without the first case these would choose a side
    hat = torch.where(s == x, (rising + falling) / 2, torch.minimum(rising, falling))
    return (hat + hat.abs()) / 2


def gram(query: Tensor, key: Tensor, kernel, tau: Tensor, nodes: Tensor, extra: Tensor) -> Tensor:
    """The dense matrix `(P, M, N)` of the surrogate, `tau (P,)`."""
    chosen = resolve(kernel)
    exponential = chosen.name == "add_laplace"
    wide = tau[:, None, None, None]
    rows, columns = (weights(part.mT, nodes, wide, exponential) for part in (query, key))
    phi = chosen.univariate((nodes[..., :, None] - nodes[..., None, :]) / wide) + extra
    total = (rows @ phi @ columns.mT).sum(1)
    if chosen.name == "add_riesz":
        row, column = (part.abs().sum(-1) / tau[:, None] + 0.5e-3 * query.shape[-1] for part in (query, key))
        total = total + row[..., :, None] + column[..., None, :]
    return total


def attention(query: Tensor, key: Tensor, value: Tensor, kernel, tau: Tensor, grid, causal: bool = False) -> Tensor:
    """`(P, M, C)` through the surrogate; a causal call is exact inside of a chunk."""
    matrix = gram(query, key, kernel, tau, grid.nodes.double(), grid.extra.double())
    if causal:
        rows, columns = query.shape[1], key.shape[1]
        place = torch.arange(rows)[:, None] + columns - rows - max(columns - rows, 0)
        other = torch.arange(columns) - max(columns - rows, 0)
        same = (place // CHUNK == other // CHUNK) & (other >= 0)
        exact = resolve(kernel).gram(query, key, tau[:, None, None])
        matrix = torch.where(dense.visible(rows, columns), torch.where(same, exact, matrix), 0.0)
    total = matrix.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, matrix @ value / torch.where(total == 0, 1.0, total))


def exact_error(query: Tensor, key: Tensor, value: Tensor, kernel, backend: str, **options) -> float:
    """The true relative error of the grid's output."""
    exact = [part.double() for part in (query, key, value)]
    wanted = sortattn.kernel_attention(*exact, kernel, backend="reference", **options)
    got = sortattn.kernel_attention(query, key, value, kernel, backend=backend, **options).double()
    return ((got - wanted).norm() / wanted.norm()).item()
