"""Causal sums in quasi linear time, put together from two other ways: `tiled` within chunks, `sorted` before them.

A sequence is cut into `2^L` chunks. A pair of level l is two neighbouring stretches of `2^l` chunks: the queries of the
second see all keys of the first, so that there is no mask, and the pairs of a level are as many heads of one call. Of a
query and a key before it, both are in one chunk, or in the two stretches of a single pair:

    keys      0 1 2 3 4 5 6 7
    queries 0 c
            1 0 c                 c: within a chunk, with a mask
            2 1 1 c               0: level 0, four pairs
            3 1 1 0 c             1: level 1, two pairs
            4 2 2 2 2 c           2: level 2, one pair
            5 2 2 2 2 0 c
            6 2 2 2 2 1 1 c
            7 2 2 2 2 1 1 0 c

A level has half of the queries and half of the keys, so all levels take `L / 2` times what sums without a mask take.
These halves are copies, so heads go by rounds: what is there beside inputs and results takes no more room than inputs.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda.constants import kept
from ..kernels import KERNELS, Kernel, SidedKernel, known, rebuild
from ..normalise import poisoned, reciprocal, through_quotient
from ..validation import Problem
from .batching import fold, refuse_coefficients, unfold
from .direct import differentiated_once, direct, shortcut
from .sorted import backend as by_sorting
from .sorted import room
from .tiled.api import gradients_directly, tiled_sum_directly
from .tiled.inputs import TENSORS, Inputs, schema

# keys of a chunk, at most: up to there `tiled` takes no longer than `sorted`; for gradients on a GPU; and on the CPU of
# kernels made by the user, whose pairs take longer: on a GPU half of the second for these
_CHUNK, _SHORT, _SMALL = 2048, 1024, 256
# what a head takes in its round, by the size of its inputs, forward and for gradients, with a little to spare
_SHARES = 2.0, 3.5
# bytes that rounds may always take on the CPU
_WORKSPACE = 64 << 20


def why_not(problem: Problem, kernel: Kernel, normalised: bool) -> str | None:
    """Why this cannot serve the call, or None if it can."""
    if isinstance(kernel, SidedKernel) and not known(kernel):
        return f"causal sums are those of kernels by name, Spline and PolynomialExponential, not {kernel.name}"
    return by_sorting.why_not(problem, kernel, normalised)


def attention(problem: Problem, kernel: SidedKernel) -> Tensor:
    """Normalised kernel sums, `(P, M, C)`."""
    return poisoned(problem, _sum(problem.widened(), kernel, normalised=True))


def kernel_sum(problem: Problem, kernel: SidedKernel) -> Tensor:
    """Kernel sums, `(P, M, C)`."""
    return _sum(problem, kernel, normalised=False)


def chunks(inputs: Inputs, length: int, backward: bool) -> tuple[int, int]:
    """How many levels there are for so many queries, and the keys of a chunk."""
    by_name, on_gpu = inputs.kernel in KERNELS, inputs.query.is_cuda
    if by_name:
        most = _SHORT if on_gpu and backward else _CHUNK
    else:
        most = _SHORT // 2 if on_gpu else _SMALL
    levels = 0
    while most << levels < length:
        levels += 1
    return levels, -(-length >> levels)


def _sum(problem: Problem, kernel: SidedKernel, normalised: bool) -> Tensor:
    fixed = isinstance(problem.bandwidth, float)
    rows, _ = causal_sum_directly(
        problem.query, problem.key, problem.value, problem.weight, None if fixed else problem.bandwidth,
        kernel.parameters(), problem.bandwidth if fixed else 0.0, kernel.name, True, problem.group, normalised,
        problem.dtype.itemsize == 2,
    )  # fmt: skip
    return rows


class _Part(NamedTuple):
    """Some of the pairs of queries and keys: queries that see all of these keys, or with `masked` those before them.

    Of a tensor `(P, G, rows, ...)` with a row for each query of G heads it takes `(P, pairs, G, size, ...)`, and of one
    with a row for each key, `(P, 1, rows, ...)`, the same for those.
    """

    size: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    masked: bool

    def of_queries(self, rows: Tensor) -> Tensor:
        return self._view(rows, *self.queries)

    def of_keys(self, rows: Tensor) -> Tensor:
        return self._view(rows, *self.keys)

    def _view(self, rows: Tensor, which: int, of: int) -> Tensor:
        # not -1, which nothing can be inferred from where there are no problems
        pairs = rows.shape[2] // (of * self.size)
        return rows.unflatten(2, (pairs, of, self.size))[:, :, :, which].movedim(2, 1)


class _Cut(NamedTuple):
    """How a call is cut.

    Of the queries of a head the first `blind` see no key; of the keys the first `ahead` are seen by all queries. The
    rest is a `length` of queries and as many keys. The last of them stand there again to fill the last chunk: keys that
    no query sees, and queries whose sums nobody asks for.
    """

    group: int
    blind: int
    ahead: int
    length: int
    levels: int
    chunk: int

    @classmethod
    def of(cls, inputs: Inputs, backward: bool = False) -> "_Cut":
        """That of these tensors."""
        rows, columns = inputs.query.shape[1] // inputs.group, inputs.key.shape[1]
        length = min(rows, columns)
        return cls(inputs.group, rows - length, columns - length, length, *chunks(inputs, length, backward))

    @property
    def room(self) -> int:
        """The length with what is behind it."""
        return self.chunk << self.levels

    def parts(self) -> Iterator[_Part]:
        """All pairs but those with keys `ahead`."""
        if self.length:
            yield _Part(self.chunk, (0, 1), (0, 1), True)
        for level in range(self.levels):
            yield _Part(self.chunk << level, (1, 2), (0, 2), False)

    def queries(self, rows: Tensor) -> Tensor:
        """`(P, G, room, ...)` of `(P, G * M, ...)`."""
        return self._filled(rows.unflatten(1, (self.group, self.blind + self.length))[:, :, self.blind :])

    def keys(self, rows: Tensor) -> Tensor:
        """`(P, 1, room, ...)` of `(P, N, ...)`."""
        return self._filled(rows[:, None, self.ahead :])

    def _filled(self, rows: Tensor) -> Tensor:
        spare = self.room - self.length
        # the last row again: a point at zero might be far from all others, which costs time
        return torch.cat([rows, rows[:, :, -1:].expand(-1, -1, spare, *rows.shape[3:])], 2) if spare else rows

    def of_all_queries(self, rows: Tensor) -> Tensor:
        """`(P, G * M, ...)` of `(P, G, room, ...)`, zeros for those that see no key."""
        return self._whole(rows, rows.new_zeros(*rows.shape[:2], self.blind, *rows.shape[3:]))

    def of_all_keys(self, rows: Tensor, ahead: Tensor) -> Tensor:
        """`(P, N, ...)` of `(P, 1, room, ...)` and of what is `ahead`."""
        return self._whole(rows, ahead[:, None])

    def _whole(self, rows: Tensor, before: Tensor) -> Tensor:
        rows = rows[:, :, : self.length]
        rows = torch.cat([before, rows], 2) if before.shape[2] else rows
        return rows.flatten(1, 2).contiguous()


class _Call:
    """The tensors of a round of heads, cut."""

    def __init__(self, inputs: Inputs, backward: bool):
        self.inputs = inputs = inputs._replace(**{name: _detached(part) for name, part in inputs._asdict().items()})
        self.cut = cut = _Cut.of(inputs, backward)
        self.query = cut.queries(inputs.query)
        self.key, self.value, self.weight = (
            None if part is None else cut.keys(part) for part in (inputs.key, inputs.value, inputs.weight)
        )

    def tiles(self, part: _Part) -> Inputs:
        """What `tiled` takes for a part."""
        inputs = self.inputs
        query = part.of_queries(self.query)
        key, value, weight = (
            None if rows is None else _heads(part.of_keys(rows)) for rows in (self.key, self.value, self.weight)
        )
        bandwidth = None if inputs.bandwidth is None else inputs.bandwidth.repeat_interleave(query.shape[1], 0)
        # those of a kernel made by the user where its pairs are summed
        numbers = inputs.parameters
        if numbers is not None and part.masked and numbers.device != query.device:
            numbers = _numbers_at(query.device, numbers.dtype, *numbers.tolist())
        return inputs._replace(
            query=_heads(query), key=key, value=value, weight=weight, bandwidth=bandwidth, parameters=numbers
        )

    def problem(self, part: _Part) -> Problem:
        """What `sorted` takes for a part."""
        return self._problem(self.tiles(part))

    def problem_ahead(self) -> Problem:
        """What `sorted` takes for the keys that all queries see."""
        inputs, ahead = self.inputs, self.cut.ahead
        weight = None if inputs.weight is None else inputs.weight[:, :ahead]
        return self._problem(inputs._replace(key=inputs.key[:, :ahead], value=inputs.value[:, :ahead], weight=weight))

    def _problem(self, inputs: Inputs) -> Problem:
        # what had 16 bits has many ties, which is all that the type is asked for
        dtype = torch.bfloat16 if inputs.coarse else inputs.query.dtype
        bandwidth = inputs.tau if inputs.bandwidth is None else inputs.bandwidth
        return Problem(*inputs[:4], bandwidth, False, inputs.group, inputs.query.shape[:1], dtype)


@kept
def _numbers_at(device: torch.device, dtype: torch.dtype, *numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


def _detached(part: object) -> object:
    return part.detach() if isinstance(part, Tensor) else part


def _heads(part: Tensor) -> Tensor:
    """`(P, pairs, G, size, ...)` as `(P * pairs, G * size, ...)`."""
    return part.flatten(0, 1).flatten(1, 2)


def _rounds(inputs: Inputs, backward: bool) -> list[slice]:
    """Heads whose sums are made together."""
    points = inputs.query, inputs.key, inputs.value
    size = sum(part.nbytes for part in points)
    problems = len(inputs.value)
    least = room.WORKSPACE if inputs.value.is_cuda else _WORKSPACE
    return room.groups(problems, int(_SHARES[backward] * size / max(problems, 1)), max(size, least))


def _of_heads(inputs: Inputs, some: slice) -> Inputs:
    """What these heads have of the tensors."""
    alike = "parameters", *Inputs._fields[TENSORS:]
    return inputs._replace(
        **{name: part[some] for name, part in inputs._asdict().items() if part is not None and name not in alike}
    )


@torch.no_grad()
def _forward(*arguments) -> tuple[Tensor, Tensor]:
    """Causal sums `(P, M, C)`, with `normalised` divided by those of ones, which for the backward pass are `(P, M)`."""
    inputs = Inputs(*arguments)
    (problems, rows, _), value = inputs.query.shape, inputs.value
    sums, total = value.new_empty(problems, rows, value.shape[2]), value.new_empty(problems, rows)
    for some in _rounds(inputs, backward=False):
        _sum_round(_Call(_of_heads(inputs, some), backward=False), sums[some], total[some])
    return sums, total


def _sum_round(call: _Call, into: Tensor, into_total: Tensor) -> None:
    """Fills both results of these heads."""
    inputs, cut = call.inputs, call.cut
    kernel = rebuild(inputs.kernel, inputs.parameters)
    size = inputs.value.shape[0], cut.group, cut.room
    sums, total = (inputs.value.new_zeros(*size, *last) for last in ((inputs.value.shape[2],), ()))
    for part in cut.parts():
        if part.masked:
            more = tiled_sum_directly(*call.tiles(part)._replace(normalised=False))
        else:
            more = by_sorting.sums(call.problem(part), kernel)
        for out, rows in zip((sums, total), more, strict=False):
            _add(part.of_queries(out), rows)
        # gone before the next part
        del more, rows
    sums, total = cut.of_all_queries(sums), cut.of_all_queries(total)
    if cut.ahead:
        for out, rows in zip((sums, total), by_sorting.sums(call.problem_ahead(), kernel), strict=True):
            out += rows
    if inputs.normalised:
        torch.mul(sums, reciprocal(total)[..., None], out=into)
    else:
        into.copy_(sums)
    into_total.copy_(total)


def _add(view: Tensor, rows: Tensor) -> None:
    """Add rows `(P * pairs, G * size, ...)` to where they belong."""
    view += rows.view(view.shape)


causal_sum = torch.library.custom_op("sortattn::causal_sum", _forward, mutates_args=(), schema=schema(2))


@causal_sum.register_fake
def _(*arguments):
    inputs = Inputs(*arguments)
    value, (problems, rows, _) = inputs.value, inputs.query.shape
    return value.new_empty(problems, rows, value.shape[2]), value.new_empty(problems, rows)


@torch.no_grad()
def _gradients(grad: Tensor, rows: Tensor, total: Tensor, *arguments) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, bandwidth and parameters; of what is None, no number.

    `rows` are the result, or of no channels if it is not normalised. The last argument is whether the parameters are
    learned.
    """
    *arguments, learned = arguments
    inputs = Inputs(*arguments)
    into = _Gradients(
        *(torch.empty_like(part, memory_format=torch.contiguous_format) for part in inputs[:3]),
        *(grad.new_zeros(0) if part is None else torch.zeros_like(part) for part in inputs[4:TENSORS]),
    )
    for some in _rounds(inputs, backward=True):
        call = _Call(_of_heads(inputs, some), backward=True)
        _differentiate_round(call, grad[some], rows[some], total[some], learned, into.of(some))
    return tuple(into)


class _Gradients(NamedTuple):
    """Those of all inputs that have some."""

    query: Tensor
    key: Tensor
    value: Tensor
    bandwidth: Tensor
    parameters: Tensor

    def of(self, some: slice) -> "_Gradients":
        """Those of some heads; the parameters' are of all."""
        return _Gradients(*(part[some] for part in self[:4]), self.parameters)


def _differentiate_round(
    call: _Call, grad: Tensor, rows: Tensor, total: Tensor, learned: bool, into: _Gradients
) -> None:
    """Fills the gradients of these heads; those of bandwidth and parameters are added."""
    inputs, cut = call.inputs, call.cut
    gradients = [torch.zeros_like(part) for part in (call.query, call.key, call.value)]

    def add_numbers(bandwidth: Tensor | None, parameters: Tensor | None) -> None:
        if inputs.bandwidth is not None:
            problems = len(into.bandwidth)
            into.bandwidth.add_(bandwidth.view(problems, len(bandwidth) // max(problems, 1), 1).sum(1, keepdim=True))
        if learned:
            into.parameters.add_(parameters.to(into.parameters.device))

    def add(part: _Part, found: tuple[Tensor | None, ...]) -> None:
        for gradient, view, more in zip(gradients, (part.of_queries, part.of_keys, part.of_keys), found, strict=False):
            _add(view(gradient), more)
        add_numbers(*found[3:])

    given = [cut.queries(part) for part in ((grad, rows, total) if inputs.normalised else (grad, total))]
    # queries that are there to fill the last chunk
    given[0] = _without(given[0], cut)
    for part in cut.parts():
        if part.masked:
            quotient = [_heads(part.of_queries(each)) for each in given]
            if not inputs.normalised:
                quotient.insert(1, rows)
            none = total.new_empty(*quotient[2].shape[:1], 0)
            add(part, gradients_directly(*quotient, none, *call.tiles(part), learned))
            del quotient
    by_sums = through_quotient(*given) if inputs.normalised else (given[0], torch.zeros_like(given[1]))
    del given
    for part in cut.parts():
        if not part.masked:
            some = (_heads(part.of_queries(each)) for each in by_sums)
            add(part, by_sorting.gradients(call.problem(part), inputs.kernel, inputs.parameters, learned, *some))
    by_query = cut.of_all_queries(gradients[0])
    ahead = [part[:, : cut.ahead] for part in (inputs.key, inputs.value)]
    if cut.ahead:
        by_sums = through_quotient(grad, rows, total) if inputs.normalised else (grad, torch.zeros_like(total))
        query, *ahead, bandwidth, parameters = by_sorting.gradients(
            call.problem_ahead(), inputs.kernel, inputs.parameters, learned, *by_sums
        )
        by_query += query
        add_numbers(bandwidth, parameters)
    into.query.copy_(by_query)
    for out, part, before in zip(into[1:3], gradients[1:], ahead, strict=True):
        out.copy_(cut.of_all_keys(part, before))


def _without(rows: Tensor, cut: _Cut) -> Tensor:
    """The rows `(P, G, room, C)`, zeros behind their length."""
    if cut.room > cut.length:
        rows[:, :, cut.length :] = 0.0
    return rows


causal_sum_backward = torch.library.custom_op(
    "sortattn::causal_sum_backward", _gradients, mutates_args=(),
    schema=schema(5, "grad", "rows", "total", last=("bool learned",)),
)  # fmt: skip
differentiated_once(causal_sum_backward)
_gradients_directly = shortcut(causal_sum_backward, _gradients)


@causal_sum_backward.register_fake
def _(grad, rows, total, *arguments):
    query, key, value, _, bandwidth, parameters = arguments[:TENSORS]
    return tuple(
        grad.new_empty(0) if part is None else part.new_empty(part.shape)
        for part in (query, key, value, bandwidth, parameters)
    )


def _setup(ctx, inputs, output):
    rows, total = output
    # the derivative of a quotient needs it as it is, and the output may be changed in place
    kept = rows.clone() if Inputs(*inputs).normalised else rows.new_empty(0)
    ctx.save_for_backward(kept, total, *inputs[:TENSORS])
    ctx.options = inputs[TENSORS:]
    ctx.mark_non_differentiable(total)
    # zeros for the total would be made at every backward pass
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _):
    wants = ctx.needs_input_grad
    if grad is None:
        return (None,) * len(wants)
    gradients = _gradients_directly(grad, *ctx.saved_tensors, *ctx.options, wants[5])
    places = (0, 1, 2, 4, 5)
    chosen = dict(zip(places, gradients, strict=True))
    return tuple(chosen.get(i) if wants[i] else None for i in range(len(wants)))


causal_sum.register_autograd(_backward, setup_context=_setup)
causal_sum_directly = direct(causal_sum, _forward, _setup, _backward)


@causal_sum.register_vmap
def _(info, in_dims, *inputs):
    """A mapped dimension becomes more problems."""
    refuse_coefficients(in_dims[5])
    folded = [None if inputs[i] is None else fold(info.batch_size, inputs[i], in_dims[i]) for i in range(5)]
    return unfold(info.batch_size, causal_sum(*folded, *inputs[5:]))
