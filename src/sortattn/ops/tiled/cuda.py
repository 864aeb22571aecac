"""The sums on CUDA devices: launches of the kernels in `tiled.cu`, which is compiled at first use."""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ...cuda.launch import Kernel
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

_SOURCE = Path(__file__).with_name("tiled.cu")
NAMES = tuple(kind.name for kind in (AddRiesz, AddLaplace, AddBump, Spline, PolynomialExponential, Laplace, Riesz))
_TABLES = (Spline.name, PolynomialExponential.name)
# rows of a block; float64 has half the registers
ROWS = {torch.float32: 64, torch.float64: 32}
_TYPES = {torch.float32: "float", torch.float64: "double"}
_THREADS = 128
# three blocks of this size fit into a multiprocessor of Hopper, two into one of Ampere, one into smaller ones
_SHARED = 72 << 10
# columns that are summed at a time, and the most of them
_CHUNK, _WIDEST = 64, 256


def serves(query: Tensor, value: Tensor, kernel: str) -> bool:
    """Whether the CUDA kernels sum these tensors."""
    return (
        query.is_cuda
        and kernel in NAMES
        and query.dtype in ROWS
        and max(query.shape[2], value.shape[2]) <= _WIDEST
        and trouble(query.device.index) is None
    )


@lru_cache
def kernel_of(entry: str, kernel: str, dtype: torch.dtype, wide: bool) -> Kernel:
    """The function `entry` of `tiled.cu` for a kernel and a type; `wide` for more than 64 dimensions or channels."""
    defines = (
        ("NUMBER", _TYPES[dtype]),
        ("KERNEL", kernel.upper()),
        ("OWN", ROWS[dtype]),
        ("CHUNKS", _WIDEST // _CHUNK if wide else 1),
        ("SHARED", _SHARED),
        ("BLOCKS", 3 if dtype == torch.float32 else 1),
        ("EPSILON", repr(RIESZ_EPSILON)),
    )
    return Kernel(_SOURCE, entry, (*defines, ("FORWARD", 1)) if entry == "forward" else defines)


class _Call:
    """What every launch for the same tensors has in common."""

    def __init__(self, query, key, value, weight, bandwidth, parameters, kernel, causal, group, shifted):
        self.kernel, self.dtype = kernel, query.dtype
        self.problems, self.rows, dims = query.shape
        self.columns, channels = value.shape[1:]
        self.wide = max(dims, channels) > _CHUNK
        table, count = _table(kernel, parameters.to(query.device))
        # kept, as the launches take nothing but addresses
        self.tensors = [part.contiguous() for part in (query, key, value, weight, bandwidth)]
        self.tensors.append(None if table is None else table.to(query.dtype).contiguous())
        each = max(self.rows // group, 1)
        self.sizes = (self.rows, self.columns, dims, channels, each, int(causal), count, int(shifted))

    def blocks(self, rows: int) -> int:
        """How many tiles the rows of a problem make."""
        return -(-rows // ROWS[self.dtype])

    def launch(self, entry: str, rows: int, *arguments, passes: int = 1) -> None:
        """Launch a block for every tile of `rows` rows of every problem, `passes` times."""
        kernel = kernel_of(entry, self.kernel, self.dtype, self.wide)
        kernel((self.problems * self.blocks(rows), passes), _THREADS, *arguments, shared=_SHARED)


def _table(kernel: str, parameters: Tensor) -> tuple[Tensor | None, int]:
    """The numbers of a kernel as `tiled.cu` reads them, and how many nodes or coefficients there are."""
    if kernel == Spline.name:
        nodes, *rest = Spline.pieces(parameters)
        return torch.cat([nodes, *rest]), len(nodes)
    if kernel == PolynomialExponential.name:
        return parameters, len(parameters)
    return None, 0


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bandwidth: Tensor,
    parameters: Tensor,
    kernel: str,
    causal: bool,
    group: int,
    shifted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `tiled_sum` returns."""
    with torch.cuda.device(query.device):
        call = _Call(query, key, value, weight, bandwidth, parameters, kernel, causal, group, shifted)
        sums = query.new_empty(*query.shape[:2], value.shape[2])
        total, shift = query.new_empty(query.shape[:2]), query.new_empty(query.shape[:2])
        call.launch("forward", call.rows, *call.tensors, sums, total, shift, *call.sizes)
    return sums, total, shift


def backward(
    grad: Tensor,
    grad_total: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bandwidth: Tensor,
    parameters: Tensor,
    shift: Tensor,
    kernel: str,
    causal: bool,
    group: int,
    shifted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `tiled_sum_backward` returns."""
    with torch.cuda.device(query.device):
        call = _Call(query, key, value, weight, bandwidth, parameters, kernel, causal, group, shifted)
        rest = [part.contiguous() for part in (grad, grad_total, shift)]
        inputs = (*rest[:2], *call.tensors, rest[2], *call.sizes)
        gradients = [part.new_empty(part.shape) for part in (query, key, value)]
        # per block, sums of (point - origin) gradient
        moments = [
            query.new_empty(call.problems, call.blocks(rows), dtype=torch.float64) for rows in (call.rows, call.columns)
        ]
        call.launch("backward_query", call.rows, *inputs, gradients[0], moments[0])
        call.launch("backward_key", call.columns, *inputs, gradients[1], gradients[2], moments[1])
        # Phi is a function of q / tau and k / tau: d/dtau = -(<q, d/dq> + <k, d/dk>) / tau
        moment = (moments[0].sum(1) + moments[1].sum(1)).reshape(-1, 1, 1)
        grad_bandwidth = (-moment / bandwidth).to(bandwidth.dtype)
        grad_parameters = _table_gradient(call, inputs, parameters)
    return *gradients, grad_bandwidth, grad_parameters


def _table_gradient(call: _Call, inputs: tuple, parameters: Tensor) -> Tensor:
    if call.kernel not in _TABLES:
        return torch.zeros_like(parameters)
    count = call.sizes[-2]
    passes = count + 1 if call.kernel == Spline.name else count
    size = (passes, call.problems * call.blocks(call.rows), 2)
    moments = torch.empty(size, dtype=torch.float64, device=call.tensors[0].device)
    call.launch("backward_table", call.rows, *inputs, moments, passes=passes)
    first, second = moments.sum(1).unbind(1)
    if call.kernel == Spline.name:
        first = Spline.piece_gradients(parameters.to(first), first, second)
    return first.to(parameters)
