"""Short sequences on CUDA devices: one kernel forward and one backward, which take tensors as they lie."""

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...cuda.launch import Kernel, on
from ...kernels import RIESZ_EPSILON, AddBump, AddLaplace, AddRiesz
from .inputs import Inputs

NAMES = (AddRiesz.name, AddLaplace.name, AddBump.name)
TYPES = {torch.float32: "FLOAT32", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}
# rows of a head, and columns; beyond 96 rows the other kernels are about as fast
_MOST, _WIDEST = 96, 64
# heads that leave multiprocessors without a block
_FEW = 132
# numbers of a row in shared memory, four of them unused
_STRIDE, _FACTORS = 68, 132
# bytes of shared memory that a block may have on any device
_SHARED = 98 << 10


class Shape(NamedTuple):
    """The threads of a block, and what each of them has: so many own rows and others of which it makes the scores.

    Sixteen threads share some own rows of a sum, as few as there may be in `rows`.
    """

    threads: int
    own: int
    others: int
    rows: tuple[int, int]

    @property
    def groups(self) -> int:
        """How many times sixteen threads there are."""
        return self.threads // 16


class _Plan(NamedTuple):
    """How queries and keys are shared out among blocks, and where these have what in shared memory, in numbers."""

    query_part: int
    key_part: int
    threads: int
    # of a thread
    rows: int
    scores: int
    vectors: int
    # in bytes
    size: int


def serves(inputs: Inputs) -> bool:
    """Whether these kernels sum the inputs."""
    *leading, rows, dims = inputs.query.shape
    *_, columns, channels = inputs.value.shape
    return (
        inputs.query.dtype in TYPES
        and inputs.kernel in NAMES
        and inputs.weight is None
        and inputs.bandwidth is None
        and not inputs.causal
        and inputs.group == 1
        and min(rows, columns, channels) > 0
        and max(rows, columns) <= _MOST
        and max(dims, channels) <= _WIDEST
        and _plan(math.prod(leading), rows, columns, inputs.kernel, inputs.query.dtype).size <= _SHARED
    )


def shape_of(kernel: str, dtype: torch.dtype) -> Shape:
    """The shape of blocks; a bump in float32 looks for ties beside its sums, and takes more registers for that."""
    if kernel == AddBump.name and dtype == torch.float32:
        return Shape(128, 6, 6, (4, 9))
    return Shape(192, 4, 6, (3, 6))


@lru_cache
def kernel_of(entry: str, kernel: str, dtype: torch.dtype, rows: int) -> Kernel:
    """`short_forward` or `short_backward`, with so many own rows of a thread."""
    shape = shape_of(kernel, dtype)
    defines = (
        ("NUMBER", "float"),
        ("KERNEL", kernel.upper()),
        ("EPSILON", repr(RIESZ_EPSILON)),
        ("INPUT", TYPES[dtype]),
        ("MOST", _MOST),
        ("THREADS", shape.threads),
        ("TM", shape.own),
        ("TN", shape.others),
        ("ROWS", rows),
        ("BLOCKS", 3),
        ("FORWARD", int(entry == "short_forward")),
    )
    return Kernel(Path(__file__).with_name(f"{entry}.cu"), entry, defines)


def kernels(inputs: Inputs, learning: bool) -> list[Kernel]:
    """What is launched for such inputs, forward and, if they are `learning`, backward."""
    _, problems, rows, columns, *_ = _sizes(inputs)
    own = _plan(problems, rows, columns, inputs.kernel, inputs.query.dtype).rows
    entries = ("short_forward", "short_backward")[: 1 + learning]
    return [kernel_of(entry, inputs.kernel, inputs.query.dtype, own) for entry in entries]


@lru_cache(maxsize=1024)
def _plan(problems: int, rows: int, columns: int, kernel: str, dtype: torch.dtype) -> _Plan:
    shape, stride = shape_of(kernel, dtype), _stride(kernel)
    parts = _part(shape, problems, rows, columns), _part(shape, problems, columns, rows)
    own = next(own for own in shape.rows if max(parts) <= own * shape.groups)
    points = scores = vectors = room = 0
    for part, others in zip(parts, (columns, rows), strict=True):
        part, padded = -(-part // shape.own) * shape.own, -(-others // shape.others) * shape.others
        points = max(points, padded * stride)
        # own vectors lie where scores come later, own points there and where other vectors come later
        scores = max(scores, others * own * shape.groups, part * _STRIDE)
        vectors = max(vectors, padded * _STRIDE)
        room = max(room, part * stride)
    return _Plan(*parts, shape.threads, own, points, points + scores, 4 * (points + max(scores + vectors, room)))


def _stride(kernel: str) -> int:
    """Numbers of a row of points."""
    return _FACTORS if kernel == AddLaplace.name else _STRIDE


def _part(shape: Shape, problems: int, own: int, others: int) -> int:
    """How many own rows a block has, such that no thread has more than its scores."""
    most = min(shape.threads // -(-others // shape.others) * shape.own, shape.rows[-1] * shape.groups)
    parts = -(-own // most)
    if problems < _FEW and own > shape.rows[0] * shape.groups:
        parts = max(parts, 2)
    return -(-own // parts)


def _laid(parts: tuple[Tensor, ...]) -> tuple[list[Tensor], list[int], list[int]]:
    """Tensors whose rows are contiguous, where they begin, and how far batches, heads and rows are apart."""
    # of more leading dimensions one is made: where one of a single entry lies says nothing, contiguous or not
    flat = (part.contiguous().flatten(0, -3) if part.dim() > 4 else part for part in parts)
    tensors = [part if part.stride(-1) == 1 else part.contiguous() for part in flat]
    strides = []
    for part in tensors:
        *leading, row, _ = part.stride()
        strides += (*leading, row) if len(leading) == 2 else (leading[-1] if leading else 0, 0, row)
    return tensors, [part.data_ptr() for part in tensors], strides


def _like(part: Tensor) -> Tensor:
    """An empty tensor, its heads where those of `part` lie; without heads, as the operator promises, contiguous."""
    if part.dim() == 4:
        like = torch.empty_like(part)
        if like.stride(-1) == 1:
            return like
    return part.new_empty(part.shape)


def _sizes(inputs: Inputs) -> tuple[int, ...]:
    """Heads, problems, queries, keys, dimensions and channels."""
    *leading, rows, dims = inputs.query.shape
    columns, channels = inputs.value.shape[-2:]
    heads = leading[1] if len(leading) == 2 else 1
    return heads, math.prod(leading), rows, columns, dims, channels


def forward(inputs: Inputs, gradients: bool, copied: bool) -> tuple[Tensor | None, ...]:
    """The rows in the inputs' own type; with `gradients` the sums of ones; None; with `copied` the rows in float32."""
    *_, dims, channels = _sizes(inputs)
    query, value = inputs.query, inputs.value
    out = _like(query) if channels == dims else query.new_empty((*query.shape[:-1], channels))
    single = {"dtype": torch.float32}
    copy = query.new_empty((*query.shape[:-1], channels), **single) if copied else None
    total = query.new_empty(query.shape[:-1], **single) if gradients else None
    # kept, as the launch takes nothing but addresses
    _kept, places, strides = _laid((query, inputs.key, value, out))
    kernel, grid, threads, numbers, shared = _form(inputs)
    with on(query.device):
        kernel(grid, threads, *places, copy, total, *strides, *numbers, shared=shared)
    return out, total, None, copy


def _form(inputs: Inputs) -> tuple[Kernel, tuple[int], int, tuple[int | float, ...], int]:
    """The kernel of the forward pass, its grid, the threads of a block, numbers and bytes of shared memory."""
    heads, problems, rows, columns, dims, channels = _sizes(inputs)
    plan = _plan(problems, rows, columns, inputs.kernel, inputs.query.dtype)
    kernel = kernel_of("short_forward", inputs.kernel, inputs.query.dtype, plan.rows)
    numbers = (
        heads, rows, columns, dims, channels, plan.query_part, plan.scores, plan.vectors, int(inputs.normalised),
        float(inputs.tau),
    )  # fmt: skip
    return kernel, (problems * -(-rows // plan.query_part),), plan.threads, numbers, plan.size


def prepared(inputs: Inputs, gradients: bool) -> Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor | None, ...]]:
    """`forward` of contiguous tensors like these on a stream of the current device.

    With `gradients` the rows are copied, as for the backward pass.
    """
    kernel, grid, threads, numbers, shared = _form(inputs)
    query, shape = inputs.query, (*inputs.query.shape[:-1], inputs.value.shape[-1])
    *_, strides = _laid((query, inputs.key, inputs.value, query.new_empty(shape)))
    launch = kernel.prepared(grid, threads, 6, *strides, *numbers, shared=shared)
    alike, single = query.shape[-1] == shape[-1], torch.float32

    def run(stream: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
        # like another takes torch less time
        out = torch.empty_like(query) if alike else query.new_empty(shape)
        copy = torch.empty_like(out, dtype=single) if gradients else None
        total = query.new_empty(shape[:-1], dtype=single) if gradients else None
        launch(
            stream, query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
            0 if copy is None else copy.data_ptr(), 0 if total is None else total.data_ptr(),
        )  # fmt: skip
        return out, total, None, copy

    return run


def backward(grad: Tensor, rows: Tensor, total: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value; `rows` are those of the output in float32, contiguous as `total` is."""
    sizes = heads, problems, queries, keys, *_ = _sizes(inputs)
    plan = _plan(problems, queries, keys, inputs.kernel, grad.dtype)
    given = inputs.query, inputs.key, inputs.value
    gradients = tuple(map(_like, given))
    _kept, places, strides = _laid((*given, grad, *gradients))
    blocks = problems * (-(-queries // plan.query_part) + -(-keys // plan.key_part))
    with on(grad.device):
        kernel_of("short_backward", inputs.kernel, inputs.query.dtype, plan.rows)(
            (blocks,), plan.threads, *places[:4], rows, total, *places[4:], *strides, *sizes,
            plan.query_part, plan.key_part, plan.scores, plan.vectors, int(inputs.normalised), float(inputs.tau),
            shared=plan.size,
        )  # fmt: skip
    return gradients
