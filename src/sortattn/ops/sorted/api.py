"""The operator behind the sorted backend, with its fake kernels and its derivative.

`sided_sum` is `z_m = sum_n sum_d f((q_md - k_nd) / tau) v_n` for a sided kernel `f` (see `kernels.Terms`), together
with the same sum of the scalars `weight_n`. Its derivative needs three more walks along the same sorted lines:

    dv_n  = sum_m sum_d f(u) g_m                      (transposed: queries are summed for keys)
    dq_md = (1/tau) sum_n f'(u) <v_n, g_m>
    dk_nd = -(1/tau) sum_m f'(u) <v_n, g_m>           (transposed)

and, as `f` depends on `q / tau` and `k / tau` only, `dtau = -(1/tau) (sum q dq + sum k dk)`.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...cuda import launch
from ...kernels import Terms
from .. import bandwidths
from ..batching import fold, refuse_coefficients, unfold
from ..direct import differentiated_once, direct, shortcut
from . import lent, quotient
from .lines import Bandwidth, walker


def _sums(
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
    kept: bool = True,
    ties: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sums `(P, M, C)`, those of the weights `(P, M)`, and the argsorts of queries and keys by dimension, if kept.

    Without `weight (P, N)` they are all one, without `bandwidth (P,)` it is `tau` for all. `ties` is for the gradients:
    whether to expect many.
    """
    walk = walker(query.device.type)
    query, key, value = (part.detach().contiguous() for part in (query, key, value))
    terms = Terms(nodes, below.detach(), above.detach(), rate, compact, folded, constant)
    return walk.forward(query, key, value, *_given(walk, value, weight, bandwidth, tau, terms), kept)


def _rehearse(*inputs) -> None:
    """A forward pass of bare tensors on a GPU, the quotient that follows it and, if anything is learned, gradients."""
    tensors, terms, constants = inputs[:5], inputs[5:8], (1.0, *inputs[9:13])
    kept, ties = inputs[13:] + (True, False)[len(inputs) - 13 :]
    wants = [kept and part is not None and part.requires_grad for part in (*tensors, terms[1])]
    # the bandwidth makes no difference
    given = (*map(launch.bare, tensors[:4]), None)
    sums, total, *orders = _sums(*given, *terms, *constants, kept)
    for kernel in quotient.kernels(tensors[0], any(wants)):
        kernel((1,), 1)
    if any(wants):
        asked = wants[0] or wants[1] or wants[4], False, wants[2] or wants[3], wants[5]
        _gradients(sums, total, *given, *terms, *orders, *constants, *asked, ties)


_forward = launch.foreseen(_sums, lambda *inputs: launch.listed(lambda: _rehearse(*inputs)))
sided_sum = torch.library.custom_op("sortattn::sided_sum", _forward, mutates_args=())


def _given(walk, value: Tensor, weight: Tensor | None, bandwidth: Tensor | None, tau: float, terms: Terms):
    """Weights, terms and bandwidths in the form that the walker takes."""
    if weight is not None:
        weight = weight.detach().contiguous()
    elif walk.WANTS_TENSORS:
        weight = value.new_ones(value.shape[:2])
    if bandwidth is not None:
        bandwidth = bandwidth.detach()
    elif walk.WANTS_TENSORS:
        bandwidth = torch.full((value.shape[0],), tau, dtype=torch.float64, device="cpu")
    else:
        bandwidth = tau
    return weight, terms, bandwidth


@sided_sum.register_fake
def _(
    query, key, value, weight, bandwidth, nodes, below, above, tau, rate, compact, folded, constant, kept=True,
    ties=False,
):  # fmt: skip
    problems, rows, dims = query.shape
    sums = query.new_empty(problems, rows, value.shape[2])
    kept = kept and walker(query.device.type).KEEPS_ORDER
    orders = (query.new_empty(problems, dims, n if kept else 0, dtype=torch.int32) for n in (rows, key.shape[1]))
    return sums, query.new_empty(problems, rows), *orders


@launch.foreseen
def _gradients(
    grad: Tensor,
    grad_extra: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bandwidth: Tensor | None,
    nodes: Tensor,
    below: Tensor,
    above: Tensor,
    query_order: Tensor,
    key_order: Tensor,
    tau: float,
    rate: float,
    compact: bool,
    folded: int,
    constant: float,
    wants_points: bool,
    wants_bandwidth: bool,
    wants_value: bool,
    wants_terms: bool,
    ties: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, weight, bandwidth, below and above; empty tensors for what is not wanted."""
    walk = walker(query.device.type)
    parts = (grad, grad_extra, query, key, value)
    grad, grad_extra, query, key, value = (part.detach().contiguous() for part in parts)
    terms = Terms(nodes, below.detach(), above.detach(), rate, compact, folded, constant)
    wants = (wants_points, wants_bandwidth, wants_value, wants_terms)
    gradients = _empty_gradients(query, key, value, bandwidth, below, above, *wants, lent.empty_like)
    # coefficients are shared by all heads
    for gradient in gradients[5:]:
        gradient.zero_()
    weight, terms, bandwidth = _given(walk, value, weight, bandwidth, tau, terms)
    given = (grad, grad_extra, query, key, value, weight, bandwidth, query_order, key_order)
    for some in walk.groups(query, key, value, terms, backward=True):
        parts = (part[some] if isinstance(part, Tensor) else part for part in given)
        _fill([*(part[some] for part in gradients[:5]), *gradients[5:]], walk, terms, *parts, *wants, ties)
    return gradients


sided_sum_backward = differentiated_once(
    torch.library.custom_op("sortattn::sided_sum_backward", _gradients, mutates_args=())
)
# an operator has torch import its compiler at the first call, which takes seconds
gradients_directly = shortcut(sided_sum_backward, _gradients)


def _empty_gradients(
    query: Tensor, key: Tensor, value: Tensor, bandwidth: Tensor | None, below: Tensor, above: Tensor,
    wants_points: bool, wants_bandwidth: bool, wants_value: bool, wants_terms: bool,
    empty_like: Callable[[Tensor], Tensor],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Room for what `sided_sum_backward` returns."""

    def like(part, wanted):
        return empty_like(part) if wanted else query.new_empty(0)

    return (
        like(query, wants_points),
        like(key, wants_points),
        like(value, wants_value),
        key.new_empty(key.shape[:2]) if wants_value else query.new_empty(0),
        like(bandwidth, wants_bandwidth),
        like(below, wants_terms),
        like(above, wants_terms),
    )


def _fill(
    gradients: list[Tensor],
    walk,
    terms: Terms,
    grad: Tensor,
    grad_extra: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bandwidth: Bandwidth,
    query_order: Tensor,
    key_order: Tensor,
    wants_points: bool,
    wants_bandwidth: bool,
    wants_value: bool,
    wants_terms: bool,
    ties: bool,
) -> None:
    """The gradients of some heads, see `sided_sum_backward`; those of the coefficients are added to."""
    by_query, by_key, by_value, by_weight, by_bandwidth, by_below, by_above = gradients
    # coefficients have other walks, along lines as they are
    together = wants_points and wants_value and not (wants_terms or ties)
    queries, keys = walk.both(query, key, query_order, key_order, value, weight, terms, bandwidth, together)
    slope, rates = _derivative(terms), 1.0 / bandwidth
    if wants_points and wants_value:
        walk.gradients(
            queries, keys, grad, grad_extra, value, weight, terms, slope, bandwidth,
            into=(by_query, by_key, by_value, by_weight), ties=ties,
        )  # fmt: skip
    elif wants_points:
        walk.dot(
            keys, queries, value, weight, grad, grad_extra, slope, bandwidth, mirrored=False, factors=rates,
            into=by_query,
        )  # fmt: skip
        walk.dot(
            queries, keys, grad, grad_extra, value, weight, slope, bandwidth, mirrored=True, factors=-rates, into=by_key
        )
    elif wants_value:
        walk.scatter(queries, keys, grad, grad_extra, terms, bandwidth, mirrored=True, into=(by_value, by_weight))
    if wants_bandwidth:
        by_bandwidth.copy_(bandwidths.gradient(query, key, by_query, by_key, bandwidth, not terms.folded))
    if wants_terms:
        for gradient, name in ((by_below, "below"), (by_above, "above")):
            if name == "above" and not terms.rate:
                continue
            for place in _unit_tables(terms.below):
                part = {"below": torch.zeros_like(terms.below), "above": torch.zeros_like(terms.above), name: place}
                unit = replace(terms, **part, compact=False)
                sums, extra = walk.scatter(keys, queries, value, weight, unit, bandwidth, mirrored=False)
                # a rehearsal has nothing to sum
                if sums.is_meta:
                    continue
                # coefficients are on the CPU
                gradient += place * (_inner(sums, grad) + _inner(extra, grad_extra)).to(place.device)


@sided_sum_backward.register_fake
def _(
    grad, grad_extra, query, key, value, weight, bandwidth, nodes, below, above, query_order, key_order, tau, rate,
    compact, folded, constant, wants_points, wants_bandwidth, wants_value, wants_terms, ties=False,
):  # fmt: skip
    wants = (wants_points, wants_bandwidth, wants_value, wants_terms)
    return _empty_gradients(
        query, key, value, bandwidth, below, above, *wants, empty_like=lambda part: part.new_empty(part.shape)
    )


def _derivative(terms: Terms) -> Terms:
    """The terms of `f'`, almost everywhere: `(p e^(-rate u))' = (p' - rate p) e^(-rate u)`, negated above."""

    def differentiate(polynomials: Tensor) -> Tensor:
        degrees = torch.arange(1, polynomials.shape[1], dtype=polynomials.dtype, device=polynomials.device)
        slope = polynomials[:, 1:] * degrees
        if not terms.rate:
            return slope if slope.shape[1] else torch.zeros_like(polynomials)
        return torch.nn.functional.pad(slope, (0, 1)) - terms.rate * polynomials

    # beyond its last node the derivative of a compact kernel vanishes too
    return replace(
        terms,
        below=differentiate(terms.below),
        above=-differentiate(terms.above),
        folded=-terms.folded,
        constant=0.0,
    )


def _unit_tables(table: Tensor):
    """All tables of this shape with a single entry of one."""
    for j in range(table.shape[0]):
        for i in range(table.shape[1]):
            unit = torch.zeros_like(table)
            unit[j, i] = 1.0
            yield unit


def _inner(left: Tensor, right: Tensor) -> Tensor:
    # as in `bandwidths`
    return (left * right).sum(1, dtype=torch.float64).sum()


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:8], *output[2:])
    ctx.constants, ctx.ties = inputs[8:13], any(inputs[14:])
    ctx.mark_non_differentiable(*output[2:])
    # no zeros in place of the gradients that the argsorts do not have
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_extra, *_):
    *tensors, query_order, key_order = ctx.saved_tensors
    query, key, value, weight, bandwidth, nodes, below, above = tensors
    wants = ctx.needs_input_grad
    wants_points = wants[0] or wants[1] or wants[4]
    wants_value = wants[2] or wants[3]
    wants_terms = wants[6] or wants[7]
    if grad is None:
        grad = query.new_zeros(*query.shape[:2], value.shape[2])
    if grad_extra is None:
        grad_extra = query.new_zeros(query.shape[:2])
    gradients = gradients_directly(
        grad,
        grad_extra,
        *tensors,
        query_order,
        key_order,
        *ctx.constants,
        wants_points,
        wants[4],
        wants_value,
        wants_terms,
        ctx.ties,
    )
    places = (0, 1, 2, 3, 4, 6, 7)
    chosen = dict(zip(places, gradients, strict=True))
    return tuple(chosen.get(i) if wants[i] else None for i in range(len(wants)))


sided_sum.register_autograd(_backward, setup_context=_setup)


def _alone(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Without the argsorts, which only the backward pass needs."""
    return _forward(*inputs[:13], False)


sided_sum_directly = direct(sided_sum, _forward, _setup, _backward, _alone)


@sided_sum.register_vmap
def _(info, in_dims, *inputs):
    """A mapped dimension becomes more problems."""
    refuse_coefficients(*in_dims[5:8])
    folded = [None if inputs[i] is None else fold(info.batch_size, inputs[i], in_dims[i]) for i in range(5)]
    return unfold(info.batch_size, sided_sum(*folded, *inputs[5:]))
