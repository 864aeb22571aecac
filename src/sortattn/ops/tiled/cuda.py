"""The sums on CUDA devices: launches of the kernels beside this file, which are compiled at first use."""

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...cuda.launch import Kernel, foreseen, on
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

_FORWARD, _SURVEY, _CHUNKS, _PREPARE, _SLOPES = (
    Path(__file__).with_name(f"{name}.cu") for name in ("forward", "survey", "chunks", "prepare", "slopes")
)
# of float64, and of the backward pass of wide heads and of kernels whose slopes are not steps
_TILED = {
    "forward": "tiled",
    "backward_quotient": "backward_quotient",
    "backward_query": "backward",
    "backward_key": "backward",
    "backward_table": "backward_table",
}
NAMES = tuple(kind.name for kind in (AddRiesz, AddLaplace, AddBump, Spline, PolynomialExponential, Laplace, Riesz))
# whose slopes are steps, which `slopes.cu` sums
STEPS = (AddRiesz.name, AddLaplace.name, AddBump.name)
# whose keys and values `chunks.cu` makes ready
STREAMED = (AddLaplace.name, AddBump.name)
# rows of a block; float64 has half the registers
ROWS = {torch.float32: 64, torch.float64: 32}
# of the forward pass in float32, where blocks of half the rows fill multiprocessors better
_FEWER_ROWS = 32
_TYPES = {torch.float32: "float", torch.float64: "double"}
_THREADS = 128
# three blocks of this size fit into a multiprocessor of Hopper, two into one of Ampere, one into smaller ones
_SHARED = 72 << 10
# of the forward pass in float32, by the groups of warps of a block: factors of e^-|s - t| take twice the room, and
# where there is less of it not all dimensions have them
_TILES, _FACTORS, _FEWER_FACTORS = {1: 73 << 10, 2: 125 << 10}, {1: 105 << 10, 2: 174 << 10}, 98 << 10
# of a walk over what `chunks.cu` has made ready: three blocks of this size fit into a multiprocessor of Hopper
_WALK = 75 << 10
# numbers of a chunk, dimensions of keys that are one number each and of which it has those of as many rows as a block
# has, chunks of their values, the fewest dimensions that are such numbers, and the most bytes of all chunks
_CHUNK_SIZE, _CHUNK_DIMS, _VALUE_CHUNKS, _FEWEST_DIMS, _CHUNK_ROOM = 2048, 32, 2, 32, 512 << 20
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
_LOOKING, _LOOK, _SURVEY_THREADS = 1024, 4096, 256


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
    entry: str, kernel: str, dtype: torch.dtype, wide: bool, coarse: bool = False, groups: int = 1, roomy: bool = True,
    rows: int = ROWS[torch.float32], taus: bool = True, early: bool = False, stream: bool = False,
) -> Kernel:  # fmt: skip
    """The function `entry` for a kernel and a type; `wide` for more than 64 dimensions or channels.

    `coarse` makes products of numbers with eleven digits. In the forward pass of float32 `groups` of warps share the
    `rows` of a block; `roomy` see `is_roomy`; without `taus` all problems have one bandwidth, which makes a difference
    to `add_bump`; `early` see `begins_early`, `stream` see `_Call.streams`.
    """
    defines = (
        ("NUMBER", _TYPES[dtype]),
        ("KERNEL", kernel.upper()),
        ("CHUNKS", _WIDEST // _CHUNK if wide else 1),
        ("EPSILON", repr(RIESZ_EPSILON)),
    )
    room = ("SHARED", shared_of(entry, kernel, dtype, coarse, groups, roomy, stream))
    coarse = ("COARSE", int(coarse))
    if entry in ("forward", "forward_values") and dtype == torch.float32:
        # those that hold more, of factors or of sums in integers beside others, have twice the registers
        blocks = 2 if wide or (kernel in (AddLaplace.name, Laplace.name) and not stream) else 3
        return Kernel(
            _FORWARD, "forward",
            (
                *defines, ("BLOCKS", blocks if groups == 1 else 1), room, coarse,
                ("REVERSED", int(entry == "forward_values")), ("GROUPS", groups), ("ROOMY", int(roomy)), ("OWN", rows),
                ("TAUS", int(taus or kernel != AddBump.name)), ("EARLY", int(early)), ("STREAM", int(stream)),
            ),
        )  # fmt: skip
    if entry == "prepare":
        return Kernel(_PREPARE, entry, (*defines, ("SLICE", _SLICE)))
    if entry == "slopes":
        return Kernel(_SLOPES, entry, (*defines, ("BLOCKS", 2), room, coarse))
    defines += (("OWN", ROWS[dtype]), ("SHARED", _SHARED), ("BLOCKS", 3 if dtype == torch.float32 else 1))
    return Kernel(Path(__file__).with_name(f"{_TILED[entry]}.cu"), entry, defines)


@lru_cache
def survey_of(dtype: torch.dtype, early: bool = False) -> Kernel:
    """The kernel that looks through the inputs; `early` if the next one begins before it ends."""
    return Kernel(_SURVEY, "survey", (("NUMBER", _TYPES[dtype]), ("EARLY", int(early))))


@lru_cache
def chunks_of(kernel: str, early: bool = False) -> Kernel:
    """The kernel that makes keys and values ready for all blocks; `early` as above."""
    defines = (("NUMBER", "float"), ("KERNEL", kernel.upper()), ("EPSILON", repr(RIESZ_EPSILON)))
    return Kernel(_CHUNKS, "chunks", (*defines, ("EARLY", int(early))))


@lru_cache
def room_of(device: torch.device) -> int:
    """Bytes of shared memory that a block may have: 227 KB on Hopper, 163 on an A100, 99 on GPUs for desks."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@lru_cache
def processors_of(device: torch.device) -> int:
    """How many multiprocessors there are."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def begins_early(device: torch.device) -> bool:
    """Whether a launch may begin before the one before it ends, and wait for it where it needs it."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def walks(device: torch.device) -> bool:
    """Whether one instruction brings a chunk to shared memory, and three blocks have room for them: on Hopper."""
    return begins_early(device) and room_of(device) >= 3 * _WALK


def is_roomy(device: torch.device) -> bool:
    """Whether a block may have the shared memory for the factors of all dimensions."""
    return room_of(device) >= _FACTORS[1]


def shared_of(
    entry: str, kernel: str, dtype: torch.dtype, coarse: bool, groups: int = 1, roomy: bool = True, stream: bool = False
) -> int:  # fmt: skip
    """Bytes of shared memory of a block."""
    if stream:
        return _WALK
    if entry in ("prepare", "slopes"):
        return _PLACES[AddBump.name if coarse and kernel == AddLaplace.name else kernel]
    if entry in ("forward", "forward_values") and dtype == torch.float32:
        if kernel != AddLaplace.name:
            return _TILES[groups]
        return _FACTORS[groups] if roomy else _FEWER_FACTORS
    return 0 if entry == "backward_quotient" else _SHARED


class _Call:
    """What every launch for the same tensors has in common; `each` is how many queries a head has.

    Any number of leading dimensions, of all tensors the same, are the problems.
    """

    def __init__(self, inputs: Inputs, each: int | None = None):
        self.inputs, self.kernel, self.dtype = inputs, inputs.kernel, inputs.query.dtype
        *leading, self.rows, self.dims = inputs.query.shape
        *_, self.columns, self.channels = inputs.value.shape
        self.problems = math.prod(leading)
        self.wide = max(self.dims, self.channels) > _CHUNK
        self.each = each or max(self.rows // inputs.group, 1)
        table, self.count = _table(self.kernel, inputs.parameters, self.dtype)
        # kept, as the launches take nothing but addresses
        self.tensors = [part if part is None else part.contiguous() for part in (*inputs[: TENSORS - 1], table)]
        self.causal, self.tau = int(inputs.causal), float(inputs.tau)
        self.sizes = (self.rows, self.columns, self.dims, self.channels, self.each, self.causal, self.count)

    def blocks(self, rows: int, each: int | None = None) -> int:
        """How many tiles, of `each` rows, the rows of a problem make."""
        return -(-rows // (each or ROWS[self.dtype]))

    def launch(self, entry: str, rows: int, *arguments, passes: int = 1) -> None:
        """Launch a block for every tile of `rows` rows of every problem, `passes` times."""
        kernel, grid, block, options = self.form(entry, rows, passes)
        kernel(grid, block, *arguments, **options)

    def form(self, entry: str, rows: int, passes: int = 1) -> tuple[Kernel, tuple[int, int], int, dict[str, int]]:
        """A kernel with its grid, the threads of a block, and what else its launch takes."""
        kernel, each, groups, shared = self.kernel_for(entry, rows)
        grid = (self.problems * self.blocks(rows, each), passes)
        # behind `survey.cu`
        early = entry == "forward" and self.dtype == torch.float32 and not self.looks()
        early = early and begins_early(self.inputs.query.device)
        return kernel, grid, _THREADS * groups, {"shared": shared, "early": early}

    def kernel_for(self, entry: str, rows: int) -> tuple[Kernel, int, int, int]:
        """What such a launch takes, the rows and groups of warps of a block, and its shared memory."""
        coarse, roomy = self.inputs.coarse, is_roomy(self.inputs.query.device)
        each, groups = self.shape(entry, rows)
        taus = self.inputs.bandwidth is not None
        early = entry == "forward" and begins_early(self.inputs.query.device)
        stream = entry == "forward" and self.streams()
        kernel = kernel_of(entry, self.kernel, self.dtype, self.wide, coarse, groups, roomy, each, taus, early, stream)
        return kernel, each, groups, shared_of(entry, self.kernel, self.dtype, coarse, groups, roomy, stream)

    def shape(self, entry: str, rows: int) -> tuple[int, int]:
        """Rows of a block, and groups of warps that share them: two, if all multiprocessors have at most one block.

        Of `add_laplace` also if they have two blocks and then one more, for which one group would be alone. Others have
        blocks of half the rows, of which a multiprocessor has three, where some have two blocks and some have one.
        """
        each, device = ROWS[self.dtype], self.inputs.query.device
        if entry not in ("forward", "forward_values") or self.dtype != torch.float32 or self.wide:
            return each, 1
        if entry == "forward" and self.streams():
            return each, 1
        blocks, processors = self.problems * self.blocks(rows), processors_of(device)
        laplace = self.kernel == AddLaplace.name
        if blocks <= processors or (laplace and 2 * processors < blocks <= 3 * processors):
            return each, 2 if room_of(device) >= _FACTORS[2] else 1
        halved = self.problems * self.blocks(rows, _FEWER_ROWS)
        if self.kernel in (AddRiesz.name, AddBump.name) and halved <= 3 * processors:
            return _FEWER_ROWS, 1
        return each, 1

    def looks(self) -> bool:
        """Whether blocks look through the inputs by themselves."""
        return self.inputs.group == 1 and self.dtype == torch.float32 and max(self.rows, self.columns) <= _SHORT

    def by_steps(self) -> bool:
        """Whether `slopes.cu` makes the gradients, for which small GPUs do not have the shared memory."""
        able = self.dtype == torch.float32 and not self.wide and self.kernel in STEPS
        room = room_of(self.inputs.query.device)
        return able and shared_of("slopes", self.kernel, self.dtype, self.inputs.coarse) <= room

    def streams(self) -> bool:
        """Whether `chunks.cu` makes keys and values ready, once for all blocks: where multiprocessors have three.

        Not for a single block, which would read them twice.
        """
        if self.kernel not in STREAMED or self.dtype != torch.float32 or self.wide or self.looks():
            return False
        if self.kernel == AddBump.name and self.dims < _FEWEST_DIMS:
            return False
        device = self.inputs.query.device
        blocks = self.blocks(self.rows)
        few = blocks < 2 or self.problems * blocks <= 2 * processors_of(device)
        return not few and walks(device) and 4 * self.chunks() <= _CHUNK_ROOM

    def chunks(self) -> int:
        """The numbers of all chunks."""
        each = -(-self.dims * (2 if self.kernel == AddLaplace.name else 1) // _CHUNK_DIMS) + _VALUE_CHUNKS
        return self.problems * self.blocks(self.columns) * each * _CHUNK_SIZE

    def survey(self) -> "_Surveyed":
        """What the kernel before a forward pass finds in the inputs, and makes of them."""
        look, room, places = self.looker(), None, (None, None)
        if look is not None:
            room = self.tensors[0].new_empty(self.room())
            places = self.places(room.data_ptr())
            given = (self.tensors[4], *places) if look.makes else places[:1]
            look.kernel((look.blocks,), _SURVEY_THREADS, *self.tensors[:3], *given, *look.numbers)
        return _Surveyed(*places, self.slices(), room)

    def looker(self) -> "_Looker | None":
        """The kernel of `survey`, and how it is launched; None if blocks look for themselves."""
        if self.looks():
            return None
        group, slices, early = self.inputs.group, self.slices(), begins_early(self.inputs.query.device)
        blocks = self.problems * (group + 2) * slices
        numbers = (self.rows // group, self.columns, self.dims, self.channels, group, slices)
        if self.streams():
            return _Looker(chunks_of(self.kernel, early), blocks, (*numbers, self.tau), True)
        centred = int(self.kernel in (AddLaplace.name, Laplace.name))
        return _Looker(survey_of(self.dtype, early), blocks, (*numbers, centred), False)

    def slices(self) -> int:
        """In how many slices `survey.cu` has the inputs; none if blocks look for themselves."""
        if self.looks():
            return 0
        parts = self.problems * (self.inputs.group + 2)
        each = self.rows // self.inputs.group
        numbers = max(each * self.dims, self.columns * self.dims, self.columns * self.channels)
        return max(1, min(-(-_LOOKING // max(parts, 1)), numbers // _LOOK))

    def room(self) -> int:
        """Numbers that `survey` takes: chunks, which so lie at whole lines of memory, and what it finds."""
        found = self.problems * (self.inputs.group + 2) * self.slices() * 16 // self.inputs.query.itemsize
        return found + (self.chunks() if self.streams() else 0)

    def places(self, room: int) -> tuple[int, int | None]:
        """Where in that room is what was found, and the chunks."""
        return (room + 4 * self.chunks(), room) if self.streams() else (room, None)


class _Looker(NamedTuple):
    """The kernel before a forward pass, its blocks and numbers, and whether it makes chunks."""

    kernel: Kernel
    blocks: int
    numbers: tuple[int | float, ...]
    makes: bool


class _Surveyed(NamedTuple):
    """Where the kernel before a forward pass left what, in how many slices, and the tensor that has it."""

    found: int | None
    chunks: int | None
    slices: int
    room: Tensor | None


def _table(kernel: str, parameters: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, int]:
    """The numbers of a kernel as `kinds.cu` reads them, and how many nodes or coefficients there are."""
    if kernel == Spline.name:
        nodes, *rest = Spline.pieces(parameters)
        return torch.cat([nodes, *rest]).to(dtype), len(nodes)
    if kernel == PolynomialExponential.name:
        return parameters.to(dtype), len(parameters)
    return None, 0


def forward(inputs: Inputs, gradients: bool = True, copied: bool = False) -> tuple[Tensor | None, ...]:
    """What `tiled_sum` returns; with `copied` the rows once more, and without `gradients` the rows alone."""
    return _foreseen_forward(inputs, gradients, copied)


def _kernels(inputs: Inputs, gradients: bool, copied: bool) -> list[Kernel]:
    """All that a forward pass launches and, if one is to be expected, its backward pass."""
    learning = copied or (gradients and any(part is not None and part.requires_grad for part in inputs[:TENSORS]))
    if short.serves(inputs):
        return short.kernels(inputs, learning)
    call = _Call(inputs)
    look = call.looker()
    return [
        *([look.kernel] if look else []),
        call.kernel_for("forward", call.rows)[0],
        *(_backward_kernels(call) if learning else ()),
    ]


def _gradient_kernels(inputs: Inputs) -> list[Kernel]:
    return short.kernels(inputs, True) if short.serves(inputs) else _backward_kernels(_Call(inputs))


def _backward_kernels(call: _Call) -> list[Kernel]:
    if call.by_steps():
        entries = ("slopes", "forward_values", "prepare")
    else:
        entries = ("backward_key", "backward_query", "backward_table", "backward_quotient")
        entries = [name for name in entries if call.inputs.parameters is not None or name != "backward_table"]
    return [call.kernel_for(entry, call.columns)[0] for entry in entries]


def _forward(inputs: Inputs, gradients: bool, copied: bool) -> tuple[Tensor | None, ...]:
    if short.serves(inputs):
        return short.forward(inputs, gradients, copied)
    query = inputs.query
    with on(query.device):
        call = _Call(inputs)
        out = query.new_empty((*query.shape[:-1], call.channels))
        total = query.new_empty(query.shape[:-1]) if gradients else None
        shift = None
        if gradients and inputs.normalised and call.kernel == Laplace.name:
            shift = torch.empty_like(total)
        copy = torch.empty_like(out) if copied else None
        surveyed = call.survey()
        call.launch(
            "forward", call.rows, *call.tensors, *surveyed[:2], out, copy, total, shift, *call.sizes,
            int(inputs.normalised), surveyed.slices, call.tau,
        )  # fmt: skip
    return out, total, shift, copy


def prepared(inputs: Inputs, gradients: bool) -> Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor | None, ...]]:
    """`forward` of contiguous tensors like these, without masks, on a stream of the current device.

    With `gradients` the rows are copied, as for the backward pass.
    """
    call = _Call(inputs)
    # not the call itself, which has the tensors
    room, offsets = call.room(), call.places(0)
    known, look = call.looker(), None
    makes = known is not None and known.makes
    if known is not None:
        pointers = 6 if makes else 4
        look = known.kernel.prepared((known.blocks,), _SURVEY_THREADS, pointers, *known.numbers)
    kernel, grid, block, options = call.form("forward", call.rows)
    numbers = (*call.sizes, int(inputs.normalised), call.slices(), call.tau)
    launch = kernel.prepared(grid, block, 12, *numbers, **options)
    alike, shape = call.dims == call.channels, (*inputs.query.shape[:-1], call.channels)
    shifted = gradients and call.kernel == Laplace.name

    def run(stream: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
        # like another takes torch less time
        out = torch.empty_like(query) if alike else query.new_empty(shape)
        copy = torch.empty_like(out) if gradients else None
        total = query.new_empty(shape[:-1]) if gradients else None
        shift = torch.empty_like(total) if shifted else None
        points, found = (query.data_ptr(), key.data_ptr(), value.data_ptr()), None
        places = (0, 0)
        if look is not None:
            # let go at the end: who has it next comes later on the stream
            found = query.new_empty(room)
            first = found.data_ptr()
            places = [0 if offset is None else first + offset for offset in offsets]
            look(stream, *points, *((0, *places) if makes else places[:1]))
        launch(
            stream, *points, 0, 0, 0, *places, out.data_ptr(),
            0 if copy is None else copy.data_ptr(), 0 if total is None else total.data_ptr(),
            0 if shift is None else shift.data_ptr(),
        )  # fmt: skip
        return out, total, shift, copy

    return run


def backward(
    grad: Tensor, rows: Tensor, total: Tensor, shift: Tensor | None, inputs: Inputs
) -> tuple[Tensor | None, ...]:
    """What `tiled_sum_backward` returns; None is what it has no number for."""
    return _foreseen_backward(grad, rows, total, shift, inputs)


def _backward(
    grad: Tensor, rows: Tensor, total: Tensor, shift: Tensor | None, inputs: Inputs
) -> tuple[Tensor | None, ...]:
    if short.serves(inputs):
        return *short.backward(grad, rows.contiguous(), total.contiguous(), inputs), None, None
    query, bandwidth, parameters, normalised = inputs.query, inputs.bandwidth, inputs.parameters, inputs.normalised
    with on(query.device):
        call = _Call(inputs)
        if call.by_steps():
            return _backward_by_steps(call, grad.contiguous(), rows.contiguous(), total.contiguous())
        grad, grad_total = grad.contiguous(), torch.zeros_like(total) if not normalised else torch.empty_like(total)
        if normalised:
            whole, grad = (grad, rows.contiguous(), total.contiguous()), torch.empty_like(grad)
            # a warp has a row
            grid = (-(-total.numel() // (_THREADS // 32)),)
            quotient = kernel_of("backward_quotient", call.kernel, call.dtype, call.wide)
            quotient(grid, _THREADS, *whole, grad, grad_total, total.numel(), call.channels)
        given = (grad, grad_total, *call.tensors, shift, *call.sizes, call.tau)
        gradients = [torch.empty_like(part) for part in call.tensors[:3]]
        # per block, sums of (point - origin) gradient
        moments = [
            query.new_empty(call.problems, call.blocks(count), dtype=torch.float64)
            for count in (call.rows, call.columns)
        ]
        call.launch("backward_query", call.rows, *given, gradients[0], moments[0])
        call.launch("backward_key", call.columns, *given, gradients[1], gradients[2], moments[1])
        # Phi is a function of q / tau and k / tau: d/dtau = -(<q, d/dq> + <k, d/dk>) / tau
        grad_bandwidth = None
        if bandwidth is not None:
            moment = (moments[0].sum(1) + moments[1].sum(1)).reshape(-1, 1, 1)
            grad_bandwidth = (-moment / bandwidth).to(bandwidth.dtype)
        grad_parameters = None if parameters is None else _table_gradient(call, given, parameters)
    return *gradients, grad_bandwidth, grad_parameters


_foreseen_forward = foreseen(_forward, _kernels)
_foreseen_backward = foreseen(_backward, lambda *given: _gradient_kernels(given[-1]))


def _backward_by_steps(call: _Call, grad: Tensor, rows: Tensor, total: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, weight, bandwidth, _ = call.tensors
    normalised, coarse = call.inputs.normalised, call.inputs.coarse
    gradients = [torch.empty_like(part) for part in (query, key, value)]
    queries, keys = call.problems * call.rows, call.problems * call.columns
    slices = -(-max(call.rows, call.columns) // _SLICE)
    # one behind the other, as every tensor costs time: vectors as halves, large and small ones, of queries and keys;
    # the gradients by the sums; what `prepare` finds; what undoes the scales of halves; the gradients by the totals
    sizes = (
        _CHUNK * queries, _CHUNK * keys, call.channels * queries if normalised else 0, 12 * call.problems * slices,
        queries, keys, queries,
    )  # fmt: skip
    room = query.new_empty(sum(sizes))
    *places, _ = accumulate(sizes, lambda place, size: place + 4 * size, initial=room.data_ptr())
    halves, value_halves, sums, found, scales, value_scales, grad_total = places
    sums = sums if normalised else grad.data_ptr()
    prepare = kernel_of("prepare", call.kernel, call.dtype, False, coarse)
    prepare(
        (2 * call.problems * slices,), _SLOPE_THREADS, query, key, value, grad, rows, total, sums, grad_total,
        halves, scales, value_halves, value_scales, found, call.rows, call.columns, call.dims, call.channels,
        int(normalised), slices,
    )  # fmt: skip
    tiles = [call.blocks(count) for count in (call.rows, call.columns)]
    blocks = call.problems * sum(tiles)
    moments = None if bandwidth is None else query.new_empty(blocks, dtype=torch.float64)
    slopes = kernel_of("slopes", call.kernel, call.dtype, False, coarse)
    slopes(
        (blocks,), _SLOPE_THREADS, query, key, halves, scales, grad_total, value_halves, value_scales,
        weight, bandwidth, *gradients[:2], moments, call.problems, *call.sizes[:3], call.each, call.causal,
        call.tau, shared=shared_of("slopes", call.kernel, call.dtype, coarse),
    )  # fmt: skip
    # the gradients of the values are kernel sums too, of keys and queries
    call.launch(
        "forward_values", call.columns, key, query, sums, weight, bandwidth, None, found, None, gradients[2], None,
        None, None, call.columns, call.rows, *call.sizes[2:], 0, slices, call.tau,
    )  # fmt: skip
    grad_bandwidth = None
    if bandwidth is not None:
        parts = moments.split([call.problems * count for count in tiles])
        moment = sum(part.view(call.problems, count).sum(1) for part, count in zip(parts, tiles, strict=True))
        grad_bandwidth = (-moment[:, None, None] / bandwidth).to(bandwidth.dtype)
    return *gradients, grad_bandwidth, None


def _table_gradient(call: _Call, given: tuple, parameters: Tensor) -> Tensor:
    passes = call.count + 1 if call.kernel == Spline.name else call.count
    size = (passes, call.problems * call.blocks(call.rows), 2)
    moments = torch.empty(size, dtype=torch.float64, device=call.tensors[0].device)
    call.launch("backward_table", call.rows, *given, moments, passes=passes)
    first, second = moments.sum(1).unbind(1)
    if call.kernel == Spline.name:
        first = Spline.piece_gradients(parameters.to(first), first, second)
    return first.to(parameters)
