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
from .matrix import between_nodes
from .read import read
from .record import empty, zeros
from .slopes import derive, prepare
from .steep import steepen, tilt
from .tables import Flags, Output, Places, Readable, Slopes, Steep, Tables
from .transform import transform


@dataclass(frozen=True)
class Gradients:
    """By key, query and value, and, if wanted, by bandwidth `(P,)` and the parameters of the kernel."""

    by_inputs: tuple[Tensor, Tensor, Tensor]
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
    def make(cls, grid: Grid, grad: Tensor, out: Tensor, totals: Tensor, normalise: bool) -> "_Cotangent":
        if not normalise:
            return cls(grad, None, None, None, None)
        rows, factors, extras, weights, reference = prepare(grid, grad, out, totals)
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
    cotangent = _Cotangent.make(grid, grad, out, totals, normalise)
    problems, rows, _ = query.shape
    phi_largest, largest = zeros(2 * problems, query.device).split(problems)
    phi = between_nodes(grid, phi_largest)
    slopes = _slopes(grid, tables, phi, phi_largest, wants_numbers)
    by_query = empty(*query.shape, dtype=query.dtype, device=query.device)
    by_bandwidth = torch.zeros(problems, dtype=torch.float32, device=query.device) if wants_numbers else None

    parts = []
    for some in rounds(query, grid.place_type):
        part = grid.some(some)
        queries, grads = of_heads(query, some), of_heads(grad, some)
        places = locate(part, queries, kind=grid.place_type)
        factors, extras = of_heads(cotangent.factors, some), of_heads(cotangent.extras, some)
        points = (queries, places, grads, slopes.some(some), normalise, factors, extras)
        taus = _derive(part, *points, of_heads(by_query, some), wants_numbers)
        if taus is not None:
            by_bandwidth[some] += taus
        left = collect_rows(part, places, of_heads(cotangent.rows, some), of_heads(largest, some))
        if normalise:
            counts = weighted_count(part, places, of_heads(cotangent.weights, some))
        else:
            counts = torch.zeros(left.shape[:3], dtype=torch.float32, device=left.device)
        parts.append((left, counts))
    left, counts = joined(parts)
    turned = Tables(left, counts, counts, largest, rows, weighted=True)
    factor = cotangent.reference

    slopes = _slopes(grid, turned, phi, phi_largest, wants_numbers, transposed=True, factor=factor)
    readable = slopes.changes
    if not grid.changes or grid.factored:
        readable = transform(grid, turned, phi, phi_largest, changes=grid.changes, transposed=True, factor=factor)
    by_key = empty(*key.shape, dtype=key.dtype, device=key.device)
    by_value = empty(*value.shape, dtype=value.dtype, device=value.device)
    extras = weight.float() if normalise and weight is not None else None
    # what is not finite in a query does not reach the keys of its group here; poisoned outputs have NaN gradients
    shared = Flags(flags.shared, flags.shared, 1)
    for some in rounds(key, grid.place_type):
        part = grid.some(some)
        keys, values = of_heads(key, some), of_heads(value, some)
        places = locate(part, keys, of_heads(weight, some), grid.place_type)
        read(part, places, readable.some(some), Output(of_heads(by_value, some), None, shared.some(some), False))
        points = (keys, places, values, slopes.some(some), normalise, None, of_heads(extras, some))
        taus = _derive(part, *points, of_heads(by_key, some), wants_numbers)
        if taus is not None:
            by_bandwidth[some] += taus
    by_parameters = None
    if wants_numbers:
        by_phi = _by_matrix(grid, tables, turned, factor)
        taus, by_parameters = recorded(lambda: _through_matrix(grid, kernel, parameters, by_phi))
        by_bandwidth += taus
    return Gradients((by_key, by_query, by_value), by_bandwidth, by_parameters)


def _slopes(
    grid: Grid,
    tables: Tables,
    phi: Tensor | None,
    largest: Tensor,
    wants_numbers: bool,
    transposed: bool = False,
    factor: Tensor | None = None,
) -> Slopes | Steep:
    def readable(changes: bool) -> Readable:
        return transform(grid, tables, phi, largest, changes=changes, transposed=transposed, factor=factor, apart=True)

    changes = readable(True)
    # the bandwidth is in the weights of exponentials, too
    if not grid.formula.exponential or (grid.factored and not wants_numbers):
        return steepen(grid, changes)
    lefts = (torch.searchsorted(grid.nodes, grid.nodes) - 1).clamp(min=0).int()
    return Slopes(changes, readable(False), lefts)


def _derive(
    grid: Grid,
    points: Tensor,
    places: Places,
    rows: Tensor,
    slopes: Slopes | Steep,
    counted: bool,
    factors: Tensor | None,
    extras: Tensor | None,
    out: Tensor,
    wants_bandwidth: bool,
) -> Tensor | None:
    """`tilt` or `derive`, as the slopes are; one more channel is `counted`, with ones if there are no `extras`."""
    if isinstance(slopes, Steep):
        return tilt(grid, places, rows, slopes, counted, factors, extras, out)
    if counted and extras is None:
        extras = torch.ones(rows.shape[:2], dtype=torch.float32, device=rows.device)
    turned = torch.empty_like(out.mT, memory_format=torch.contiguous_format)
    taus = derive(grid, points, places, rows, slopes, factors, extras, turned, wants_bandwidth)
    out.copy_(turned.mT)
    return taus


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
