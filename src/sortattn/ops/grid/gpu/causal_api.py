"""The operator behind causal calls on the GPU, with its fake kernel and derivative.

Where heads are grouped, queries are not as many as keys, or bandwidth or coefficients have gradients, the derivative is
that of `grid.causal`, in torch's operations, on the nodes that the forward pass has placed.
"""

import torch
from torch import Tensor

from ....cuda.launch import on
from ....kernels import RIESZ_EPSILON, AddRiesz, SidedKernel
from ....normalise import through_quotient
from ...batching import fold, refuse_coefficients, unfold
from ...direct import differentiated_once, direct
from ..causal import grid_causal_backward
from .alone import alone
from .causal import forward, launches_of
from .causal_backward import backward
from .formula import known
from .grid import Grid
from .language import STATS
from .layout import Layout
from .matrix import matrix


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bandwidth: Tensor,
    parameters: Tensor,
    kernel: str,
    exponential: bool,
    count: int,
    group: int,
    masked: bool,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output `(P, group * M, C)`, the sums of the weights, the nodes, and what is known of their cells."""
    # kernels read memory, and what vmap expands has none of its own
    query, key, value, weight, bandwidth = (
        part.detach().contiguous() for part in (query, key, value, weight, bandwidth)
    )
    _, numbers = known(kernel, parameters)
    counted = weight if masked else None
    with on(query.device):
        found = forward(query, key, value, counted, bandwidth, numbers, count, group, normalise)
    return found.out, found.totals, found.grid.nodes, found.grid.stats


grid_gpu_causal = torch.library.custom_op("sortattn::grid_gpu_causal", _forward, mutates_args=())


@grid_gpu_causal.register_fake
def _(query, key, value, weight, bandwidth, parameters, kernel, exponential, count, group, masked, normalise):
    problems, rows, dims = query.shape
    padded = Layout(count, query.dtype).padded
    totals, nodes = (query.new_empty(problems, *shape, dtype=torch.float32) for shape in ((rows,), (dims, padded)))
    stats = query.new_empty(problems, dims, STATS.value, padded, dtype=torch.float32)
    return value.new_empty(problems, rows, value.shape[2]), totals, nodes, stats


@differentiated_once
@torch.library.custom_op("sortattn::grid_gpu_causal_backward", mutates_args=())
def grid_gpu_causal_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    bandwidth: Tensor,
    parameters: Tensor,
    out: Tensor,
    totals: Tensor,
    nodes: Tensor,
    stats: Tensor,
    kernel: str,
    exponential: bool,
    count: int,
    group: int,
    masked: bool,
    normalise: bool,
    wants_numbers: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, bandwidth and parameters; the last two are zero unless wanted."""
    chosen, numbers = known(kernel, parameters)
    layout = Layout(count, query.dtype)
    grid = Grid(nodes, stats, bandwidth.contiguous(), layout, numbers, chunked=True)
    # heads that hold what is no number have NaN in their outputs, and so in their gradients
    points = [part.nan_to_num(0.0, 0.0, 0.0).contiguous() for part in (query, key, value)]
    if not wants_numbers and group == 1 and query.shape[1] == key.shape[1]:
        given = parameters if parameters.numel() else None
        rest = (weight if masked else None, out, totals, grid, kernel, given, normalise)
        with on(query.device), torch.autocast(query.device.type, enabled=False):
            found = backward(grad, *points, *rest)
        return *found, torch.zeros_like(bandwidth), torch.zeros_like(parameters)
    points = [part.float() for part in points]
    counted = weight.float() if masked else value.new_ones(value.shape[:2], dtype=torch.float32)
    rows = torch.cat([points[2], counted[..., None]], 2)
    wide = grad.float()
    if normalise:
        by_sums, by_total = through_quotient(wide, out.float(), totals)
    else:
        by_sums, by_total = wide, torch.zeros_like(totals)
    cotangent = torch.cat([by_sums, by_total[..., None]], 2)
    inner = nodes[..., :count].contiguous()
    with on(query.device), torch.autocast(query.device.type, enabled=False):
        extra = _extra(grid, inner, chosen)
        found = grid_causal_backward(
            cotangent, *points[:2], rows, bandwidth, parameters, inner, extra, kernel, group, exponential
        )
    by_query, by_key, by_rows, by_bandwidth, by_parameters = found
    return by_query.to(query), by_key.to(key), by_rows[..., :-1].to(value).contiguous(), by_bandwidth, by_parameters


@grid_gpu_causal_backward.register_fake
def _(grad, query, key, value, weight, bandwidth, parameters, *rest):
    return tuple(part.new_empty(part.shape) for part in (query, key, value, bandwidth, parameters))


def _extra(grid: Grid, nodes: Tensor, kernel: SidedKernel) -> Tensor:
    """The correction of the kernel between nodes: what the kernels on the GPU have there, less its definition."""
    count = nodes.shape[2]
    phi = matrix(grid, torch.zeros(grid.problems, dtype=torch.int32, device=nodes.device))[..., :count, :count]
    tau = grid.bandwidth[:, None, None, None]
    phi = phi - kernel.univariate((nodes[..., :, None] - nodes[..., None, :]) / tau)
    if isinstance(kernel, AddRiesz):
        phi -= (nodes.abs()[..., :, None] + nodes.abs()[..., None, :]) / tau + RIESZ_EPSILON
    return phi


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.options = inputs[6:]
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad, *_):
    wants = ctx.needs_input_grad
    found = grid_gpu_causal_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options, wants[4] or wants[5])
    return *found[:3], None, *found[3:], *(None,) * 6


grid_gpu_causal.register_autograd(_backward, setup_context=_setup)

grid_gpu_causal_directly = direct(grid_gpu_causal, _forward, _setup, _backward, alone(_forward, forward, launches_of))


@grid_gpu_causal.register_vmap
def _(info, in_dims, *inputs):
    """A mapped dimension becomes more problems."""
    refuse_coefficients(in_dims[5])
    size = info.batch_size
    return unfold(size, grid_gpu_causal(*(fold(size, inputs[i], in_dims[i]) for i in range(5)), *inputs[5:]))
