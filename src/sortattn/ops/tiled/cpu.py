"""Kernels of distances, summed on the CPU by compiled loops over tiles of pairs.

Results do not depend on the number of threads: how sums are cut into tasks follows from the sizes alone.
"""

import torch
from torch import Tensor

from ... import threads
from ...kernels import RIESZ_EPSILON, PolynomialExponential, Spline
from ...normalise import poison_of, reciprocal
from .. import bandwidths
from .blocks import shifted
from .inputs import Inputs

# as in cpu_pairs.py, which needs Numba
_NUMBERS = {
    "add_riesz": 0,
    "add_laplace": 1,
    "add_bump": 2,
    "laplace": 3,
    "riesz": 4,
    Spline.name: 5,
    PolynomialExponential.name: 6,
    "gauss": 7,
}
_BLOCK = 64
# channels that are multiplied together; fewer are filled up with zeros
_WIDTHS = (64, 16)
# queries that a task takes, at most, and numbers of pairs, at least: a task begins in 20 us
_QUERIES, _PAIRS = 512, 1 << 16
# tasks of a backward pass if there are enough keys, and keys that are enough for one
_TASKS, _KEYS = 8, 256


def serves(query: Tensor, kernel: str) -> bool:
    """Whether this is the way for these queries and a kernel of this name."""
    return query.device.type == "cpu" and kernel in _NUMBERS


def forward(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """What `tiled_sum` returns, without a shift None; a normalised head that holds what is no number is NaN."""
    from .cpu_sums import sum_heads

    query, key, value = (part.detach().contiguous() for part in inputs[:3])
    (problems, rows, dims), channels = query.shape, value.shape[2]
    lanes = _width(channels)
    value = _padded(value, lanes)
    sums, total = value.new_empty(problems, rows, value.shape[2]), value.new_empty(problems, rows)
    shift = value.new_empty(problems, rows if inputs.normalised and shifted(inputs.kernel) else 0)
    given = _arguments(inputs, query, key, value, lanes, dims)
    out = [part.numpy() for part in (sums, total, shift)]

    def task(first, last, start, stop):
        sum_heads(*given, first, last, start, stop, *out)

    threads.run(task, _tasks(problems, rows, key.shape[1]))
    if shift.shape[1]:
        shift = torch.where(shift == -torch.inf, 0.0, shift)
    if inputs.normalised:
        weight = reciprocal(total)
        weight *= poison_of(query, key, value, inputs.bandwidth, inputs.group)
        sums *= weight[..., None]
    sums = sums if sums.shape[2] == channels else sums[..., :channels].contiguous()
    return sums, total, shift if shift.shape[1] else None


def _tasks(problems: int, rows: int, columns: int) -> list[tuple[int, int, int, int]]:
    """Ranges of problems, and of their queries, that are one task each."""
    together = max(1, _PAIRS // max(rows * columns, 1))
    return [
        (p, min(p + together, problems), m, min(m + _QUERIES, rows))
        for p in range(0, problems, together)
        for m in range(0, rows, _QUERIES)
    ]


def backward(
    grad: Tensor, rows: Tensor, total: Tensor, shift: Tensor | None, inputs: Inputs
) -> tuple[Tensor | None, ...]:
    """What `tiled_sum_backward` returns; None is what it has no number for."""
    from .cpu_slopes import DIMS, differentiate_heads

    query, key, value = (part.detach() for part in inputs[:3])
    dims, channels, lanes = query.shape[2], value.shape[2], _width(value.shape[2])
    # filled up by zeros, which have no distance
    points, keys = (_padded(part, DIMS) for part in (query, key))
    values = _padded(value, lanes)
    given = _arguments(inputs, points, keys, values, lanes, dims)
    outputs = rows if inputs.normalised else grad[:, :0]
    shifts = total[:, :0] if shift is None else shift
    more = _padded(grad, lanes), _padded(outputs, lanes), total.contiguous(), shifts.contiguous()
    arrays = [part.detach().numpy() for part in more]
    ranges = _ranges(*key.shape[:2])
    # of queries every range of keys has its own, added up in their order
    by_queries = points.new_empty(len(ranges), *points.shape)
    by_query, by_key, by_value = by_queries.numpy(), torch.empty_like(keys), torch.empty_like(values)
    by_keys = [part.numpy() for part in (by_key, by_value)]

    def task(first, last, part):
        differentiate_heads(*given, dims, *arrays, first, last, *ranges[part], by_query[part], *by_keys)

    together = max(1, _PAIRS // max(query.shape[1] * key.shape[1], 1))
    starts = range(0, len(query), together)
    threads.run(task, [(p, min(p + together, len(query)), part) for p in starts for part in range(len(ranges))])
    by_points = by_queries[0] if len(ranges) == 1 else by_queries.sum(0)
    by_points, by_key = (part[..., :dims].contiguous() for part in (by_points, by_key))
    by_bandwidth = None
    if inputs.bandwidth is not None:
        taus, stationary = inputs.bandwidth.detach().reshape(-1), inputs.kernel not in ("add_riesz", "riesz")
        moment = bandwidths.gradient(query, key, by_points, by_key, taus, stationary)
        by_bandwidth = moment.to(taus).view(inputs.bandwidth.shape)
    return by_points, by_key, by_value[..., :channels].contiguous(), by_bandwidth, None


def _ranges(problems: int, columns: int) -> list[tuple[int, int]]:
    """Ranges of keys that are a task each: more than one if there are few problems."""
    count = min(-(-_TASKS // max(problems, 1)), -(-columns // _KEYS))
    each = -(-columns // max(count, 1))
    # whole blocks
    each = max(-(-each // _BLOCK) * _BLOCK, _BLOCK)
    return [(start, min(start + each, columns)) for start in range(0, columns, each)] or [(0, 0)]


def _width(channels: int) -> int:
    """So many channels that they are a vector of which more than half is used, or the fewest there can be."""
    return next((width for width in _WIDTHS if width < 2 * channels), _WIDTHS[-1])


def _padded(rows: Tensor, multiple: int) -> Tensor:
    """The rows with as many zeros behind them as make their length a multiple, contiguous."""
    spare = -rows.shape[2] % multiple
    return torch.nn.functional.pad(rows, (0, spare)) if spare else rows.contiguous()


def _arguments(inputs: Inputs, query: Tensor, key: Tensor, value: Tensor, lanes: int, dims: int) -> tuple:
    """What the compiled loops take of a call with so many dimensions, which the points may be wider than."""
    from ...cpu.simd import Constant

    problems = query.shape[0]
    weight = query.new_empty(problems, 0) if inputs.weight is None else inputs.weight.detach().to(query)
    if inputs.bandwidth is None:
        bandwidth = query.new_full((problems,), inputs.tau, dtype=torch.float64)
    else:
        bandwidth = inputs.bandwidth.detach().reshape(-1).to(torch.float64)
    arrays = (part.contiguous().numpy() for part in (query, key, value, weight, bandwidth))
    constant = {"add_riesz": dims * RIESZ_EPSILON, "riesz": RIESZ_EPSILON}.get(inputs.kernel, 0.0)
    each = max(query.shape[1] // inputs.group, 1)
    form = _form(inputs).to(query).contiguous().numpy()
    return Constant(_NUMBERS[inputs.kernel]), Constant(lanes), *arrays, constant, form, inputs.causal, each


def _form(inputs: Inputs) -> Tensor:
    """The numbers of a kernel made by the user as cpu_forms.py has them, in float64; none of others."""
    if inputs.parameters is None:
        return torch.empty(0, device="cpu")
    parameters = inputs.parameters.detach().to(torch.float64)
    if inputs.kernel == Spline.name:
        return torch.cat(Spline.pieces(parameters))
    rises = parameters[1:] * torch.arange(1, len(parameters), dtype=parameters.dtype, device="cpu")
    return torch.cat([parameters, torch.nn.functional.pad(rises, (0, 1)) - parameters])
