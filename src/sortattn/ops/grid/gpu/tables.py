"""What the steps of a sum on the GPU hand to each other."""

from dataclasses import dataclass

from torch import Tensor

from .layout import count_blocks


@dataclass(frozen=True)
class Places:
    """Where points stand between the nodes, `(P, D, N)`; `second` for exponentials, otherwise the same tensor.

    `lines (P, D, N)`, for causal calls, are the points themselves, divided by the bandwidth.
    """

    first: Tensor
    second: Tensor
    lines: Tensor | None = None

    @property
    def length(self) -> int:
        return self.first.shape[2]


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
        return Readable(self.rows[heads], self.base[heads], self.normaliser[heads], self.unscale[heads])


@dataclass(frozen=True)
class Flags:
    """Raised where heads are not finite: `rows (P * group)` those that the points belong to, `shared (P)` others."""

    rows: Tensor
    shared: Tensor
    group: int

    def some(self, heads: slice) -> "Flags":
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
        return count_blocks(self.seen, tall) - self.first(tall)
