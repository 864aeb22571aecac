"""The last step of a causal call whose tables never went to memory: launches of finish.cu."""

import functools
from pathlib import Path

import torch
from torch import Tensor

from ....cuda.launch import Kernel
from ....kernels import RIESZ_EPSILON
from .grid import Grid
from .launch import direct
from .layout import count_blocks
from .march import CHANNELS, KINDS, Units
from .tables import Output

_SOURCE = Path(__file__).with_name("finish.cu")


def finish(grid: Grid, query: Tensor, key: Tensor, units: Units, output: Output, chunk: int) -> None:
    """To the output of the heads of these `units` what they have, and what keys give queries of their own `chunk`."""
    length = key.shape[1]
    short, kind = query.dtype == torch.bfloat16, grid.formula.kind
    direct(kernel_of(grid.dims, grid.layout.padded, chunk, short, kind), grid.launches)(
        (count_blocks(length, chunk), units.heads),
        chunk,
        query,
        key,
        units.rows,
        grid.nodes,
        grid.bandwidth,
        units.sums,
        units.totals,
        units.unscale,
        units.power,
        output.flags.rows,
        output.flags.shared,
        output.rows,
        output.totals,
        units.first,
        units.each,
        length,
        grid.layout.count,
        int(output.normalise),
        RIESZ_EPSILON,
        shared=shared_of(grid.dims, chunk, kind),
    )


@functools.cache
def kernel_of(dims: int, padded: int, chunk: int, short: bool, kind: str) -> Kernel:
    """For so many dimensions and nodes, and a `Formula.kind`; `short` for bfloat16."""
    numbers = {"DIMS": dims, "GP": padded, "CHUNK": chunk, "SHARED": shared_of(dims, chunk, kind)}
    return Kernel(_SOURCE, "finish", (*numbers.items(), ("SHORT", int(short)), ("KIND", KINDS[kind])))


def shared_of(dims: int, chunk: int, kind: str) -> int:
    """Bytes of shared memory: keys, values, the outputs of half of the queries, and what is beside the keys.

    Those of add_laplace have two numbers for a point. Beside the keys there is a number for every one of them, of
    other kernels than add_riesz one for every dimension.
    """
    key, row = (4 if kind == "laplace" else 2) * dims + 16, 2 * CHANNELS + 16
    return chunk * (key + row) + 4 * (chunk if kind == "riesz" else dims) + chunk // 2 * row
