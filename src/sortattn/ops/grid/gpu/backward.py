"""The gradients of a call that is not causal: the same sums with the roles of queries and keys exchanged."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels import AddRiesz, SidedKernel, rebuild
from ...recorded import recorded
from .collect import collect_rows, weighted_count
from .forward import joined, rounds
from .grid import Grid
from .layout import of_heads
from .locate import locate
from .matrix import matrix
from .read import read
from .slopes import derive, prepare
from .tables import Flags, Output, Readable, Slopes, Tables
from .transform import transform


@dataclass(frozen=True)
class Gradients:
    """By query, key, value, bandwidth `(P,)` and the parameters of the kernel; the last two only if wanted."""

    query: Tensor
    key: Tensor
    value: Tensor
    bandwidth: Tensor | None
    parameters: Tensor | None


@dataclass(frozen=True)
class _Cotangent:
    """What the gradient of the output says of the sums, see `prepare_kernel`; `rows` are divided by `reference`."""

    rows: Tensor
    weights: Tensor | None
    factors: Tensor | None
    extras: Tensor | None
    reference: Tensor | None

    @classmethod
    def make(cls, grad: Tensor, out: Tensor, totals: Tensor, normalise: bool) -> "_Cotangent":
        if not normalise:
            return cls(grad, None, None, None, None)
        size = totals.abs()
        seen = size >= torch.finfo(torch.float32).tiny
        least = torch.where(seen, size, torch.inf).amin(1)
        reference = torch.where(least.isfinite(), 1 / least, 1.0)
        rows, factors, extras, weights = prepare(grad, out, totals, reference)
        return cls(rows, weights, factors, extras, reference)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    out: Tensor,
    totals: Tensor,
    grid: Grid,
    tables: Tables,
    flags: Flags,
    kernel: SidedKernel,
    parameters: Tensor,
    normalise: bool,
    wants_numbers: bool,
) -> Gradients:
    """The gradients; `wants_numbers`: those of bandwidth and parameters too."""
    cotangent = _Cotangent.make(grad, out, totals, normalise)
    problems, rows, dims = query.shape
    numbers = torch.zeros(2, problems, dtype=torch.int32, device=query.device)
    phi = matrix(grid, numbers[0])
    lefts = (torch.searchsorted(grid.nodes, grid.nodes) - 1).clamp(min=0).int()
    slopes = _slopes(grid, tables, phi, numbers[0], lefts)
    by_query = torch.empty(problems, dims, rows, dtype=query.dtype, device=query.device)
    by_bandwidth = torch.zeros(problems, device=query.device) if wants_numbers else None

    parts = []
    for some in rounds(query):
        part = grid.some(some)
        places = locate(part, query[some])
        factors, extras = of_heads(cotangent.factors, some), of_heads(cotangent.extras, some)
        points = (query[some], places, grad[some], slopes.some(some), factors, extras)
        taus = derive(part, *points, by_query[some], wants_numbers)
        if taus is not None:
            by_bandwidth[some] += taus
        left = collect_rows(part, places, cotangent.rows[some], numbers[1, some])
        if normalise:
            counts = weighted_count(part, places, cotangent.weights[some])
        else:
            counts = torch.zeros(left.shape[:3], device=left.device)
        parts.append((left, counts))
    left, counts = joined(parts)
    turned = Tables(left, counts, counts, numbers[1], rows, weighted=True)
    factor = cotangent.reference

    readable = transform(grid, turned, phi, numbers[0], changes=grid.changes, transposed=True, factor=factor)
    slopes = _slopes(grid, turned, phi, numbers[0], lefts, transposed=True, factor=factor)
    by_key = torch.empty(problems, dims, key.shape[1], dtype=key.dtype, device=key.device)
    by_value = torch.empty_like(value)
    extras = None
    if normalise:
        extras = torch.ones(key.shape[:2], device=key.device) if weight is None else weight.float()
    # what is not finite in a query does not reach the keys of its group here; poisoned outputs have NaN gradients
    shared = Flags(flags.shared, flags.shared, 1)
    for some in rounds(key):
        part = grid.some(some)
        places = locate(part, key[some], of_heads(weight, some))
        read(part, places, readable.some(some), Output(by_value[some], None, shared.some(some), False))
        taus = derive(
            part,
            key[some],
            places,
            value[some],
            slopes.some(some),
            None,
            of_heads(extras, some),
            by_key[some],
            wants_numbers,
        )
        if taus is not None:
            by_bandwidth[some] += taus
    by_parameters = None
    if wants_numbers:
        by_phi = _by_matrix(grid, tables, turned, factor)
        taus, by_parameters = recorded(lambda: _through_matrix(grid, kernel, parameters, by_phi))
        by_bandwidth += taus
    return Gradients(by_query.transpose(1, 2), by_key.transpose(1, 2), by_value, by_bandwidth, by_parameters)


def _slopes(
    grid: Grid,
    tables: Tables,
    phi: Tensor,
    largest: Tensor,
    lefts: Tensor,
    transposed: bool = False,
    factor: Tensor | None = None,
) -> Slopes:
    def readable(changes: bool) -> Readable:
        return transform(grid, tables, phi, largest, changes=changes, transposed=transposed, factor=factor)

    changes = readable(True)
    return Slopes(changes, readable(False) if grid.formula.exponential else changes, lefts)


def _hats(grid: Grid, tables: Tables) -> Tensor:
    """The tables of weights and one more channel of counts, `(P, D, G, C + 1)`."""
    count = grid.layout.count
    rows = tables.rows[:, :, :count] if grid.hats else _unramp(tables.rows, tables.rows, count)
    counts, seconds = tables.counts[..., None], tables.seconds[..., None]
    if tables.weighted:
        counts = counts[:, :, :count] if grid.hats else _unramp(counts, counts, count)
    else:
        whole = counts.new_full((counts.shape[0],), tables.length) if tables.whole is None else tables.whole
        counts = torch.cat([counts[:, :, :-1], whole[:, None, None, None].expand(-1, counts.shape[1], 1, 1)], 2)
        counts = _unramp(counts, seconds, count)
    return torch.cat([rows, counts], 3)


def _unramp(rows: Tensor, seconds: Tensor, count: int) -> Tensor:
    """From sums of ramps, of which the last one is one everywhere, to those of hats."""
    before = torch.cat([rows[:, :, -1:], rows[:, :, : count - 1]], 2)
    return before - torch.nn.functional.pad(seconds[:, :, : count - 1], (0, 0, 0, 1))


def _by_matrix(grid: Grid, keys: Tables, queries: Tables, factor: Tensor | None) -> Tensor:
    """The gradient by `Phi_gg`, `(P, D, G, G)`."""
    found = _hats(grid, queries) @ _hats(grid, keys).transpose(2, 3)
    return found if factor is None else found * factor[:, None, None, None]


def _through_matrix(
    grid: Grid, kernel: SidedKernel, parameters: Tensor, by_phi: Tensor
) -> tuple[Tensor, Tensor | None]:
    """From the gradient by `Phi_gg` to those of bandwidth and parameters; the correction is a constant."""
    nodes = grid.nodes[..., : grid.layout.count]
    tau, numbers = (part.detach().requires_grad_() for part in (grid.bandwidth, parameters))
    chosen = rebuild(kernel.name, numbers) if numbers.numel() else kernel
    wide = tau[:, None, None, None]
    phi = chosen.univariate((nodes[..., :, None] - nodes[..., None, :]) / wide)
    if isinstance(kernel, AddRiesz):
        phi = phi + (nodes.abs()[..., :, None] + nodes.abs()[..., None, :]) / wide
    return torch.autograd.grad(phi, (tau, numbers), by_phi, allow_unused=True)
