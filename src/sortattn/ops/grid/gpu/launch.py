"""The steps of a sum on the GPU: what is launched, in which blocks. See `language` for places and ramps."""

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from ....kernels import RIESZ_EPSILON
from .collect import collect_kernel, count_kernel, weighted_count_kernel
from .formula import Formula
from .locate import locate_kernel
from .lookup import lookup_kernel
from .matrix import matrix_kernel
from .near import near_kernel
from .nodes import nodes_kernel
from .read import read_kernel
from .slopes import prepare_kernel, slopes_kernel
from .survey import ROWS, survey_kernel
from .tables import Flags, Places, Readable, Slopes, Tables
from .transform import transform_kernel
from .walk import bends_kernel, levels_kernel, walk_kernel

INTERPRETED = isinstance(collect_kernel, InterpretedFunction)
# two integers of 16 bits in one instruction
_FAST = not INTERPRETED and torch.version.hip is None
# points of the sample for every node, of which some are extremes of stretches
_BY_NODE = 8
_STRETCHES = 16
_LOG2_E = math.log2(math.e)
# programs that keep a large GPU busy
_BUSY = 528
# queries and keys of a block, warps, and dimensions in a row, of what is summed pair by pair
_NEAR = (64, 64, 4, 8)
# points of a block, warps, and dimensions in a row, of what is looked up
_LOOKUP = (32, 4, 4)
# rows of the tables, keys of a block, warps and stages of what walks along the chunks
_WALK = (128, 128, 4, 3)


@dataclass(frozen=True)
class Layout:
    """How many nodes there are, and the types in which they work."""

    count: int
    dtype: torch.dtype

    @functools.cached_property
    def padded(self) -> int:
        return max(16, _power(self.count))

    @property
    def block(self) -> int:
        """Nodes that are taken together."""
        return min(self.padded, 64)

    @property
    def narrow(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)

    @property
    def table_type(self) -> torch.dtype:
        """What queries read: scaled, so that the range of bfloat16 is not needed and its missing digits are there."""
        return torch.float16 if self.narrow else torch.float32

    @property
    def precision(self) -> dict:
        return {"PRECISION": "tf32" if self.narrow else "tf32x3", "EMULATED": INTERPRETED}


@functools.lru_cache(maxsize=64)
def shifts(padded: int, device: torch.device) -> Tensor:
    """What `ramp` adds for the nodes -1 ... G, then for 0 ... G - 1 with a last one that makes every ramp one."""
    nodes = torch.arange(1, -padded - 1, -1, dtype=torch.float32, device=device)
    return torch.cat([nodes, nodes[1:-2], torch.ones(1, device=device)])


@functools.lru_cache(maxsize=64)
def _zeros(device: torch.device) -> Tensor:
    """What `near_kernel` begins with."""
    return torch.zeros(16 * 64, dtype=torch.float16, device=device)


@dataclass(frozen=True)
class Grid:
    """The nodes of a call, `(P, D, GP)`, what is known of their cells `(P, D, 3, GP)`, and the bandwidth `(P,)`."""

    nodes: Tensor
    stats: Tensor
    bandwidth: Tensor
    layout: Layout
    formula: Formula

    @property
    def hats(self) -> bool:
        """Whether weights are made as such: those of exponentials do not sum to one.

        And over a few dimensions what ramps leave of a large table would show where a query is far from all keys.
        """
        return self.formula.exponential or self.nodes.shape[1] < 16

    @property
    def halves(self) -> bool:
        """Whether pairs of points, in causal calls, are summed in float16."""
        return _FAST and self.layout.narrow and self.formula.kind in ("riesz", "bump", "laplace")

    @property
    def looks_up(self) -> bool:
        """Whether points look their two nodes up: that takes as long for any number of nodes, products do not."""
        return self.layout.padded >= 64

    @property
    def changes(self) -> bool:
        """Whether points read the changes from node to node: by products of ramps."""
        return not self.hats and not self.looks_up

    @property
    def problems(self) -> int:
        return self.nodes.shape[0]

    @property
    def dims(self) -> int:
        return self.nodes.shape[1]

    def some(self, heads: slice) -> "Grid":
        """The grid of some of the heads."""
        return replace(self, nodes=self.nodes[heads], stats=self.stats[heads], bandwidth=self.bandwidth[heads])

    def shifts(self) -> Tensor:
        return shifts(self.layout.padded, self.nodes.device)

    def locate(self, points: Tensor, weight: Tensor | None = None, lines: bool = False) -> Places:
        """The places of `points (P, N, D)`; those without weight stand at the first node."""
        problems, length, dims = points.shape
        first = torch.empty(problems, dims, length, device=points.device)
        second = torch.empty_like(first) if self.formula.exponential else first
        line = torch.empty_like(first, dtype=torch.float16 if self.halves else torch.float32) if lines else first
        rows, wide = 64, min(32, max(16, _power(dims)))
        locate_kernel[(_blocks(length, rows), _blocks(dims, wide), problems)](
            points,
            first if weight is None else weight,
            self.nodes,
            self.bandwidth,
            first,
            second,
            line,
            length,
            D=dims,
            G=self.layout.count,
            GP=self.layout.padded,
            STEPS=(self.layout.count - 1).bit_length(),
            ROWS=rows,
            DIMS=wide,
            EXPONENTIAL=self.formula.exponential,
            MASKED=weight is not None,
            LINES=lines,
            STRETCH=_LOG2_E if self.halves and self.formula.kind == "laplace" else 1.0,
        )
        return Places(first, second, line if lines else None)

    def collect(self, places: Places, rows: Tensor, largest: Tensor) -> Tensor:
        """The table `(P, D, GP, C)` of `rows (P, N, C)`; raises `largest (P)` to its largest number."""
        problems, length, channels = rows.shape
        padded, block = self.layout.padded, self.layout.block
        narrow = self.layout.narrow
        together = max(1, (256 if narrow else 64) // block)
        wide = _channels(channels)
        blocks = _blocks(self.dims * padded // block, together) * _blocks(channels, wide)
        tall = 128 if narrow else 32
        span, splits = _split(length, blocks * problems, tall)
        table = torch.empty(splits, problems, self.dims, padded, channels, device=rows.device)
        collect_kernel[(blocks, problems, splits)](
            places.first,
            places.second,
            self.shifts(),
            rows,
            table,
            largest,
            length,
            span,
            channels,
            D=self.dims,
            G=padded,
            BLOCK=block,
            TOGETHER=together,
            ROWS=tall,
            CHANNELS=wide,
            EVEN=length % tall == 0 and channels % wide == 0,
            HATS=self.hats,
            num_warps=8 if narrow else 4,
            num_stages=3,
            **self.layout.precision,
        )
        return _together(table)

    def count(self, places: Tensor, chunk: int = 0) -> Tensor:
        """The sums of ramps at `places (P, D, N)`, `(P, D, GP)`; with nine bits behind the point for 16-bit tensors.

        With a `chunk`, those of every chunk of so many places, `(chunks, P, D, GP)`.
        """
        problems, dims, length = places.shape
        padded, block = self.layout.padded, self.layout.block
        if not self.layout.narrow:
            ones = torch.ones(problems, length, device=places.device)
            return self._sum(Places(places, places), ones, hats=False, chunk=chunk)
        # 32 sums of 512 fit into 16 bits
        turns, rows = 2 if INTERPRETED else 32, 64
        if chunk:
            turns = min(turns, max(1, chunk // rows))
        programs = problems * dims * padded // block
        span, splits = (chunk, math.ceil(length / chunk)) if chunk else _split(length, programs, turns * rows)
        table = torch.empty(splits, problems, dims, padded, device=places.device)
        count_kernel[(problems * dims, padded // block, splits)](
            places, table, length, span, G=padded, BLOCK=block, ROWS=rows, TURNS=turns, FAST=_FAST
        )
        return table if chunk else _together(table)

    def weighted_count(self, places: Places, weight: Tensor, chunk: int = 0) -> Tensor:
        """The table of one channel, `weight (P, N)` in float32; with a `chunk` those of all chunks."""
        return self._sum(places, weight, self.hats, chunk)

    def _sum(self, places: Places, weight: Tensor, hats: bool, chunk: int = 0) -> Tensor:
        problems = weight.shape[0]
        padded, block = self.layout.padded, self.layout.block
        span, splits = chunk, math.ceil(places.length / max(chunk, 1))
        if not chunk:
            span, splits = _split(places.length, problems * self.dims * padded // block, 1024)
        table = torch.empty(splits, problems, self.dims, padded, device=weight.device)
        weighted_count_kernel[(problems * self.dims, padded // block, splits)](
            places.first,
            places.second,
            self.shifts(),
            weight,
            table,
            places.length,
            span,
            D=self.dims,
            G=padded,
            BLOCK=block,
            ROWS=64,
            HATS=hats,
        )
        return table if chunk else _together(table)

    def matrix(self, largest: Tensor) -> Tensor:
        """`Phi_gg (P, D, GP, GP)`; raises `largest (P)` to its largest number."""
        padded = self.layout.padded
        # small blocks fit into the registers, and more of them are far from all kinks
        block = padded if INTERPRETED else 16
        phi = torch.empty(self.problems, self.dims, padded, padded, device=self.nodes.device)
        matrix_kernel[(self.problems * self.dims, padded // block, padded // block)](
            self.nodes,
            self.stats,
            self.bandwidth,
            self.formula.numbers,
            self.formula.kinks,
            phi,
            largest,
            self.formula.count,
            self.formula.jumps,
            RIESZ_EPSILON,
            D=self.dims,
            G=self.layout.count,
            GP=padded,
            BLOCK=block,
            DECAYS=self.formula.decays,
            RIESZ=self.formula.riesz,
            BESIDE=self.formula.beside,
            EXPONENTIAL=self.formula.exponential,
            num_warps=2,
        )
        return phi

    def transform(
        self,
        tables: Tables,
        phi: Tensor,
        largest: Tensor,
        *,
        changes: bool,
        transposed: bool = False,
        factor: Tensor | None = None,
    ) -> Readable:
        """What points read, from the tables and `phi`, of which the largest number is in `largest (P)`."""
        table = tables.rows
        channels = table.shape[3]
        padded, block = self.layout.padded, self.layout.block
        wide = _channels(channels)
        out = torch.empty_like(table, dtype=self.layout.table_type)
        base = torch.empty(self.problems, self.dims, channels, device=table.device)
        normaliser = torch.empty(self.problems, self.dims, padded, 2, device=table.device)
        unscale = torch.empty(self.problems, device=table.device)
        transform_kernel[(self.problems * self.dims, padded // block, _blocks(channels, wide))](
            table,
            tables.counts,
            tables.seconds,
            tables.counts if tables.whole is None else tables.whole,
            phi,
            largest,
            tables.largest,
            tables.counts if factor is None else factor,
            out,
            base,
            normaliser,
            unscale,
            tables.length,
            channels,
            D=self.dims,
            G=self.layout.count,
            GP=padded,
            BLOCK=block,
            CHANNELS=wide,
            HATS=self.hats,
            CHANGES=changes,
            TRANSPOSED=transposed,
            WEIGHTED=tables.weighted,
            MASKED=tables.whole is not None,
            FACTOR=factor is not None,
            SCALED=self.layout.narrow,
        )
        return Readable(out, base, normaliser, unscale)

    def read(
        self,
        places: Places,
        tables: Readable,
        flags: Flags,
        out: Tensor,
        totals: Tensor | None,
        normalise: bool,
        causal: "Causal | None" = None,
    ) -> None:
        """The sums `(P, M, C)` at the places, to `out`, and those of the weights to `totals (P, M)`."""
        way = self._look_up if self.looks_up else self._multiply
        way(places, tables, flags, out, totals, normalise, causal)

    def _multiply(
        self,
        places: Places,
        tables: Readable,
        flags: Flags,
        out: Tensor,
        totals: Tensor | None,
        normalise: bool,
        causal: "Causal | None",
    ) -> None:
        length, channels = out.shape[1:]
        padded, block = self.layout.padded, self.layout.block
        narrow = self.layout.narrow
        together = max(1, 64 // block)
        wide = _channels(channels)
        tall = (256 if block == 64 and not self.hats else 128) if narrow else 64
        even = length % tall == 0 and channels % wide == 0 and self.dims * padded // block % together == 0
        blocks, tiles = _blocks(channels, wide), _blocks(length, tall)
        if causal:
            even = even and causal.offset == 0 and flags.group == 1
            tall = min(tall, causal.chunk)
            blocks, tiles = blocks * flags.group, causal.tiles(tall)
        read_kernel[(tiles, self.problems, blocks)](
            places.first,
            places.second,
            self.shifts(),
            tables.rows,
            tables.base,
            tables.normaliser,
            tables.unscale,
            flags.rows,
            flags.shared,
            out,
            out if totals is None else totals,
            causal.near if causal else out,
            causal.totals if causal else out,
            length,
            length // flags.group,
            causal.offset if causal else 0,
            causal.first(tall) if causal else 0,
            channels,
            D=self.dims,
            GP=padded,
            BLOCK=block,
            TOGETHER=together,
            ROWS=tall,
            CHANNELS=wide,
            EVEN=even,
            GROUP=flags.group,
            CHUNK=causal.chunk if causal else 0,
            REVERSED=causal is not None and causal.reverse,
            HATS=self.hats,
            NORMALISE=normalise,
            COUNT=totals is not None,
            num_warps=4,
            num_stages=3,
            **self.layout.precision,
        )

    def _look_up(
        self,
        places: Places,
        tables: Readable,
        flags: Flags,
        out: Tensor,
        totals: Tensor | None,
        normalise: bool,
        causal: "Causal | None",
    ) -> None:
        length, channels = out.shape[1:]
        wide = _channels(channels)
        tall, warps, unroll = _LOOKUP
        blocks, tiles, even = _blocks(channels, wide), _blocks(length, tall), length % tall == 0
        if causal:
            even = even and causal.offset == 0 and flags.group == 1
            tall = min(tall, causal.chunk)
            blocks, tiles = blocks * flags.group, causal.tiles(tall)
        lookup_kernel[(tiles, self.problems, blocks)](
            places.first,
            places.second,
            tables.rows,
            tables.normaliser,
            tables.unscale,
            flags.rows,
            flags.shared,
            out,
            out if totals is None else totals,
            causal.near if causal else out,
            causal.totals if causal else out,
            length,
            length // flags.group,
            causal.offset if causal else 0,
            causal.first(tall) if causal else 0,
            channels,
            D=self.dims,
            GP=self.layout.padded,
            UNROLL=unroll if self.dims % unroll == 0 else 1,
            ROWS=tall,
            CHANNELS=wide,
            EVEN=even and channels % wide == 0,
            GROUP=flags.group,
            CHUNK=causal.chunk if causal else 0,
            REVERSED=causal is not None and causal.reverse,
            EXPONENTIAL=self.formula.exponential,
            NORMALISE=normalise,
            COUNT=totals is not None,
            num_warps=warps,
        )

    def near(
        self,
        query: Tensor,
        key: Tensor,
        queries: Tensor,
        keys: Tensor,
        rows: Tensor,
        weight: Tensor | None,
        group: int,
        chunk: int,
    ) -> "Causal":
        """What keys `(P, N, D)` with `rows (P, N, C)` give the queries `(P, group * M, D)` of their own chunk.

        `queries` and `keys` are their lines, see `locate`.
        """
        problems, seen, channels = rows.shape
        length = query.shape[1] // group
        out = torch.empty(problems, group * length, channels, device=rows.device)
        totals = torch.empty(problems, group * length, device=rows.device)
        found = Causal(out, totals, seen - length, seen, chunk)
        tall, keys_together, warps, unroll = _NEAR
        tall = min(tall, chunk)
        wide = _channels(channels)
        near_kernel[(found.tiles(tall), problems, group * _blocks(channels, wide))](
            query,
            key,
            queries,
            keys,
            self.nodes,
            self.bandwidth,
            rows,
            totals if weight is None else weight,
            self.formula.numbers,
            _zeros(rows.device),
            out,
            totals,
            self.formula.count,
            RIESZ_EPSILON,
            length,
            seen,
            found.offset,
            found.first(tall),
            channels,
            D=self.dims,
            DIMS=_power(self.dims),
            G=self.layout.count,
            GP=self.layout.padded,
            GROUP=group,
            CHUNK=chunk,
            ROWS=tall,
            KEYS=keys_together,
            UNROLL=unroll if self.dims % unroll == 0 else 1,
            CHANNELS=wide,
            EVEN=seen % keys_together == 0,
            KIND=self.formula.kind,
            HALF=self.halves,
            MASKED=weight is not None,
            num_warps=warps,
            **self.layout.precision,
        )
        return found

    def walk(
        self,
        places: Places,
        rows: Tensor,
        phi: Tensor,
        phi_largest: Tensor,
        chunk: int,
        changes: bool = False,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """What is read in every chunk of the points before it, `(chunks, P, D, GP, C)`, and its `unscale (P)`.

        In `reverse` of those behind it; `phi` is then transposed. With `changes` those of F from node to node.
        """
        problems, length, channels = rows.shape
        padded, narrow = self.layout.padded, self.layout.narrow
        bends, unscale = torch.empty_like(phi), torch.empty(problems, device=phi.device)
        bends_kernel[(problems * self.dims,)](
            phi,
            phi_largest,
            torch.linalg.vector_norm(rows, math.inf, (1, 2)),
            bends,
            unscale,
            length,
            D=self.dims,
            G=self.layout.count,
            GP=padded,
            HATS=self.hats,
            CHANGES=changes,
            SCALED=narrow,
            num_warps=8 if padded > 32 else 4,
        )
        # products of larger matrices, several at a time, do not fit into registers
        together = max(1, _WALK[0] // padded) if padded <= 32 else 1
        wide = _channels(channels)
        tall = _WALK[1] if narrow else 32
        tall = min(tall, chunk)
        chunks = math.ceil(length / chunk)
        kind = self.layout.table_type
        out = torch.empty(chunks, problems, self.dims, padded, channels, dtype=kind, device=rows.device)
        walk_kernel[(_blocks(self.dims, together) * _blocks(channels, wide), problems)](
            places.first,
            places.second,
            self.shifts(),
            rows,
            bends,
            out,
            length,
            chunks,
            channels,
            D=self.dims,
            GP=padded,
            TOGETHER=together,
            CHUNK=chunk,
            ROWS=tall,
            CHANNELS=wide,
            EVEN=length % tall == 0 and channels % wide == 0,
            HATS=self.hats,
            REVERSED=reverse,
            num_warps=_WALK[2],
            num_stages=_WALK[3],
            **self.layout.precision,
        )
        return out, unscale

    def levels(
        self, counts: Tensor, seconds: Tensor, whole: Tensor | None, phi: Tensor, chunk: int, changes: bool = False
    ) -> Tensor:
        """The normaliser of every chunk, `(chunks, P, D, GP, 2)`."""
        chunks, problems = counts.shape[:2]
        padded = self.layout.padded
        normaliser = torch.empty(*counts.shape, 2, device=counts.device)
        levels_kernel[(problems * self.dims,)](
            counts,
            seconds,
            counts if whole is None else whole,
            phi,
            normaliser,
            chunks,
            problems,
            D=self.dims,
            G=self.layout.count,
            GP=padded,
            CHUNK=chunk,
            CHUNKS=16,
            CHANGES=changes,
            MASKED=whole is not None,
            num_warps=8 if padded > 64 else 4,
        )
        return normaliser

    def slopes(
        self,
        points: Tensor,
        places: Places,
        rows: Tensor,
        tables: "Slopes",
        factors: Tensor | None,
        extras: Tensor | None,
        out: Tensor,
        wants_bandwidth: bool,
        chunk: int = 0,
    ) -> Tensor | None:
        """The derivatives by `points (P, N, D)`, to `out (P, D, N)`, and those by the bandwidth `(P,)`, if wanted.

        They are those of what the points read off the nodes, multiplied with `rows (P, N, C)` and, for one more
        channel, with `extras (P, N)`, all of it with `factors (P, N)`.
        """
        length, channels = rows.shape[1:]
        tall, wide = min(32, chunk or 32), _channels(channels)
        programs = _blocks(length, tall)
        exponential = self.formula.exponential
        parts = torch.empty(self.problems, programs, device=out.device) if wants_bandwidth and exponential else None
        slopes_kernel[(programs, self.problems)](
            points,
            places.first,
            self.nodes,
            tables.lefts,
            self.bandwidth,
            rows,
            rows if factors is None else factors,
            rows if extras is None else extras,
            tables.changes.rows,
            tables.levels.rows,
            tables.changes.normaliser,
            tables.changes.unscale,
            tables.levels.unscale,
            out,
            out if parts is None else parts,
            length,
            channels,
            D=self.dims,
            GP=self.layout.padded,
            ROWS=tall,
            CHUNK=chunk,
            CHANNELS=wide,
            ONE=channels <= wide,
            EXPONENTIAL=exponential,
            FACTORS=factors is not None,
            EXTRAS=extras is not None,
            BANDWIDTH=parts is not None,
            num_warps=4,
        )
        return None if parts is None else parts.double().sum(1).float()


@dataclass(frozen=True)
class Causal:
    """What the keys of their own chunk give queries, `near (P, group * M, C)` and `totals (P, group * M)`.

    Query m has the place `m + offset` among the `seen` keys, and sees those up to there.
    """

    near: Tensor
    totals: Tensor
    offset: int
    seen: int
    chunk: int
    reverse: bool = False

    def first(self, tall: int) -> int:
        """The first block of `tall` places that holds a query, below zero if that one sees no key."""
        return self.offset // tall

    def tiles(self, tall: int) -> int:
        """How many blocks of `tall` places hold all queries."""
        return _blocks(self.seen, tall) - self.first(tall)


def prepare(grad: Tensor, out: Tensor, totals: Tensor, reference: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rows (P, M, C)`, `factors`, `extras` and `weights (P, M)`, see `prepare_kernel`."""
    problems, length, channels = grad.shape
    rows = torch.empty_like(grad)
    factors, extras, weights = torch.empty(3, problems, length, device=grad.device)
    prepare_kernel[(_blocks(length, 64), problems)](
        grad,
        out,
        totals,
        reference,
        rows,
        factors,
        extras,
        weights,
        length,
        channels,
        ROWS=64,
        CHANNELS=_channels(channels),
    )
    return rows, factors, extras, weights


def plan(
    query: Tensor,
    key: Tensor,
    weight: Tensor | None,
    bandwidth: Tensor,
    kernel: Formula,
    count: int,
    flags: Flags,
) -> Grid:
    """The nodes for queries and keys; raises the flags of heads that are not finite."""
    layout = Layout(count, query.dtype)
    problems, _, dims = query.shape
    wanted = _BY_NODE * count
    group = flags.group
    sides = [(query, None, flags.rows, group, max(1, _STRETCHES // group)), (key, weight, flags.shared, 1, _STRETCHES)]
    # extremes are never most of the line, however many heads a group has
    samples = [max(wanted - 2 * parts * heads, wanted // 2) for *_, heads, parts in sides]
    used = sum(samples) + sum(2 * parts * heads for *_, heads, parts in sides)
    width = _power(used)
    line = torch.empty(problems, dims, width, device=query.device)
    first = 0
    for (points, counted, flag, heads, parts), sampled in zip(sides, samples, strict=True):
        length = points.shape[1]
        chosen = None if counted is None or length <= sampled else _chosen(counted, sampled)
        survey_kernel[(parts + _blocks(sampled, ROWS), problems, heads)](
            points,
            points if chosen is None else chosen,
            line,
            flag,
            length,
            length // heads,
            sampled,
            first,
            width,
            D=dims,
            DIMS=max(16, _power(dims)),
            GROUP=heads,
            CHOSEN=chosen is not None,
            STRETCHES=parts,
            ROWS=ROWS,
            AHEAD=1 if INTERPRETED else 4,
        )
        first += sampled + 2 * parts * heads
    if INTERPRETED:
        # which takes minutes for a sort
        line[..., :used] = line[..., :used].sort(-1).values
    nodes = torch.empty(problems, dims, layout.padded, device=query.device)
    stats = torch.empty(problems, dims, 3, layout.padded, device=query.device)
    nodes_kernel[(problems * dims,)](
        line,
        bandwidth,
        nodes,
        stats,
        used,
        width,
        D=dims,
        G=count,
        POWER=width.bit_length() - 1,
        NODES_POWER=layout.padded.bit_length() - 1,
        ANCHOR=kernel.riesz,
        SORT=not INTERPRETED,
        num_warps=4,
    )
    return Grid(nodes, stats, bandwidth, layout, kernel)


def _chosen(weight: Tensor, sampled: int) -> Tensor:
    """The keys of a sample: those before which given shares of the keys that count stand."""
    steps = torch.arange(sampled, device=weight.device) * 2654435769 % (1 << 32) / float(1 << 32)
    counted = weight.double().cumsum(1)
    places = torch.searchsorted(counted, steps * counted[:, -1:], right=True)
    return places.clamp(max=weight.shape[1] - 1)


def _together(table: Tensor) -> Tensor:
    """The table of all points from those of parts."""
    return table[0] if table.shape[0] == 1 else table.sum(0)


def _blocks(length: int, block: int) -> int:
    """How many blocks hold so many things; Triton's own `cdiv` takes microseconds, some dozens of times a call."""
    return -(-length // block)


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def _channels(channels: int) -> int:
    """Channels of a block."""
    return min(64, max(16, _power(channels)))


def _split(length: int, programs: int, least: int) -> tuple[int, int]:
    """How many points a program takes, a multiple of `least`, and how many of them take one line."""
    splits = max(1, min(_BUSY // max(programs, 1), length // 1024))
    span = math.ceil(math.ceil(length / splits) / least) * least
    return span, math.ceil(length / span)
