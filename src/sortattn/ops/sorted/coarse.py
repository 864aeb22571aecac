"""Attention on points of 16 bits: a line of them has few distinct values, so sums are made once for each of those.

A dimension of bfloat16 has two or three thousand distinct values, however many queries there are. The walk finds the
sums of those; a query then gathers one row for each of its dimensions and adds them in registers. Nothing is sorted but
the keys, and nothing is added to memory, so the result is the same every time.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from ...kernels import SidedKernel, Terms
from ...validation import Problem
from ..direct import plain
from . import cuda
from .quotient import _unfit

_SOURCE = Path(__file__).with_name("coarse.cu")
# as in coarse.cu
_LINES, _THREADS, _WARPS, _WORDS = 8, 1024, 8, 2048
# values of 16 bits
_VALUES = 1 << 16
# distinct values of a line whose rows are in memory at a time
_ROOM = 4096


def serves(problem: Problem, kernel: SidedKernel) -> bool:
    """Whether `attention` does: 16 bits, no gradients, and nothing but sums along the lines."""
    parts = (problem.query, problem.key, problem.value, problem.bandwidth)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    terms = kernel.terms()
    tensors += [terms.below, terms.above]
    wants_gradients = torch.is_grad_enabled() and any(part.requires_grad for part in tensors)
    return (
        problem.query.dtype in cuda.NARROW
        and not wants_gradients
        and len(kernel.parts()) == 1
        and kernel.separable(problem.query[:0], problem.key[:0], 1.0) is None
        and (plain(*tensors) or torch.compiler.is_compiling())
    )


def attention(problem: Problem, kernel: SidedKernel) -> Tensor:
    """Normalised kernel sums, `(P, M, C)`, in 16 bits."""
    bandwidth, tau = None, problem.bandwidth
    if isinstance(tau, Tensor):
        bandwidth, tau = tau.to(torch.float64).reshape(-1), 0.0
    terms = kernel.terms()
    call = _attention if plain(problem.query, problem.key, problem.value) else coarse_attention
    return call(
        problem.query, problem.key, problem.value, problem.weight, bandwidth, terms.nodes, terms.below, terms.above,
        tau, terms.rate, terms.compact, terms.folded, terms.constant, problem.group, kernel.floor,
    )  # fmt: skip


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bandwidth: Tensor | None,
    nodes: Tensor,
    below: Tensor,
    above: Tensor,
    tau: float,
    rate: float,
    compact: bool,
    folded: int,
    constant: float,
    group: int,
    floor: float,
) -> Tensor:
    """`sided_sum` of points of 16 bits, divided; NaN for heads that hold what is no number."""
    query, key, value = (part.detach().contiguous() for part in (query, key, value))
    weight = None if weight is None else weight.detach().contiguous()
    terms = Terms(nodes, below.detach(), above.detach(), rate, compact, folded, constant)
    out = torch.empty(*query.shape[:2], value.shape[2], dtype=query.dtype, device=query.device)
    if not out.numel():
        return out
    if not key.shape[1]:
        return out.zero_()
    unfit = _unfit(query, key, value, group)
    walk = cuda.DistinctWalk(
        terms, cuda.sort_lines(key.float()), value, weight, tau if bandwidth is None else bandwidth
    )
    base = walk.everywhere(constant)
    places, classes, distinct = _classify(query)
    problems, number, dims = query.shape
    room = min(places.shape[2], _ROOM)
    defines = _defines(query.dtype, min(walk.stride, 128))
    with torch.cuda.device(query.device):
        for some in walk.groups(dims * room * (walk.stride + 1) * 4):
            heads = some.stop - some.start
            table, extras, sums, totals = (
                torch.empty(shape, dtype=torch.float32, device=query.device)
                for shape in (
                    (heads, dims, room, walk.stride),
                    (heads, dims, room),
                    (heads, number, walk.stride) if room < places.shape[2] else (0,),
                    (heads, number),
                )
            )
            moments = walk.moments(some, walk.tracks, walk.defines)
            for first in range(0, places.shape[2], room):
                walk.run(some, places[some], distinct[some], table, extras, moments, first)
                cuda.Kernel(_SOURCE, "collect", defines)(
                    (math.ceil(number / _WARPS), heads), 32 * _WARPS, table, extras, classes[some], distinct[some],
                    *(None if part is None else part[some] for part in base), unfit[some], sums, totals, out[some],
                    number, number // group, dims, room, first, out.shape[2], walk.stride, floor,
                )  # fmt: skip
    return out


def _classify(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct values of every line in order, `(P, D, capacity)`, which of them a point has, and how many."""
    problems, count, dims = points.shape
    capacity = min(count, _VALUES)
    places = torch.empty(problems, dims, capacity, dtype=torch.float32, device=points.device)
    distinct = torch.empty(problems, dims, dtype=torch.int32, device=points.device)
    classes = torch.empty(points.shape, dtype=torch.int16, device=points.device)
    with torch.cuda.device(points.device):
        cuda.Kernel(_SOURCE, "classify", _defines(points.dtype, 64))(
            (problems * math.ceil(dims / _LINES),), _THREADS, points, distinct, places, classes, count, dims, capacity,
            shared=_LINES * _WORDS * 6,
        )  # fmt: skip
    return places, classes, distinct


def _defines(dtype: torch.dtype, width: int):
    return ("HALF_PRECISION", cuda.NARROW[dtype]), ("WIDTH", width)


coarse_attention = torch.library.custom_op("sortattn::coarse_attention", _attention, mutates_args=())


@coarse_attention.register_fake
def _(query, key, value, *_):
    return query.new_empty(*query.shape[:2], value.shape[2])
