"""What the steps of a sum on the GPU hand to each other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import channel_block, count_blocks, whole


@dataclass(frozen=True)
class Places:
    """Where points stand between the nodes, `(P, D, N)`; `second` for exponentials in float32, otherwise the same.

    `lines`, for causal calls, are the points themselves, divided by the bandwidth: in float16 `(P, N, D)`, otherwise
    `(P, blocks, D, LINE)`, where it is as far from one dimension to the next in every call, so that pairs are summed
    without a computation of addresses.
    """

    first: Tensor
    second: Tensor
    lines: Tensor | None = None
    # of codes, behind the point
    bits: int = 9

    @property
    def length(self) -> int:
        return self.first.shape[2]

    @property
    def codes(self) -> bool:
        """Whether they are codes, or words that hold these, see `language`."""
        return self.first.dtype != torch.float32


@dataclass(frozen=True)
class Tables:
    """What points have left on the nodes: `rows (P, D, GP, C)`, and `counts (P, D, GP)` for one more channel.

    `weighted` says that the counts are made like the rows. Otherwise they are sums of ramps, in float32, of `length`
    points, or of `whole (P)` where not all of them count; `seconds` are those of the other places of exponentials. The
    largest number of the rows, as bits, is in `largest (P)`.
    """

    rows: Tensor
    counts: Tensor
    seconds: Tensor
    largest: Tensor
    length: int
    whole: Tensor | None = None
    weighted: bool = False


@dataclass(frozen=True)
class Readable:
    """What `transform_kernel` makes."""

    rows: Tensor
    base: Tensor
    normaliser: Tensor
    unscale: Tensor

    def some(self, heads: slice) -> "Readable":
        if whole(self.rows, heads):
            return self
        return Readable(self.rows[heads], self.base[heads], self.normaliser[heads], self.unscale[heads])


@dataclass(frozen=True)
class Flags:
    """Raised where heads are not finite: `rows (P * group)` those that the points belong to, `shared (P)` others."""

    rows: Tensor
    shared: Tensor
    group: int

    def some(self, heads: slice) -> "Flags":
        if whole(self.shared, heads):
            return self
        rows = self.rows[heads.start * self.group : heads.stop * self.group]
        return Flags(rows, self.shared[heads], self.group)


@dataclass(frozen=True)
class Slopes:
    """What derivatives by points are made of: see `slopes_kernel`. Only exponentials need the levels."""

    changes: Readable
    levels: Readable
    lefts: Tensor

    def some(self, heads: slice) -> "Slopes":
        return Slopes(self.changes.some(heads), self.levels.some(heads), self.lefts[heads])


@dataclass(frozen=True)
class Steep:
    """The slopes at and behind nodes, see `steep_kernel`, and the changes that they are made from."""

    changes: Readable
    table: Tensor
    weights: Tensor
    units: Tensor

    def some(self, heads: slice) -> "Steep":
        if whole(self.table, heads):
            return self
        return Steep(self.changes.some(heads), self.table[heads], self.weights[heads], self.units[heads])


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

    def first(self, tall: int) -> int:
        """The first block of `tall` places that holds a query, below zero if that one sees no key."""
        return self.offset // tall

    def tiles(self, tall: int) -> int:
        """How many blocks of `tall` places hold all queries."""
        return count_blocks(self.seen, tall) - self.first(tall)


@dataclass(frozen=True)
class Output:
    """Where sums at points go: `rows (P, M, C)` and, if wanted, those of the weights, `totals (P, M)`."""

    rows: Tensor
    totals: Tensor | None
    flags: Flags
    normalise: bool
    causal: Causal | None = None

    def arranged(self, tall: int) -> tuple[tuple[int, int, int], tuple, dict]:
        """For a kernel that takes `tall` points at a time: its programs, its last arguments, and constants."""
        rows, causal, group = self.rows, self.causal, self.flags.group
        problems, length, channels = rows.shape
        wide = channel_block(channels)
        even = length % tall == 0 and channels % wide == 0
        blocks, tiles = count_blocks(channels, wide), count_blocks(length, tall)
        if causal:
            even = even and causal.offset == 0 and group == 1
            tall = min(tall, causal.chunk)
            blocks, tiles = blocks * group, causal.tiles(tall)
        arguments = (
            self.flags.rows,
            self.flags.shared,
            rows,
            rows if self.totals is None else self.totals,
            causal.near if causal else rows,
            causal.totals if causal else rows,
            length,
            length // group,
            causal.offset if causal else 0,
            causal.first(tall) if causal else 0,
            channels,
        )
        constants = {
            "ROWS": tall,
            "CHANNELS": wide,
            "EVEN": even,
            "GROUP": group,
            "CHUNK": causal.chunk if causal else 0,
            "NORMALISE": self.normalise,
            "COUNT": self.totals is not None,
        }
        return (tiles, problems, blocks), arguments, constants
