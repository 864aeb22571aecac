"""Argsorts of many lines on NVIDIA GPUs, see sort.cu."""

import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...cuda import launch
from ...cuda.compile import Defines
from ...validation import working_type
from . import room
from .lines import narrow

SOURCE = Path(__file__).with_name("sort.cu")
# threads of a block that sorts and keys of each: small blocks, of which a multiprocessor has several, as a block waits
# for its slowest thread more than once; at most sixteen thousand keys, if there is shared memory for them
SORTERS = ((256, 4), (256, 8), (256, 16), (512, 16), (1024, 16))
# places that a block merges, as in merge.cu, and blocks that do, at most
_MERGED, _MERGERS = 2048, 1024
# threads of a block that splits, the keys of each that are on their way, lines and points of a block, and pieces of a
# line, as in split.cu
_SPLITTERS, _SOME, _SPLIT, _SEGMENT, _PIECES = 512, 8, 8, 4096, 256
# of a long line: keys of a sample for every stretch, and how much shorter than there is room for these are on average,
# in standard deviations of their length, so that hardly one is too long but for ties; at least so much is filled
_SAMPLED, _SHORTER, _FILLED = 450, 4, 0.3
# indices and coordinates
_PAIR = (torch.int32, torch.float32)


class Lines(NamedTuple):
    """Sorted coordinates `(P, D, N)`, and the indices of the points they belong to."""

    places: Tensor
    order: Tensor
    # as they were, `(P, N, D)`
    points: Tensor
    # `(P, D, 4)`, see wind.cu: places of lines that are wound are words
    windings: Tensor | None = None


class Look(NamedTuple):
    """Where to count what is no finite number: `unfit (P, group)`, by so many points, or zero for all of a group."""

    unfit: Tensor | None = None
    each: int = 0

    def some(self, heads: slice) -> "Look":
        return self if self.unfit is None else Look(self.unfit[heads], self.each)

    def arguments(self) -> tuple[Tensor | None, int, int]:
        return self.unfit, 1 if self.unfit is None else self.unfit.shape[1], self.each


_NOWHERE = Look()


def sort_lines(points: Tensor, look: Look = _NOWHERE, windings: Tensor | None = None) -> Lines:
    """Every dimension of `points (P, N, D)` in order; float64 is not looked at, nor wound."""
    problems, count, dims = points.shape
    order = torch.empty(problems, dims, count, dtype=torch.int32, device=points.device)
    places = torch.empty(order.shape, dtype=working_type(points.dtype), device=points.device)
    # a short line is sorted in shared memory, a long one needs room for its stretches
    short = places.dtype == torch.float32 and count <= math.prod(_sorter(count, room.device(points.device).shared))
    each = 0 if short else 4 * places.element_size() * count * dims
    for some in room.groups(problems, each, max(room.WORKSPACE // 4, places.numel() * places.element_size())):
        if places.dtype == torch.float32 and points.numel():
            around = None if windings is None else windings[some]
            _launch_sort(points[some], order[some], places[some], look.some(some), around)
            continue
        if points.is_meta:
            continue
        # what is no finite number stands at zero, as in the kernels; adding zero turns -0.0 into 0.0
        lines = points[some].nan_to_num(0.0, 0.0, 0.0).add_(0.0).transpose(1, 2).contiguous()
        places[some], order[some] = lines.sort(dim=-1, stable=True)
    return Lines(places, order, points, windings)


def sort_both(
    points: Tensor, others: Tensor, unfit: Tensor | None = None, windings: Tensor | None = None
) -> tuple[Lines, Lines]:
    """The same of two, by one kernel if they are short and alike; the others have shares for every place of a group."""
    look = Look(unfit, 0 if unfit is None else others.shape[1] // unfit.shape[1])
    problems, count, dims = points.shape
    alike = points.shape == others.shape and points.dtype == others.dtype and points.numel()
    threads, items = _sorter(count, room.device(points.device).shared)
    if not alike or points.dtype == torch.float64 or count > threads * items:
        return sort_lines(points, Look(unfit), windings), sort_lines(others, look, windings)
    shape = (2, problems, dims, count)
    order, places = (torch.empty(shape, dtype=dtype, device=points.device) for dtype in _PAIR)
    with launch.on(points.device):
        _sort_runs(points, others, order, places, threads, items, look, windings)
    return Lines(places[0], order[0], points, windings), Lines(places[1], order[1], others, windings)


# next to a short call it takes its time
@functools.lru_cache(maxsize=256)
def _sorter(count: int, shared: int) -> tuple[int, int]:
    """Of `SORTERS`, the smallest block for so many keys, or the largest that there is shared memory for."""
    fitting = [sorter for sorter in SORTERS if _sort_bytes(*sorter) <= shared]
    return next((sorter for sorter in fitting if count <= math.prod(sorter)), fitting[-1])


def _defines(threads: int, items: int, dtype: torch.dtype, wound: bool) -> Defines:
    return ("THREADS", threads), ("ITEMS", items), *((("WOUND", 1),) if wound else ()), *narrow(dtype)


def _sort_bytes(threads: int, items: int) -> int:
    """The shared memory of a block that sorts, as in sort.cu."""
    length, warps = threads * items, threads // 32
    return max(length * 8 + threads * 4 + warps * 8, length * 6 + warps * 256 * 2 + (256 + warps) * 4)


def _split_bytes(parts: int) -> int:
    """The shared memory of a block that splits, beside some words that it has in any case."""
    return 8 * _SPLITTERS * _SOME + 4 * (_PIECES + 1) * _SPLIT + 16 * parts * _SPLIT


def _most_parts(shared: int) -> int:
    """Of how many stretches a block knows the bounds."""
    return (shared - 64 - _split_bytes(0)) // (16 * _SPLIT)


def _sort_runs(
    points: Tensor,
    others: Tensor | None,
    order: Tensor,
    places: Tensor,
    threads: int,
    items: int,
    look: Look,
    windings: Tensor | None,
) -> None:
    """Short lines, of two if there are others."""
    heads, count, dims = points.shape
    launch.Kernel(SOURCE, "sort_runs", _defines(threads, items, points.dtype, windings is not None))(
        (heads * dims * (1 if others is None else 2),), threads, points, others, order, places, count, dims,
        *look.arguments(), windings, shared=_sort_bytes(threads, items),
    )  # fmt: skip


def _launch_sort(points: Tensor, order: Tensor, places: Tensor, look: Look, windings: Tensor | None) -> None:
    heads, count, dims = points.shape
    threads, items = _sorter(count, room.device(points.device).shared)
    length, shared = threads * items, _sort_bytes(threads, items)
    runs = math.ceil(count / length)
    defines = _defines(threads, items, points.dtype, windings is not None)
    with launch.on(points.device):
        if runs == 1:
            _sort_runs(points, None, order, places, threads, items, look, windings)
            return
        # for the sake of bitwise equal sums equal keys keep their order, which takes merges where there are many
        stable = int(torch.are_deterministic_algorithms_enabled())
        sampled = min(length, _SAMPLED * count // length)
        sample = points[:, :: math.ceil(count / sampled)].contiguous()
        filled = max(1 - _SHORTER * math.sqrt(count / (length * sampled)), _FILLED)
        parts = min(math.ceil(count / (filled * length)), _most_parts(room.device(points.device).shared))
        shape = (heads, dims, sample.shape[1])
        indices, bounds = (torch.empty(shape, dtype=dtype, device=points.device) for dtype in _PAIR)
        _launch_sort(sample, indices, bounds, _NOWHERE, windings)
        # blocks that sort side by side
        at_once = room.device(points.device).processors * (1024 // threads)
        # a line that is longer than all stretches together is left to the merges; its pairs take their turns below
        split = parts * length >= count
        rows = parts if split else runs
        pairs = torch.empty(heads * dims * rows, length, 2, dtype=torch.int32, device=points.device)
        done = torch.full((heads * dims,), int(split), dtype=torch.int32, device=points.device)
        if split:
            sizes = torch.zeros(heads * dims * parts, dtype=torch.int32, device=points.device)
            launch.Kernel(SOURCE, "split", defines)(
                (heads * math.ceil(dims / _SPLIT) * math.ceil(count / _SEGMENT),), _SPLITTERS, points, bounds, pairs,
                sizes, done, count, dims, parts, sample.shape[1], stable, *look.arguments(), windings,
                shared=_split_bytes(parts),
            )  # fmt: skip
            launch.Kernel(SOURCE, "sort_parts", defines)(
                (heads * dims * parts,), threads, pairs, sizes, done, order, places, count, parts, stable, at_once,
                windings, shared=shared,
            )  # fmt: skip
        # for lines that are not sorted yet, runs and merged ones take turns in two pairs of buffers, such that the last
        # one is the result
        other = [part.view(dtype)[: order.numel()] for part, dtype in zip(pairs.view(2, -1), _PAIR, strict=True)]
        here, there = (order, places), other
        if math.ceil(math.log2(runs)) % 2:
            here, there = there, here
        launch.Kernel(SOURCE, "sort_rest", defines)(
            (min(heads * dims * runs, at_once),), threads, points, *here, done, heads * dims, count, dims, runs,
            *look.arguments(), windings, shared=shared,
        )  # fmt: skip
        while length < count:
            grid = (min(heads * dims * math.ceil(count / _MERGED), _MERGERS),)
            launch.Kernel(SOURCE, "merge_runs", defines)(grid, 256, *here, *there, done, heads * dims, count, length)
            here, there = there, here
            length *= 2
