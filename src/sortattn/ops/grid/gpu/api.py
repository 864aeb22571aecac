"""The operators behind the grid's kernels on the GPU, with their fake kernels and derivatives."""

import torch
from torch import Tensor

from ....cuda.constants import capturing, kept
from ....cuda.launch import on
from ....kernels import SidedKernel
from ....validation import Problem
from ...batching import fold, refuse_coefficients, unfold
from ...direct import differentiated_once, direct, plain
from ...parameters import parameters_at
from ..surrogate import reproduces_exponentials
from .alone import alone
from .backward import backward
from .causal_api import grid_gpu_causal_directly
from .formula import known
from .forward import forward, launches_of
from .grid import Grid, has_factors
from .language import STATS
from .launch import launches
from .layout import Layout
from .tables import Flags, Tables

# heads whose bandwidths are kept, so that all that are take 4 MB at most
_FEW = 4096


def attention(problem: Problem, kernel: SidedKernel, count: int) -> Tensor:
    """Normalised kernel sums, `(P, M, C)`."""
    return _call(problem, kernel, count, True)


def kernel_sum(problem: Problem, kernel: SidedKernel, count: int) -> Tensor:
    """Kernel sums, `(P, M, C)`."""
    return _call(problem, kernel, count, False)


def _call(problem: Problem, kernel: SidedKernel, count: int, normalise: bool) -> Tensor:
    query = problem.query
    problems = query.shape[0]
    # what most calls of a model share is made once, unless they are compiled, mapped or part of a CUDA graph
    filled = _filled if problems <= _FEW and plain(query) and not capturing() else _fill
    if isinstance(problem.bandwidth, Tensor):
        bandwidth = problem.bandwidth.float().reshape(-1).expand(problems)
    else:
        bandwidth = filled((problems,), problem.bandwidth, query.device)
    parameters = parameters_at(query, kernel)
    if parameters is None:
        # not `query.new_empty`, which under vmap would have the mapped dimension
        parameters = filled((0,), 0.0, query.device)
    masked = problem.weight is not None
    weight = problem.weight if masked else filled((problems, 1), 0.0, query.device)
    options = (kernel.name, reproduces_exponentials(kernel), count, problem.group, masked, normalise)
    operator = grid_gpu_causal_directly if problem.causal else grid_gpu_directly
    return operator(query, problem.key, problem.value, weight, bandwidth, parameters, *options)[0]


def _fill(shape: tuple[int, ...], number: float, device: torch.device) -> Tensor:
    # on the device: a copy from the host would wait, and cannot be part of a CUDA graph
    return torch.full(shape, number, dtype=torch.float32, device=device)


@kept
def _filled(shape: tuple[int, ...], number: float, device: torch.device) -> Tensor:
    return torch.full(shape, number, dtype=torch.float32, device="cpu").to(device)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output `(P, M, C)`; the sums of the weights, nodes, what is known of cells, tables, counts and flags."""
    # kernels read memory, and what vmap expands has none of its own
    query, key, value, weight, bandwidth = (
        part.detach().contiguous() for part in (query, key, value, weight, bandwidth)
    )
    _, numbers = known(kernel, parameters)
    call = (query, key, value, weight if masked else None, bandwidth, numbers, count, group, normalise)
    inputs = [query, key, value, bandwidth, *numbers.tensors]

    def outputs() -> tuple[Tensor, ...]:
        found = forward(*call)
        tables, grid = found.tables, found.grid
        # outputs of an operator are not the same tensor
        seconds = tables.seconds if grid.two_counts else tables.seconds.new_empty(query.shape[0], 0)
        return found.out, found.totals, grid.nodes, grid.stats, tables.rows, tables.counts, seconds, found.numbers

    with on(query.device):
        return outputs() if masked else launches_of(*call, "for gradients").play(inputs, outputs)


grid_gpu = torch.library.custom_op("sortattn::grid_gpu", _forward, mutates_args=())


@grid_gpu.register_fake
def _(query, key, value, weight, bandwidth, parameters, kernel, exponential, count, group, masked, normalise):
    problems, rows, dims = query.shape
    layout = Layout(count, query.dtype)
    channels, padded = value.shape[2], layout.padded
    two_counts = exponential and not has_factors(layout, dims)

    def wide(*shape):
        return query.new_empty(shape, dtype=torch.float32)

    return (
        value.new_empty(problems, rows, channels),
        wide(problems, rows),
        wide(problems, dims, padded),
        wide(problems, dims, STATS.value, padded),
        wide(problems, dims, padded, channels),
        wide(problems, dims, padded),
        wide(problems, dims, padded) if two_counts else wide(problems, 0),
        query.new_empty(problems * (group + 3), dtype=torch.int32),
    )


@differentiated_once
@torch.library.custom_op("sortattn::grid_gpu_backward", mutates_args=())
def grid_gpu_backward(
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
    rows: Tensor,
    counts: Tensor,
    seconds: Tensor,
    flags: Tensor,
    kernel: str,
    exponential: bool,
    count: int,
    group: int,
    masked: bool,
    normalise: bool,
    wants_numbers: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, bandwidth and parameters; the last two are zero unless wanted."""
    query, key, value, weight, bandwidth, grad = (
        part.contiguous() for part in (query, key, value, weight, bandwidth, grad)
    )
    chosen, numbers = known(kernel, parameters)
    kind = (grad, query, key, value, weight, out, bandwidth, *numbers.constants, count, group, masked, normalise)
    grid = Grid(nodes, stats, bandwidth, Layout(count, query.dtype), numbers, launches("backward", *kind))
    whole = weight.float().sum(1) if masked else None
    row_flags, shared, _, largest = flags.split([query.shape[0] * part for part in (group, 1, 1, 1)])
    seconds = seconds if grid.two_counts else counts
    tables = Tables(rows, counts, seconds, largest, key.shape[1], whole, weighted=grid.factored)
    call = (grad, query, key, value, weight if masked else None, out, totals, grid, tables)
    call += (Flags(row_flags, shared, group), chosen, parameters, normalise, wants_numbers)
    taus, others = torch.zeros_like(bandwidth), torch.zeros_like(parameters)
    # a backward pass may be called for within autocast
    with on(query.device), torch.autocast(query.device.type, enabled=False):
        if masked or wants_numbers:
            found = backward(*call)
            by_key, by_query, by_value = found.by_inputs
            taus = taus if found.bandwidth is None else found.bandwidth
            others = others if found.parameters is None else found.parameters
        else:
            inputs = [grad, query, key, value, bandwidth, out, totals, nodes, stats, rows, counts, flags]
            found = grid.launches.play([*inputs, *numbers.tensors], lambda: backward(*call).by_inputs)
            by_key, by_query, by_value = found
    return by_query, by_key, by_value, taus, others


@grid_gpu_backward.register_fake
def _(grad, query, key, value, weight, bandwidth, parameters, *rest):
    return tuple(part.new_empty(part.shape) for part in (query, key, value, bandwidth, parameters))


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.options = inputs[6:]
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, grad, *_):
    wants = ctx.needs_input_grad
    found = grid_gpu_backward(grad, *ctx.saved_tensors, *ctx.options, wants[4] or wants[5])
    by_query, by_key, by_value, by_bandwidth, by_parameters = found
    return by_query, by_key, by_value, None, by_bandwidth, by_parameters, *(None,) * 6


grid_gpu.register_autograd(_backward, setup_context=_setup)

grid_gpu_directly = direct(grid_gpu, _forward, _setup, _backward, alone(_forward, forward, launches_of))


@grid_gpu.register_vmap
def _(info, in_dims, *inputs):
    """A mapped dimension becomes more problems."""
    refuse_coefficients(in_dims[5])
    folded = [fold(info.batch_size, inputs[i], in_dims[i]) for i in range(5)]
    return unfold(info.batch_size, grid_gpu(*folded, *inputs[5:]))
