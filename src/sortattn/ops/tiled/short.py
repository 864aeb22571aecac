"""Short sequences on CUDA devices: one kernel forward and one backward, which take tensors as they lie."""

import math
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
_SOURCE = Path(__file__).with_name("short.cu")
# rows of a head, and columns
_MOST, _WIDEST = 128, 64
_THREADS = 192
# own rows and others of a thread that makes scores; groups of threads that share rows, and own rows of such a group
_OWN, _OTHER = 4, 6
_GROUPS, ROWS = 12, (3, 6)
# numbers of a row in shared memory, four of them unused
_STRIDE, _FACTORS = 68, 132
# bytes of shared memory that a block may have on any device
_SHARED = 98 << 10


class _Plan(NamedTuple):
    """How queries, or keys, are shared out among blocks, and where these have what in shared memory, in numbers."""

    query_part: int
    key_part: int
    scores: int
    vectors: int
    size: int

    @property
    def rows(self) -> int:
        """Of a thread."""
        return next(rows for rows in ROWS if max(self.query_part, self.key_part) <= rows * _GROUPS)


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
        and _plan(math.prod(leading), rows, columns, inputs.kernel).size <= _SHARED
    )


@lru_cache
def kernel_of(entry: str, kernel: str, dtype: torch.dtype, rows: int) -> Kernel:
    """`short_forward` or `short_backward`, with so many own rows of a thread."""
    defines = (
        ("NUMBER", "float"),
        ("KERNEL", kernel.upper()),
        ("EPSILON", repr(RIESZ_EPSILON)),
        ("INPUT", TYPES[dtype]),
        ("THREADS", _THREADS),
        ("TM", _OWN),
        ("TN", _OTHER),
        ("ROWS", rows),
        ("BLOCKS", 3),
    )
    return Kernel(_SOURCE, entry, (*defines, ("FORWARD", 1)) if entry == "short_forward" else defines)


@lru_cache(maxsize=1024)
def _plan(problems: int, rows: int, columns: int, kernel: str) -> _Plan:
    parts = _part(rows, columns), _part(columns, rows)
    own = next(rows for rows in ROWS if max(parts) <= rows * _GROUPS) * _GROUPS
    stride = _stride(kernel)
    points = scores = vectors = room = 0
    for part, others in zip(parts, (columns, rows), strict=True):
        part, padded = -(-part // _OWN) * _OWN, -(-others // _OTHER) * _OTHER
        points = max(points, padded * stride)
        scores = max(scores, others * own, part * _STRIDE)
        vectors = max(vectors, padded * _STRIDE)
        # own points lie where scores and vectors come later
        room = max(room, part * stride)
    scores = -(-scores // 4) * 4
    return _Plan(*parts, points, points + scores, 4 * (points + max(scores + vectors, room)))


def _stride(kernel: str) -> int:
    """Numbers of a row of points."""
    return _FACTORS if kernel == AddLaplace.name else _STRIDE


def _part(own: int, others: int) -> int:
    """How many own rows a block has, such that no thread has more than its scores."""
    most = min(_THREADS // -(-others // _OTHER) * _OWN, ROWS[-1] * _GROUPS)
    return -(-own // -(-own // most))


def _laid(parts: tuple[Tensor, ...]) -> tuple[list[Tensor], list[int], list[int]]:
    """Tensors whose rows are contiguous, where they begin, and how far batches, heads and rows are apart."""
    tensors = [part.contiguous() if part.stride(-1) != 1 or part.dim() > 4 else part for part in parts]
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
    heads, problems, rows, columns, dims, channels = _sizes(inputs)
    query, value = inputs.query, inputs.value
    plan = _plan(problems, rows, columns, inputs.kernel)
    out = _like(query) if channels == dims else query.new_empty((*query.shape[:-1], channels))
    single = {"dtype": torch.float32}
    copy = query.new_empty((*query.shape[:-1], channels), **single) if copied else None
    total = query.new_empty(query.shape[:-1], **single) if gradients else None
    # kept, as the launch takes nothing but addresses
    _kept, places, strides = _laid((query, inputs.key, value, out))
    with on(query.device):
        kernel_of("short_forward", inputs.kernel, query.dtype, plan.rows)(
            (problems * -(-rows // plan.query_part),), _THREADS, *places, copy, total, *strides,
            heads, rows, columns, dims, channels, plan.query_part, plan.scores, plan.vectors, int(inputs.normalised),
            float(inputs.tau), shared=plan.size,
        )  # fmt: skip
    return out, total, None, copy


def backward(grad: Tensor, rows: Tensor, total: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value; `rows` are those of the output in float32, contiguous as `total` is."""
    sizes = heads, problems, queries, keys, *_ = _sizes(inputs)
    plan = _plan(problems, queries, keys, inputs.kernel)
    given = inputs.query, inputs.key, inputs.value
    gradients = tuple(map(_like, given))
    _kept, places, strides = _laid((*given, grad, *gradients))
    blocks = problems * (-(-queries // plan.query_part) + -(-keys // plan.key_part))
    with on(grad.device):
        kernel_of("short_backward", inputs.kernel, inputs.query.dtype, plan.rows)(
            (blocks,), _THREADS, *places[:4], rows, total, *places[4:], *strides, *sizes,
            plan.query_part, plan.key_part, plan.scores, plan.vectors, int(inputs.normalised), float(inputs.tau),
            shared=plan.size,
        )  # fmt: skip
    return gradients
