"""What the GPU walks along every line, made of the terms of a kernel."""

import functools
import math
from typing import NamedTuple

from ...kernels import Terms

# blocks of a group, whose moments are summed, as in walk.cu
GROUP = 16


class Tracks(NamedTuple):
    """What is walked along every line: a table for each, and in bits which of them are mirrored and so on."""

    # nodes, coefficients below and, if any count, above, and rate, one behind the other
    tables: tuple[tuple[float, ...], ...]
    nodes: int
    powers: int
    rate: bool
    # whether sources above count too
    both: bool
    compact: bool
    folded: int
    # whether ties count half
    halves: bool
    mirrored: int
    closed: int
    negated: int

    @property
    def number(self) -> int:
        return len(self.tables)

    @property
    def sums(self) -> int:
        """Numbers that the walk keeps for a channel."""
        return self.powers * (1 + self.both)

    @property
    def block(self) -> int:
        """Sources whose moments are summed, as in walk.cu."""
        return 128 if self.both or self.compact else 256

    def moments(self, count: int, dims: int, width: int, stride: int) -> int:
        """Numbers that the moments of a head take, for one track of each dimension."""
        blocks = math.ceil(count / self.block)
        places = blocks + 1 + self.compact * math.ceil(blocks / GROUP)
        return self.sums * (width + 1) * places * dims * (stride // width)

    def only(self, i: int) -> "Tracks":
        """One of them alone."""
        flags = (flag >> i & 1 for flag in (self.mirrored, self.closed, self.negated))
        return self._replace(
            tables=(self.tables[i],), **dict(zip(("mirrored", "closed", "negated"), flags, strict=True))
        )


def tracks_of(terms: Terms, mirrored: bool, slopes: bool = False) -> Tracks:
    """The tracks of a kernel; with `slopes`, of one whose slopes at the targets are wanted too."""
    tables = (tuple(map(tuple, table.tolist())) for table in (terms.below, terms.above))
    return _make_tracks(tuple(terms.nodes.tolist()), *tables, terms.rate, terms.compact, terms.folded, mirrored, slopes)


# the same for every call of a layer: next to a short one it takes its time
@functools.lru_cache(maxsize=256)
def _make_tracks(
    nodes: tuple, below: tuple, above: tuple, rate: float, compact: bool, folded: int, mirrored: bool, slopes: bool
) -> Tracks:
    constants = [tuple(row[0] for row in side) for side in (below, above)]
    both = any(any(row) for row in above)
    coefficients = [number for side in ((below, above) if both else (below,)) for row in side for number in row]
    # a folded line is walked in two halves, its kernel being its own transpose
    flipped = [False, True] if folded else [mirrored]
    # where both sides agree a tie may count for either as a whole
    whole = both and constants[0] == constants[1]
    halves = slopes or (not whole and any(any(side) for side in constants))
    if slopes:
        # a slope is by the target, which a mirrored track has negated
        negated = flipped
    else:
        # an odd kernel changes its sign with the half
        negated = [folded < 0 and half != mirrored for half in flipped]
    tables = ((*nodes, *coefficients, rate),) * len(flipped)
    flags = (_bits(bits) for bits in (flipped, [whole], negated))
    return Tracks(tables, len(nodes), len(below[0]), bool(rate), both, compact, folded, halves, *flags)


def _bits(flags) -> int:
    return sum(1 << i for i, flag in enumerate(flags) if flag)
