"""The sums on CUDA devices: launches of the kernels beside this file, which are compiled at first use."""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...cuda.launch import Kernel, on
from ...cuda.support import trouble
from ...kernels import (
    RIESZ_EPSILON,
    AddBump,
    AddLaplace,
    AddRiesz,
    Laplace,
    PolynomialExponential,
    Riesz,
    Spline,
)
from . import short
from .inputs import TENSORS, Inputs

_FORWARD, _TILED, _SURVEY, _SLOPES = (
    Path(__file__).with_name(f"{name}.cu") for name in ("forward", "tiled", "survey", "slopes")
)
NAMES = tuple(kind.name for kind in (AddRiesz, AddLaplace, AddBump, Spline, PolynomialExponential, Laplace, Riesz))
# whose slopes are steps, which `slopes.cu` sums
STEPS = (AddRiesz.name, AddLaplace.name, AddBump.name)
# rows of a block; float64 has half the registers
ROWS = {torch.float32: 64, torch.float64: 32}
_TYPES = {torch.float32: "float", torch.float64: "double"}
_THREADS = 128
# three blocks of this size fit into a multiprocessor of Hopper, two into one of Ampere, one into smaller ones
_SHARED = 72 << 10
# of the forward pass in float32, by the groups of warps of a block: factors of e^-|s - t| take twice the room, and
# where there is less of it not all dimensions have them
_TILES, _FACTORS, _FEWER_FACTORS = {1: 73 << 10, 2: 125 << 10}, {1: 105 << 10, 2: 174 << 10}, 98 << 10
# of slopes with one step, with three, and with factors
_PLACES = {AddRiesz.name: 88 << 10, AddBump.name: 106 << 10, AddLaplace.name: 79 << 10}
_SLOPE_THREADS = 256
# rows that a block prepares for the slopes
_SLICE = 32
# columns that are summed at a time, and the most of them
_CHUNK, _WIDEST = 64, 256
# heads that every block of the forward pass looks through by itself
_SHORT = 160
# blocks that look through the inputs, and numbers that one of them takes at least
_LOOKING, _LOOK = 1024, 4096


def serves(query: Tensor, value: Tensor, kernel: str) -> bool:
    """Whether the CUDA kernels sum these tensors."""
    return (
        query.is_cuda
        and kernel in NAMES
        and max(query.shape[-1], value.shape[-1]) <= _WIDEST
        and trouble(query.device.index) is None
    )


@lru_cache
def kernel_of(
    entry: str, kernel: str, dtype: torch.dtype, wide: bool, coarse: bool = False, groups: int = 1, roomy: bool = True
) -> Kernel:
    """The function `entry` for a kernel and a type; `wide` for more than 64 dimensions or channels.

    `coarse` makes products of numbers with eleven digits. `groups` of warps share the rows of a block, in the forward
    pass of float32; `roomy` see `is_roomy`.
    """
    defines = (
        ("NUMBER", _TYPES[dtype]),
        ("KERNEL", kernel.upper()),
        ("CHUNKS", _WIDEST // _CHUNK if wide else 1),
        ("EPSILON", repr(RIESZ_EPSILON)),
    )
    room = ("SHARED", shared_of(entry, kernel, dtype, coarse, groups, roomy))
    coarse = ("COARSE", int(coarse))
    if entry in ("forward", "forward_values") and dtype == torch.float32:
        # those that hold more, of factors or of sums in integers, have twice the registers
        blocks = 2 if wide or kernel in (AddLaplace.name, AddRiesz.name, Laplace.name) else 3
        return Kernel(
            _FORWARD, "forward",
            (
                *defines, ("BLOCKS", blocks if groups == 1 else 1), room, coarse,
                ("REVERSED", int(entry == "forward_values")), ("GROUPS", groups), ("ROOMY", int(roomy)),
            ),
        )  # fmt: skip
    if entry in ("prepare", "slopes"):
        return Kernel(_SLOPES, entry, (*defines, ("BLOCKS", 2), room, coarse, ("SLICE", _SLICE)))
    defines += (("OWN", ROWS[dtype]), ("SHARED", _SHARED), ("BLOCKS", 3 if dtype == torch.float32 else 1))
    return Kernel(_TILED, entry, (*defines, ("FORWARD", 1)) if entry == "forward" else defines)


@lru_cache
def survey_of(dtype: torch.dtype) -> Kernel:
    """The kernel that looks through the inputs."""
    return Kernel(_SURVEY, "survey", (("NUMBER", _TYPES[dtype]),))


@lru_cache
def room_of(device: torch.device) -> int:
    """Bytes of shared memory that a block may have: 227 KB on Hopper, 163 on an A100, 99 on GPUs for desks."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@lru_cache
def processors_of(device: torch.device) -> int:
    """How many multiprocessors there are."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def is_roomy(device: torch.device) -> bool:
    """Whether a block may have the shared memory for the factors of all dimensions."""
    return room_of(device) >= _FACTORS[1]


def shared_of(entry: str, kernel: str, dtype: torch.dtype, coarse: bool, groups: int = 1, roomy: bool = True) -> int:
    """Bytes of shared memory of a block."""
    if entry in ("prepare", "slopes"):
        return _PLACES[AddBump.name if coarse and kernel == AddLaplace.name else kernel]
    if entry in ("forward", "forward_values") and dtype == torch.float32:
        if kernel != AddLaplace.name:
            return _TILES[groups]
        return _FACTORS[groups] if roomy else _FEWER_FACTORS
    return 0 if entry == "backward_quotient" else _SHARED


class _Sizes(NamedTuple):
    """What all calls on tensors of the same sizes have in common; any leading dimensions are the problems."""

    kernel: str
    dtype: torch.dtype
    device: torch.device
    coarse: bool
    problems: int
    rows: int
    columns: int
    dims: int
    channels: int
    group: int
    count: int
    causal: bool
    normalised: bool
    tau: float

    @property
    def wide(self) -> bool:
        return max(self.dims, self.channels) > _CHUNK

    @property
    def numbers(self) -> tuple[int, ...]:
        """As every kernel takes them: rows, columns, dims, channels, queries of a head, causal, count."""
        each = max(self.rows // self.group, 1)
        return self.rows, self.columns, self.dims, self.channels, each, int(self.causal), self.count

    def blocks(self, rows: int) -> int:
        """How many tiles the rows of a problem make."""
        return -(-rows // ROWS[self.dtype])

    def launch(self, entry: str, rows: int, *last: int | float, passes: int = 1) -> Callable[..., None]:
        """A launch of a block for every tile of `rows` rows of every problem, `passes` times."""
        groups, roomy = self._groups(entry, rows), is_roomy(self.device)
        kernel = kernel_of(entry, self.kernel, self.dtype, self.wide, self.coarse, groups, roomy)
        shared = shared_of(entry, self.kernel, self.dtype, self.coarse, groups, roomy)
        return kernel.prepared((self.problems * self.blocks(rows), passes), _THREADS * groups, *last, shared=shared)

    def _groups(self, entry: str, rows: int) -> int:
        """Groups of warps of a block: two, if every multiprocessor has at most one block, and room for both.

        Of `add_laplace` also if it has two blocks and then one more, for which one group would be alone.
        """
        blocks, processors = self.problems * self.blocks(rows), processors_of(self.device)
        few = blocks <= processors or (self.kernel == AddLaplace.name and 2 * processors < blocks <= 3 * processors)
        able = entry in ("forward", "forward_values") and self.dtype == torch.float32 and not self.wide
        return 2 if few and able and room_of(self.device) >= _FACTORS[2] else 1


def _call(inputs: Inputs) -> tuple[_Sizes, list[Tensor | None]]:
    """The sizes and the tensors of a call, to be kept, as launches take nothing but addresses."""
    query = inputs.query
    *leading, rows, dims = query.shape
    *_, columns, channels = inputs.value.shape
    table, count = _table(inputs.kernel, inputs.parameters, query.dtype)
    tensors = [part if part is None else part.contiguous() for part in (*inputs[: TENSORS - 1], table)]
    sizes = _Sizes(
        inputs.kernel, query.dtype, query.device, inputs.coarse, math.prod(leading), rows, columns, dims, channels,
        inputs.group, count, inputs.causal, inputs.normalised, inputs.tau,
    )  # fmt: skip
    return sizes, tensors


class _Forward(NamedTuple):
    """The launches of a forward pass; blocks that look for themselves need no room for what others find."""

    found: int
    survey: Callable[..., None] | None
    sums: Callable[..., None]


@lru_cache(maxsize=1024)
def _forward_of(sizes: _Sizes) -> _Forward:
    found, survey, slices = 0, None, 0
    if sizes.group > 1 or sizes.dtype != torch.float32 or max(sizes.rows, sizes.columns) > _SHORT:
        parts = sizes.problems * (sizes.group + 2)
        each = sizes.rows // sizes.group
        numbers = max(each * sizes.dims, sizes.columns * sizes.dims, sizes.columns * sizes.channels)
        slices = max(1, min(-(-_LOOKING // max(parts, 1)), numbers // _LOOK))
        found = 4 * parts * slices
        survey = survey_of(sizes.dtype).prepared(
            (parts * slices,), 256, each, sizes.columns, sizes.dims, sizes.channels, sizes.group, slices,
            int(sizes.kernel in (AddLaplace.name, Laplace.name)),
        )  # fmt: skip
    last = *sizes.numbers, int(sizes.normalised), slices, float(sizes.tau)
    return _Forward(found, survey, sizes.launch("forward", sizes.rows, *last))


class _Steps(NamedTuple):
    """The launches of a backward pass by steps, and the room that they share.

    One behind the other, as every tensor costs time: vectors as halves, large and small ones, of queries and keys; the
    gradients by the sums; what `prepare` finds; what undoes the scales of halves; the gradients by the totals.
    """

    room: int
    places: tuple[int, ...]
    tiles: tuple[int, int]
    prepare: Callable[..., None]
    slopes: Callable[..., None]
    values: Callable[..., None]


@lru_cache(maxsize=1024)
def _steps_of(sizes: _Sizes) -> _Steps:
    rows, columns, dims, channels, each, causal, _ = sizes.numbers
    queries, keys = sizes.problems * rows, sizes.problems * columns
    slices = -(-max(rows, columns) // _SLICE)
    normalised, tau = int(sizes.normalised), float(sizes.tau)
    parts = (
        _CHUNK * queries, _CHUNK * keys, normalised * channels * queries, 12 * sizes.problems * slices, queries, keys,
        queries,
    )  # fmt: skip
    *places, room = accumulate((4 * part for part in parts), initial=0)
    tiles = sizes.blocks(rows), sizes.blocks(columns)
    key = sizes.kernel, sizes.dtype, False, sizes.coarse
    prepare = kernel_of("prepare", *key).prepared(
        (2 * sizes.problems * slices,), _SLOPE_THREADS, rows, columns, dims, channels, normalised, slices
    )
    slopes = kernel_of("slopes", *key).prepared(
        (sizes.problems * sum(tiles),), _SLOPE_THREADS, sizes.problems, rows, columns, dims, each, causal, tau,
        shared=shared_of("slopes", sizes.kernel, sizes.dtype, sizes.coarse),
    )  # fmt: skip
    # of keys and queries
    last = columns, rows, *sizes.numbers[2:], 0, slices, tau
    return _Steps(room // 4, tuple(places), tiles, prepare, slopes, sizes.launch("forward_values", columns, *last))


def _table(kernel: str, parameters: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, int]:
    """The numbers of a kernel as `tiled.cu` reads them, and how many nodes or coefficients there are."""
    if kernel == Spline.name:
        nodes, *rest = Spline.pieces(parameters)
        return torch.cat([nodes, *rest]).to(dtype), len(nodes)
    if kernel == PolynomialExponential.name:
        return parameters.to(dtype), len(parameters)
    return None, 0


def forward(inputs: Inputs, gradients: bool = True, copied: bool = False) -> tuple[Tensor | None, ...]:
    """What `tiled_sum` returns; with `copied` the rows once more, and without `gradients` the rows alone."""
    if short.serves(inputs):
        return short.forward(inputs, gradients, copied)
    query = inputs.query
    with on(query.device):
        sizes, tensors = _call(inputs)
        launches = _forward_of(sizes)
        out = query.new_empty((*query.shape[:-1], sizes.channels))
        total = query.new_empty(query.shape[:-1]) if gradients else None
        shift = None
        if gradients and inputs.normalised and sizes.kernel == Laplace.name:
            shift = torch.empty_like(total)
        copy = torch.empty_like(out) if copied else None
        found = None
        if launches.survey is not None:
            found = query.new_empty(launches.found, dtype=torch.float32)
            launches.survey(*tensors[:3], found)
        launches.sums(*tensors, found, out, copy, total, shift)
    return out, total, shift, copy


def backward(
    grad: Tensor, rows: Tensor, total: Tensor, shift: Tensor | None, inputs: Inputs
) -> tuple[Tensor | None, ...]:
    """What `tiled_sum_backward` returns; None is what it has no number for."""
    if short.serves(inputs):
        return *short.backward(grad, rows.contiguous(), total.contiguous(), inputs), None, None
    query, bandwidth, parameters, normalised = inputs.query, inputs.bandwidth, inputs.parameters, inputs.normalised
    with on(query.device):
        sizes, tensors = _call(inputs)
        grad, rows, total = grad.contiguous(), rows.contiguous(), total.contiguous()
        if sizes.kernel in STEPS and sizes.dtype == torch.float32 and not sizes.wide and _has_room(sizes):
            return _backward_by_steps(sizes, tensors, grad, rows, total)
        grad_total = torch.empty_like(total) if normalised else torch.zeros_like(total)
        if normalised:
            whole, grad = (grad, rows, total), torch.empty_like(grad)
            # a warp has a row
            grid = (-(-total.numel() // (_THREADS // 32)),)
            quotient = kernel_of("backward_quotient", sizes.kernel, sizes.dtype, sizes.wide)
            quotient(grid, _THREADS, *whole, grad, grad_total, total.numel(), sizes.channels)
        given = (grad, grad_total, *tensors, shift, *sizes.numbers, float(sizes.tau))
        gradients = [torch.empty_like(part) for part in tensors[:3]]
        # per block, sums of (point - origin) gradient
        moments = [
            query.new_empty(sizes.problems, sizes.blocks(count), dtype=torch.float64)
            for count in (sizes.rows, sizes.columns)
        ]
        sizes.launch("backward_query", sizes.rows)(*given, gradients[0], moments[0])
        sizes.launch("backward_key", sizes.columns)(*given, gradients[1], gradients[2], moments[1])
        # Phi is a function of q / tau and k / tau: d/dtau = -(<q, d/dq> + <k, d/dk>) / tau
        grad_bandwidth = None
        if bandwidth is not None:
            moment = (moments[0].sum(1) + moments[1].sum(1)).reshape(-1, 1, 1)
            grad_bandwidth = (-moment / bandwidth).to(bandwidth.dtype)
        grad_parameters = None if parameters is None else _table_gradient(sizes, given, parameters)
    return *gradients, grad_bandwidth, grad_parameters


def _has_room(sizes: _Sizes) -> bool:
    """Whether a block of `slopes.cu` has the shared memory that it needs, which small GPUs do not have for all."""
    return shared_of("slopes", sizes.kernel, sizes.dtype, sizes.coarse) <= room_of(sizes.device)


def _backward_by_steps(
    sizes: _Sizes, tensors: list[Tensor | None], grad: Tensor, rows: Tensor, total: Tensor
) -> tuple[Tensor | None, ...]:
    query, key, value, weight, bandwidth, _ = tensors
    by_query, by_key, by_value = (torch.empty_like(part) for part in (query, key, value))
    steps = _steps_of(sizes)
    room = query.new_empty(steps.room)
    start = room.data_ptr()
    halves, value_halves, sums, found, scales, value_scales, grad_total = [start + place for place in steps.places]
    if not sizes.normalised:
        sums = grad.data_ptr()
    steps.prepare(
        query, key, value, grad, rows, total, sums, grad_total, halves, scales, value_halves, value_scales, found
    )
    moments = None if bandwidth is None else query.new_empty(sizes.problems * sum(steps.tiles), dtype=torch.float64)
    steps.slopes(
        query, key, halves, scales, grad_total, value_halves, value_scales, weight, bandwidth, by_query, by_key, moments
    )
    # the gradients of the values are kernel sums too, of keys and queries
    steps.values(key, query, sums, weight, bandwidth, None, found, by_value, None, None, None)
    grad_bandwidth = None
    if bandwidth is not None:
        parts = moments.split([sizes.problems * count for count in steps.tiles])
        moment = sum(part.view(sizes.problems, count).sum(1) for part, count in zip(parts, steps.tiles, strict=True))
        grad_bandwidth = (-moment[:, None, None] / bandwidth).to(bandwidth.dtype)
    return by_query, by_key, by_value, grad_bandwidth, None


def _table_gradient(sizes: _Sizes, given: tuple, parameters: Tensor) -> Tensor:
    passes = sizes.count + 1 if sizes.kernel == Spline.name else sizes.count
    size = (passes, sizes.problems * sizes.blocks(sizes.rows), 2)
    moments = torch.empty(size, dtype=torch.float64, device=given[0].device)
    sizes.launch("backward_table", sizes.rows, passes=passes)(*given, moments)
    first, second = moments.sum(1).unbind(1)
    if sizes.kernel == Spline.name:
        first = Spline.piece_gradients(parameters.to(first), first, second)
    return first.to(parameters)
