"""From nodes to nodes for exponentials whose points have factors, without a product: launches of decay.cu."""

import functools
from pathlib import Path

from torch import Tensor

from ....cuda.launch import Kernel
from .grid import Grid
from .language import STATS
from .launch import compiles, direct
from .layout import count_blocks
from .tables import Readable, Tables

_SOURCE = Path(__file__).with_name("decay.cu")
_CHANNELS = 64


def serves(grid: Grid) -> bool:
    """Whether the kernel of a call is one exponential, on a GPU for which CUDA sources are compiled."""
    return grid.factored and grid.changes and compiles(grid.nodes.device)


def change_levels(grid: Grid, tables: Tables, readable: Readable, factor: Tensor | None, apart: bool) -> None:
    """What `transform` makes, to `readable`; an exponential is its own transpose."""
    channels = tables.rows.shape[3]
    direct(kernel_of(grid.layout.padded, channels, apart), grid.launches)(
        (grid.problems * grid.dims, count_blocks(channels, _CHANNELS)),
        _CHANNELS + 32,
        tables.rows,
        tables.counts,
        grid.nodes,
        grid.stats,
        grid.bandwidth,
        grid.formula.numbers,
        grid.formula.kinks,
        tables.largest,
        factor,
        readable.rows,
        readable.base,
        readable.normaliser,
        readable.unscale,
        grid.formula.jumps,
        grid.dims,
        grid.layout.count,
        shared=0,
    )


@functools.cache
def kernel_of(padded: int, channels: int, apart: bool) -> Kernel:
    """For so many nodes and channels; `apart`: for slopes."""
    numbers = {"GP": padded, "STATS": STATS.value, "CHANNELS": _CHANNELS, "ROW": channels, "APART": int(apart)}
    return Kernel(_SOURCE, "change_levels", tuple(numbers.items()))
