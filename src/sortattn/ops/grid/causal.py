"""Causal sums as a recurrence over chunks of the sequence: a state on the nodes, and the own chunk exactly.

The state `(P, D, G, C)` holds what the keys before a chunk have left on the nodes. One operator with a derivative of
its own, so that neither pass keeps more than one state: the backward pass makes them again, first forwards for the
queries, then backwards for the keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import SidedKernel, rebuild
from ...validation import Problem
from ..batching import fold, refuse_coefficients, unfold
from ..direct import differentiated_once
from ..recorded import recorded
from . import sums
from .plain import with_weights
from .surrogate import Surrogate

_CHUNK = 256
# numbers in the largest intermediate of a chunk's dense part, of which autograd keeps one or two by dimension
_BLOCK = 1 << 22


def causal_sums(problem: Problem, kernel: SidedKernel, query: Tensor, grid: Surrogate) -> Tensor:
    """`(P, M, C + 1)`: the kernel sums of the values, and in the last channel those of the weights."""
    parameters = kernel.parameters()
    if parameters is None:
        # not `query.new_empty`, which under vmap would have the mapped dimension
        parameters = torch.empty(0, dtype=query.dtype, device=query.device)
    parameters = parameters.to(query.device)
    inputs = (query, problem.key, with_weights(problem), grid.bandwidth, parameters, grid.nodes, grid.extra)
    return grid_causal(*inputs, kernel.name, problem.group, grid.exponential)


@torch.library.custom_op("sortattn::grid_causal", mutates_args=())
def grid_causal(
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    bandwidth: Tensor,
    parameters: Tensor,
    nodes: Tensor,
    extra: Tensor,
    kernel: str,
    group: int,
    exponential: bool,
) -> Tensor:
    """The sums `(P, M, C)` of the `rows (P, N, C)` over the keys that each query sees."""
    walk = _Walk.make(query, key, rows, bandwidth, parameters, nodes, extra, kernel, group, exponential)
    out = rows.new_zeros(*query.shape[:2], rows.shape[2])
    state = walk.nothing()
    for chunk in walk.chunks():
        if chunk.has_queries:
            found = walk.far(chunk, state)
            for some in walk.blocks(chunk):
                found[some] += walk.near(walk.kernel, *walk.parts(chunk, some))
            walk.heads(out)[:, :, chunk.queries] = found.unflatten(1, (group, -1))
        walk.advance(state, chunk)
    return out


@grid_causal.register_fake
def _(query, key, rows, bandwidth, parameters, nodes, extra, kernel, group, exponential):
    return rows.new_empty(*query.shape[:2], rows.shape[2])


@differentiated_once
@torch.library.custom_op("sortattn::grid_causal_backward", mutates_args=())
def grid_causal_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    bandwidth: Tensor,
    parameters: Tensor,
    nodes: Tensor,
    extra: Tensor,
    kernel: str,
    group: int,
    exponential: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, rows, bandwidth and parameters."""
    walk = _Walk.make(query, key, rows, bandwidth, parameters, nodes, extra, kernel, group, exponential)
    grads = [torch.zeros_like(part, memory_format=torch.contiguous_format) for part in walk.leaves()]
    recorded(lambda: _accumulate(walk, grad.detach(), grads))
    return tuple(grads)


@grid_causal_backward.register_fake
def _(grad, query, key, rows, bandwidth, parameters, nodes, extra, kernel, group, exponential):
    return tuple(part.new_empty(part.shape) for part in (query, key, rows, bandwidth, parameters))


@dataclass(frozen=True)
class _Chunk:
    """The queries of a chunk, the same for each head of a group, and its keys: as many of both, or no queries."""

    queries: slice
    keys: slice

    @property
    def has_queries(self) -> bool:
        return self.queries.start < self.queries.stop


@dataclass
class _State:
    """What keys have left: on the nodes, `(P, D, G, C)`, and for the separable part, `(P, 2, C)`."""

    table: Tensor
    vectors: Tensor


@dataclass(frozen=True)
class _Walk:
    """The inputs of the operator and one step of the recurrence."""

    query: Tensor
    key: Tensor
    rows: Tensor
    bandwidth: Tensor
    parameters: Tensor
    grid: Surrogate
    kernel: SidedKernel
    phi: Tensor
    group: int

    @classmethod
    def make(cls, query, key, rows, bandwidth, parameters, nodes, extra, kernel, group, exponential) -> "_Walk":
        tensors = [part.detach() for part in (query, key, rows, bandwidth, parameters)]
        chosen = rebuild(kernel, tensors[4] if parameters.numel() else None)
        grid = Surrogate(nodes.detach(), extra.detach(), tensors[3], exponential)
        return cls(*tensors, grid, chosen, grid.matrix(chosen), group)

    def leaves(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.rows, self.bandwidth, self.parameters

    def chunks(self) -> Iterator[_Chunk]:
        """Query m sees the keys `n <= m + N - M`: the first M - N queries see none, all see the first N - M keys."""
        rows, columns = self.query.shape[1] // self.group, self.key.shape[1]
        early, blind = max(columns - rows, 0), max(rows - columns, 0)
        length = min(rows, columns)
        if early:
            yield _Chunk(slice(0, 0), slice(0, early))
        for n in range(0, length, _CHUNK):
            stop = min(n + _CHUNK, length)
            yield _Chunk(slice(blind + n, blind + stop), slice(early + n, early + stop))

    def heads(self, points: Tensor) -> Tensor:
        """`(P, M, ...)` with the heads of a group apart: `(P, group, M / group, ...)`, a view."""
        return points.unflatten(1, (self.group, points.shape[1] // self.group))

    def queries(self, points: Tensor, chunk: _Chunk) -> Tensor:
        """The chunk's part of what belongs to queries, `(P, group * L, ...)`."""
        return self.heads(points)[:, :, chunk.queries].flatten(1, 2)

    def nothing(self) -> _State:
        """The state before any key."""
        problems, dims, count = self.grid.nodes.shape
        channels = self.rows.shape[2]
        return _State(self.rows.new_zeros(problems, dims, count, channels), self.rows.new_zeros(problems, 2, channels))

    def advance(self, state: _State, chunk: _Chunk) -> None:
        """Add the chunk's keys to the state."""
        key, rows = self.key[:, chunk.keys], self.rows[:, chunk.keys]
        state.table += self.collect(key, rows)
        state.vectors += self.column(key) @ rows

    def collect(self, points: Tensor, rows: Tensor) -> Tensor:
        return sums.collect(points, rows, self.grid.nodes, self.bandwidth, self.grid.exponential)

    def read(self, points: Tensor, table: Tensor) -> Tensor:
        return sums.read(points, table.contiguous(), self.grid.nodes, self.bandwidth, self.grid.exponential)

    def slopes(self, points: Tensor, rows: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        return sums.differentiate(points, rows, table, self.grid.nodes, self.bandwidth, self.grid.exponential)

    def row(self, query: Tensor) -> Tensor:
        """The factors `(P, M, 2)` of the state's vectors: `row(q)` and one."""
        return _factors(self.kernel, query, self.bandwidth, 0).transpose(1, 2)

    def column(self, key: Tensor) -> Tensor:
        """The factors `(P, 2, N)` of a key in the state's vectors: one and `column(k)`."""
        return _factors(self.kernel, key, self.bandwidth, 1).flip(1)

    def far(self, chunk: _Chunk, state: _State) -> Tensor:
        """What the keys before the chunk give its queries."""
        query = self.queries(self.query, chunk)
        return self.read(query, self.phi @ state.table) + self.row(query) @ state.vectors

    def blocks(self, chunk: _Chunk) -> Iterator[slice]:
        """Problems whose dense part is made together."""
        length = chunk.keys.stop - chunk.keys.start
        # a GPU is idle with a few heads, and what it computes is little beside a launch
        block = _BLOCK << 6 if self.query.is_cuda else _BLOCK
        step = max(1, block // (self.group * length * length * self.query.shape[2]))
        for p in range(0, self.query.shape[0], step):
            yield slice(p, p + step)

    def parts(self, chunk: _Chunk, some: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        query = self.queries(self.query, chunk)[some]
        return query, self.key[some, chunk.keys], self.rows[some, chunk.keys], self.bandwidth[some]

    def near(self, kernel: SidedKernel, query: Tensor, key: Tensor, rows: Tensor, tau: Tensor) -> Tensor:
        """What the chunk's own keys give its queries: the definition."""
        length = key.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=key.device).tril().repeat(self.group, 1)
        # masked keys have rows of zeros
        return torch.where(seen, kernel.gram(query, key, tau[:, None, None]), 0.0) @ rows


def _factors(kernel: SidedKernel, points: Tensor, bandwidth: Tensor, side: int) -> Tensor:
    """`(P, 2, N)`: the separable part that depends on these points, then ones; zeros if there is no such part."""
    parts = kernel.offsets(points, points, bandwidth[:, None, None])
    if parts is None:
        return points.new_zeros(points.shape[0], 2, points.shape[1])
    return torch.stack([parts[side], torch.ones_like(parts[side])], 1)


def _accumulate(walk: _Walk, grad: Tensor, grads: list[Tensor]) -> None:
    by_phi = torch.zeros_like(walk.phi)
    _forwards(walk, grad, grads, by_phi)
    _backwards(walk, grad, grads)
    _through_matrix(walk, by_phi, grads)


def _forwards(walk: _Walk, grad: Tensor, grads: list[Tensor], by_phi: Tensor) -> None:
    """The gradients of the queries, of the kernel between nodes, and of the dense parts."""
    by_query, _, _, by_bandwidth, _ = grads
    state = walk.nothing()
    for chunk in walk.chunks():
        if chunk.has_queries:
            query, gradient = (walk.queries(part, chunk) for part in (walk.query, grad))
            points, taus = walk.slopes(query, gradient, walk.phi @ state.table)
            by_bandwidth += taus
            by_phi += walk.collect(query, gradient) @ state.table.transpose(2, 3)
            points += _separable_gradient(walk, query, gradient @ state.vectors.transpose(1, 2), 0, by_bandwidth)
            walk.heads(by_query)[:, :, chunk.queries] += points.unflatten(1, (walk.group, -1))
            for some in walk.blocks(chunk):
                _near_gradients(walk, chunk, some, gradient[some], grads)
        walk.advance(state, chunk)


def _backwards(walk: _Walk, grad: Tensor, grads: list[Tensor]) -> None:
    """The gradients of keys and rows by way of the queries of later chunks, whose transposed state is kept."""
    state = walk.nothing()
    for chunk in reversed(list(walk.chunks())):
        _far_key_gradients(walk, chunk.keys, state, grads)
        if chunk.has_queries:
            query, gradient = (walk.queries(part, chunk) for part in (walk.query, grad))
            state.table += walk.phi.transpose(2, 3) @ walk.collect(query, gradient)
            state.vectors += walk.row(query).transpose(1, 2) @ gradient


def _far_key_gradients(walk: _Walk, span: slice, state: _State, grads: list[Tensor]) -> None:
    _, by_key, by_rows, by_bandwidth, _ = grads
    key, rows = walk.key[:, span], walk.rows[:, span]
    points, taus = walk.slopes(key, rows, state.table)
    by_bandwidth += taus
    by_rows[:, span] += walk.read(key, state.table) + walk.column(key).transpose(1, 2) @ state.vectors
    # flipped: the state's vectors stand for (ones, column), the factors for (column, ones)
    products = rows @ state.vectors.flip(1).transpose(1, 2)
    by_key[:, span] += points + _separable_gradient(walk, key, products, 1, by_bandwidth)


def _separable_gradient(walk: _Walk, points: Tensor, products: Tensor, side: int, by_bandwidth: Tensor) -> Tensor:
    """The gradient by points of the separable part, whose factors have the gradient `products (P, N, 2)`."""
    with torch.enable_grad():
        point, tau = (part.detach().requires_grad_() for part in (points, walk.bandwidth))
        factors = _factors(walk.kernel, point, tau, side)
        if not factors.requires_grad:
            return torch.zeros_like(points)
        by_point, by_tau = torch.autograd.grad(factors, (point, tau), products.transpose(1, 2))
    by_bandwidth += by_tau
    return by_point


def _near_gradients(walk: _Walk, chunk: _Chunk, some: slice, gradient: Tensor, grads: list[Tensor]) -> None:
    by_query, by_key, by_rows, by_bandwidth, by_parameters = grads
    with torch.enable_grad():
        inputs = [part.detach().requires_grad_() for part in (*walk.parts(chunk, some), walk.parameters)]
        kernel = rebuild(walk.kernel.name, inputs[4]) if walk.parameters.numel() else walk.kernel
        found = walk.near(kernel, *inputs[:4])
        parts = torch.autograd.grad(found, inputs, gradient, allow_unused=True)
    walk.heads(by_query)[some, :, chunk.queries] += parts[0].unflatten(1, (walk.group, -1))
    by_key[some, chunk.keys] += parts[1]
    by_rows[some, chunk.keys] += parts[2]
    by_bandwidth[some] += parts[3]
    if parts[4] is not None:
        by_parameters += parts[4]


def _through_matrix(walk: _Walk, by_phi: Tensor, grads: list[Tensor]) -> None:
    """From the gradient of the kernel between nodes to those of bandwidth and parameters."""
    with torch.enable_grad():
        tau, numbers = (part.detach().requires_grad_() for part in (walk.bandwidth, walk.parameters))
        kernel = rebuild(walk.kernel.name, numbers) if numbers.numel() else walk.kernel
        phi = Surrogate(walk.grid.nodes, walk.grid.extra, tau, walk.grid.exponential).matrix(kernel)
        parts = torch.autograd.grad(phi, (tau, numbers), by_phi, allow_unused=True)
    for gradient, part in zip(grads[3:], parts, strict=True):
        if part is not None:
            gradient += part


def _setup(ctx, inputs, output):
    *tensors, kernel, group, exponential = inputs
    ctx.save_for_backward(*tensors)
    ctx.options = kernel, group, exponential


def _backward(ctx, grad):
    gradients = grid_causal_backward(grad, *ctx.saved_tensors, *ctx.options)
    return *gradients, None, None, None, None, None


grid_causal.register_autograd(_backward, setup_context=_setup)


@grid_causal.register_vmap
def _(info, in_dims, *inputs):
    """A mapped dimension becomes more problems."""
    refuse_coefficients(in_dims[4])
    size = info.batch_size
    folded = [part if i == 4 else fold(size, part, in_dims[i]) for i, part in enumerate(inputs[:7])]
    (out,), (dim,) = unfold(size, (grid_causal(*folded, *inputs[7:]),))
    return out, dim
