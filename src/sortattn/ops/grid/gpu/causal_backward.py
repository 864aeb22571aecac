"""The gradients of a causal call: tables of what is before a chunk for its queries, and of what is behind for its keys.

Pairs within a chunk are those of many short exact calls.
"""

import torch
from torch import Tensor

from ....normalise import reciprocal, through_quotient
from ...tiled.api import tiled_sum_backward
from .causal import CHUNK, rounds, workspace
from .collect import weighted_count
from .grid import Grid
from .locate import locate
from .matrix import matrix
from .read import read
from .slopes import derive
from .tables import Causal, Flags, Output, Places, Readable, Slopes
from .walk import walk_chunks


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    out: Tensor,
    totals: Tensor,
    grid: Grid,
    kernel: str,
    parameters: Tensor | None,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """By query, key and value; as many queries as keys, of one head each."""
    problems, length, dims = query.shape
    near = _near(grad, query, key, value, weight, out, totals, grid.bandwidth, kernel, parameters, normalise)
    factors, extras, own = None, None, torch.zeros_like(totals)
    rows = grad.float()
    if normalise:
        factors, extras = reciprocal(totals), -(rows * out.float()).sum(2)
        rows, own = through_quotient(rows, out.float(), totals)
    if grid.layout.narrow:
        # the first queries see few keys and the last ones many: float16 has no room for both
        rows = rows.bfloat16()
    largest = torch.zeros(problems, dtype=torch.int32, device=query.device)
    phi = matrix(grid, largest)
    turned = phi.mT.contiguous()
    lefts = (torch.searchsorted(grid.nodes, grid.nodes) - 1).clamp(min=0).int()
    by_query, by_key = (query.new_empty(problems, dims, length, dtype=torch.float32) for _ in range(2))
    by_value = torch.empty_like(value)
    counted = query.new_ones(problems, length, dtype=torch.float32) if weight is None else weight.float()
    each = 2 * workspace(grid, value, length)
    for some in rounds(problems, each, query, key, value):
        part = grid.some(some)
        mask = None if weight is None else weight[some]
        queries, keys = locate(part, query[some]), locate(part, key[some], mask)
        before = _Side(part, keys, value[some], phi[some], largest[some], lefts[some], False)
        behind = _Side(part, queries, rows[some], turned[some], largest[some], lefts[some], True)
        few = (None if one is None else one[some] for one in (factors, extras))
        inputs = (query[some], queries, grad[some], before.slopes(counted[some]), *few)
        derive(part, *inputs, by_query[some], False, CHUNK)
        tables = behind.slopes(own[some])
        extra = counted[some] if normalise else None
        derive(part, key[some], keys, value[some], tables, None, extra, by_key[some], False, CHUNK)
        nothing = torch.zeros(part.problems, dtype=torch.int32, device=query.device)
        causal = Causal(near[2][some], totals[some], 0, length, CHUNK)
        read(part, keys, behind.readable(), Output(by_value[some], None, Flags(nothing, nothing, 1), False, causal))
    both = ((far.mT + close).to(query.dtype) for far, close in ((by_query, near[0]), (by_key, near[1])))
    return *both, by_value


class _Side:
    """What points leave on the nodes for those of other chunks: of the chunks behind theirs, or before (reverse)."""

    def __init__(
        self, grid: Grid, places: Places, rows: Tensor, phi: Tensor, largest: Tensor, lefts: Tensor, reverse: bool
    ):
        self._grid, self._places, self._phi, self._lefts, self._reverse = grid, places, phi, lefts, reverse
        self._inputs = places, rows, phi, largest, CHUNK
        self._tables: dict[bool, tuple[Tensor, Tensor]] = {}

    def _table(self, changes: bool) -> tuple[Tensor, Tensor]:
        if changes not in self._tables:
            self._tables[changes] = walk_chunks(self._grid, *self._inputs, changes, self._reverse)
        return self._tables[changes]

    def readable(self) -> Readable:
        """What is read: F at the nodes, or its changes."""
        table, unscale = self._table(self._grid.changes)
        return Readable(table, table, table, unscale)

    def slopes(self, weight: Tensor) -> Slopes:
        """The changes of F, and those of what `weight (P, N)` gives."""
        table, unscale = self._table(True)
        changes = Readable(table, table, self._normaliser(weight), unscale)
        return Slopes(changes, self.readable() if self._grid.formula.exponential else changes, self._lefts)

    def _normaliser(self, weight: Tensor) -> Tensor:
        grid, count = self._grid, self._grid.layout.count
        hats = weighted_count(grid, self._places, weight, CHUNK)
        if not grid.hats:
            # the last ramp is one everywhere
            after = torch.nn.functional.pad(hats[..., : count - 1], (0, grid.layout.padded - count + 1))
            hats = hats.roll(1, -1) - after
            hats[..., count:] = 0
        order = hats.flip(0) if self._reverse else hats
        seen = order.cumsum(0) - order
        seen = seen.flip(0) if self._reverse else seen
        level = (self._phi @ seen[..., None])[..., 0]
        index = torch.arange(1, level.shape[-1] + 1, device=level.device).clamp(max=count - 1)
        return torch.stack([level, level[..., index] - level], -1)


def _near(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    out: Tensor,
    totals: Tensor,
    bandwidth: Tensor,
    kernel: str,
    parameters: Tensor | None,
    normalise: bool,
) -> list[Tensor]:
    """By query, key and value what pairs within a chunk give, in float32: chunks are short exact calls."""
    problems, length = query.shape[:2]
    short = -length % CHUNK

    def cut(part: Tensor | None, fill: float = 0.0) -> Tensor | None:
        if part is None:
            return None
        part = torch.nn.functional.pad(part.float(), (*(0, 0) * (part.dim() - 2), 0, short), value=fill)
        return part.reshape(-1, CHUNK, *part.shape[2:])

    chunks = (length + short) // CHUNK
    tau = bandwidth.repeat_interleave(chunks)[:, None, None]
    points = (cut(query), cut(key), cut(value), cut(weight), tau, parameters)
    # the quotient is that of the whole call
    whole = (cut(grad), cut(out), cut(totals, 1.0), totals.new_empty(problems * chunks, 0))
    found = tiled_sum_backward(*whole, *points, 0.0, kernel, True, 1, normalise, False)
    return [part.reshape(problems, -1, part.shape[2])[:, :length].contiguous() for part in found[:3]]
