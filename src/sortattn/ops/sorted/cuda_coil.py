"""Sums around lines that are wound, see coil.cu: rows of a spline with three nodes are read once."""

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...cuda import launch
from ...cuda.compile import Defines
from . import room
from .cuda_relay import defines_of, rounds_of, teams_of
from .lines import Bandwidth, narrow
from .tracks import Tracks

if TYPE_CHECKING:
    from .cuda_walk import Walk

WINDING, SOURCE, WHOLE, MEND = (
    Path(__file__).with_name(name) for name in ("winding.cu", "coil.cu", "cells.cu", "mend.cu")
)
# cells of a line, whose sums are in registers: a hundred thousand normal points have 7 or 8 of add_bump
CELLS = 8
# warps of a multiprocessor: with 20, which have fewer registers, a walk of 131,072 points takes 71 instead of 63 ms
_WARPS = 16
# of the second-level cache, what rows of heads that are walked at a time may take
_SHARE = 0.75
# tracks of a line
_HALVES = 2
# keys from which on it is faster: at 2,048 by less than two runs differ
_LEAST = 4096
# channels of a warp, which has sums of all cells for each
_WIDEST = 64
# threads and lines of a block that winds; threads of one that adds cells, a query each, and its dimensions at a time
_WINDERS, _LINES, _ADDERS, _DIMS = 512, 8, 512, 4
# threads of a block that sums key by key, and queries among which it looks for those that are
_MENDERS, _LOOKED = 256, 64
# keys and targets of the lists of a warp, 16 bytes each
_LISTED = 34 + 64
# what mend.cu does not need of a walk
_PLAIN = tuple(
    (name, 0)
    for name in ("HALVES", "RATE", "BOTH", "FOLDED", "PRODUCTS", "SLOPES", "ORDERED", "PASSING", "ALONG", "WAY")
) + (("NODES", 3), ("POWERS", 2), ("COMPACT", 1), ("CHUNK", 8), ("RESIDENT", 1))
# bytes of shared memory that a block has beside these, at most
_BATON = 8192


@functools.lru_cache(maxsize=256)
def pitch(tracks: Tracks) -> float:
    """The bandwidths of a cell, or zero if lines of these tracks are not wound: nodes have to be a cell apart."""
    if not tracks.compact or tracks.nodes != 3 or tracks.powers != 2 or tracks.halves or tracks.number > 1:
        return 0.0
    (table,) = tracks.tables
    nodes, (slope, middle, last) = table[:3], table[4:-1:2]
    alike = nodes[1] == 0 and nodes[0] == -nodes[2] and slope == last and middle == -2 * slope
    return float(nodes[2]) if alike and not any(table[3:-1:2]) else 0.0


def height(tracks: Tracks) -> float:
    """Of the spline: its slope between the first nodes, by cells."""
    return float(tracks.tables[0][4]) * pitch(tracks)


def serves(tracks: Tracks, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether lines are wound: long enough, as many as fill the GPU, and with shared memory for their rows."""
    if query.dtype != torch.float32 or not pitch(tracks) or value.shape[2] > _WIDEST or not query.shape[1]:
        return False
    processors, _, shared, *_ = room.device(query.device)
    enough = key.shape[1] >= _LEAST and _HALVES * key.shape[0] * key.shape[2] >= processors
    fits = _WARPS * _station(_WIDEST) + _BATON <= shared
    return enough and fits and not torch.are_deterministic_algorithms_enabled()


def wind(
    tracks: Tracks,
    key: Tensor,
    query: Tensor,
    weight: Tensor | None,
    bandwidth: Bandwidth,
    slopes: bool = False,
    cells: int = CELLS,
    strays: int = 0,
) -> Tensor:
    """How every line is wound, `(P, D, 4)`, see wind.cu; keys whose weight is zero are not seen.

    Lines with more `cells` are not, unless only so many keys are `strays`, nor, for `slopes`, such with many ties.
    """
    problems, count, dims = key.shape
    windings = torch.empty(problems, dims, 4, dtype=torch.float32, device=key.device)
    taus, tau = (None, bandwidth) if isinstance(bandwidth, float) else (bandwidth.contiguous(), 0.0)
    with launch.on(key.device):
        launch.Kernel(WINDING, "wind", (("CELLS", cells), ("STRAYS", strays), *narrow(key.dtype)))(
            (problems * math.ceil(dims / _LINES),), _WINDERS, key.contiguous(), query.contiguous(),
            None if weight is None else weight.contiguous(), taus, tau, pitch(tracks), windings, count, query.shape[1],
            dims, int(slopes),
        )  # fmt: skip
    return windings


def mend(
    query: Tensor, key: Tensor, values: Tensor, weight: Tensor | None, tau: float, each: float, height: float,
    unsure: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Means of queries of 16 bits that are `unsure`, into `out`; `values` have 32 or 64 channels."""
    (problems, number, dims), (_, count, width) = query.shape, values.shape
    launch.Kernel(MEND, "mend", defines_of_means(width, query.dtype))(
        (problems * math.ceil(number / _LOOKED),), _MENDERS, query, key, values, weight, None, tau, each, height,
        unsure, out, None, number, count, dims, out.shape[2],
    )  # fmt: skip


def defines_of_means(width: int, dtype: torch.dtype) -> Defines:
    """The macros of mend.cu for 16 bits."""
    return ("REAL", "float"), ("VEC", width // 32), ("PARTS", 1), *_PLAIN, *narrow(dtype)


def room_of(dims: int, width: int, stride: int) -> int:
    """Numbers that a head takes: windings, the sums of all cells, and what queries take of these."""
    return 4 * dims + stride // width * dims * (_totals(width) + _line(width))


def run(walk: "Walk", walking: Defines, out: Tensor, out_extra: Tensor) -> None:
    """Add the sums of all lines that are wound."""
    head = walk.head()
    teams = teams_of(walk, head, _WARPS, 4, _HALVES, _SHARE)
    defines = *defines_of(walking, _WARPS, teams, walk.rows.dtype), ("CELLS", CELLS)
    windings, each = walk.sources.windings, pitch(walk.tracks)
    scale = height(walk.tracks)
    totals, whole = (walk.empty(walk.parts * walk.dims * size) for size in (_totals(walk.width), _line(walk.width)))
    coil = launch.Kernel(SOURCE, "coil", defines)
    unsure = torch.empty(walk.problems, walk.number, dtype=torch.bool, device=walk.rows.device)
    queries, keys = walk.targets.points.contiguous(), walk.sources.points.contiguous()
    with launch.on(walk.rows.device):
        for first, heads in rounds_of(walk, head, _HALVES):
            coil(
                (heads * _HALVES * walk.dims, walk.parts), 32 * (_WARPS // teams), *walk.sources[:2],
                *walk.targets[:2], walk.rows, walk.extra, windings, scale, totals, out, out_extra, walk.problems,
                walk.count, walk.number, walk.dims, first, shared=_WARPS // teams * _station(walk.width),
            )  # fmt: skip
        launch.Kernel(WHOLE, "begin_cells", defines)(
            (walk.parts * walk.problems * walk.dims,), walk.width + 32, windings, totals, whole,
            walk.problems * walk.dims,
        )  # fmt: skip
        launch.Kernel(WHOLE, "add_cells", defines)(
            (walk.problems * math.ceil(walk.number / _ADDERS), walk.parts), _ADDERS, queries, windings, scale,
            whole, out, out_extra, unsure, walk.problems, walk.number, walk.dims,
            shared=2 * _DIMS * 4 * _line(walk.width) + 8 * walk.width + _ADDERS * _DIMS * 8,
        )  # fmt: skip
        launch.Kernel(MEND, "mend", defines)(
            (walk.problems * math.ceil(walk.number / _LOOKED),), _MENDERS, queries, keys, walk.rows, walk.extra,
            walk.bandwidth, walk.tau, each, scale, unsure, out, out_extra, walk.number, walk.count, walk.dims,
            walk.stride,
        )  # fmt: skip


def _station(width: int) -> int:
    """The shared memory of a warp that walks: thirty-two rows, and lists."""
    return 32 * width * 4 + _LISTED * 16


def _totals(width: int) -> int:
    """Numbers of a line that a walk leaves, as in coil.cu."""
    return _HALVES * CELLS * 2 * (width + 1)


def _line(width: int) -> int:
    """Numbers of a line in the table of cells, as in cells.cu."""
    return _HALVES * (CELLS + 2) * (2 * width + 4)
