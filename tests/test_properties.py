"""Properties that hold for all shapes, masks, ties and bandwidths, in float64, where only mistakes are visible."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import sortattn

from . import dense
from .cases import BOX, CASES, STATIONARY, Case, assert_close, leaves, refusal

ALL = {**CASES, "box": BOX}
BACKENDS = ("reference", "tiled", "sorted", "linear")
# all numbers below are of order one: errors are relative to that where a result is small because terms cancel
FORWARD, GRADIENT = 1e-12, 1e-11


@dataclass(frozen=True)
class Call:
    """Arguments of `kernel_attention`, and which query sees which key."""

    case: Case
    backend: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    options: dict

    def run(self, function=sortattn.kernel_attention, **changes) -> torch.Tensor:
        inputs = [changes.pop(name, getattr(self, name)) for name in ("query", "key", "value")]
        return function(*inputs, self.case.kernel, backend=self.backend, **{**self.options, **changes})

    def scale(self) -> float:
        """The size of the result if nothing cancelled."""
        rows = self.query.numel() // self.query.shape[-1]
        return max(self.value.abs().max().item() if self.value.numel() else 0.0, 1.0) * max(rows, 1) ** 0.5


def lattice(draw, *shape: int) -> torch.Tensor:
    """Quarters between -2 and 2, so that ties and kinks abound."""
    numbers = draw(arrays.arrays(np.int64, shape, elements=st.integers(-8, 8)))
    return torch.from_numpy(numbers).double() / 4


@st.composite
def calls(draw, names=tuple(ALL), causal=None, masked=None) -> Call:
    case = ALL[draw(st.sampled_from(names))]
    causal = draw(st.booleans()) if causal is None else causal
    backends = [name for name in BACKENDS if refusal(name, case, "cpu", causal=causal) is None]
    backend = draw(st.sampled_from(backends))
    leading = draw(st.lists(st.integers(1, 2), max_size=2))
    group = draw(st.sampled_from([1, 1, 3])) if leading else 1
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 15))
    dims, channels = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = (*leading[:-1], leading[-1] * group) if leading else ()
    query, key = lattice(draw, *heads, rows, dims), lattice(draw, *leading, columns, dims)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    value = torch.randn(*leading, columns, channels, generator=generator, dtype=torch.float64)
    # `tri` so wide that its normaliser is positive
    # powers of two, so that a tie on the lattice is one after division, too
    taus = [4.0, 8.0] if case.name == "tri" else [0.5, 1.0, 2.0, 4.0]
    options = {"bandwidth": draw(st.sampled_from(taus)), "is_causal": causal, "enable_gqa": group > 1}
    if draw(st.booleans()) if masked is None else masked:
        batch = heads[:1] or (1,)
        flags = draw(arrays.arrays(np.bool_, (*batch, columns)))
        options["key_mask"] = torch.from_numpy(flags)
    return Call(case, backend, query, key, value, options)


def expected(call: Call, query, key, value) -> torch.Tensor:
    """The definition, with the keys of a group repeated and the mask written out."""
    options = call.options
    if options["enable_gqa"]:
        key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
    seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
    if options["is_causal"]:
        seen = dense.visible(*seen.shape)
    mask = options.get("key_mask")
    if mask is not None:
        leading = query.dim() - 2
        seen = seen & (mask[0] if leading == 0 else mask.reshape(-1, *(1,) * leading, mask.shape[-1]))
    return dense.attention(call.case.formula, query, key, value, options["bandwidth"], seen, call.case.floor)


@settings(max_examples=400)
@given(calls())
def test_every_call_matches_the_definition(call):
    points, again = leaves(call.query, call.key, call.value), leaves(call.query, call.key, call.value)
    output = call.run(query=points[0], key=points[1], value=points[2])
    wanted = expected(call, *again)
    assert_close(output, wanted, FORWARD, call.scale())
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    actual = torch.autograd.grad(output, points, gradient)
    other = torch.autograd.grad(wanted, again, gradient)
    # weights as small as the 1e-3 of the Riesz kernels divide the gradients
    small = 1e3 if "riesz" in call.case.name else 1.0
    for one, two in zip(actual, other, strict=True):
        assert_close(one, two, GRADIENT, small * call.scale())


@given(calls(), st.floats(-3, 3), st.floats(-3, 3))
def test_the_output_is_linear_in_the_values(call, first, second):
    other = call.value.flip(-1).roll(1, -2)
    for function in (sortattn.kernel_attention, sortattn.kernel_sum):
        together = call.run(function, value=first * call.value + second * other)
        apart = first * call.run(function) + second * call.run(function, value=other)
        # a kernel sum is as large as the sum of its weights
        size = call.run(function, value=torch.ones_like(call.value)).abs().max().item()
        assert_close(together, apart, FORWARD, 10 * max(size, 1.0) * call.scale())


@given(calls(causal=False), st.randoms(use_true_random=False))
def test_the_order_of_the_keys_does_not_matter(call, random):
    order = list(range(call.key.shape[-2]))
    random.shuffle(order)
    changes = {"key": call.key[..., order, :], "value": call.value[..., order, :]}
    if "key_mask" in call.options:
        changes["key_mask"] = call.options["key_mask"][:, order]
    assert_close(call.run(**changes), call.run(), FORWARD, call.scale())


@given(calls(causal=False), st.randoms(use_true_random=False))
def test_every_query_is_on_its_own(call, random):
    order = list(range(call.query.shape[-2]))
    random.shuffle(order)
    assert_close(call.run(query=call.query[..., order, :]), call.run()[..., order, :], FORWARD, call.scale())
    assert_close(call.run(query=call.query[..., :1, :]), call.run()[..., :1, :], FORWARD, call.scale())


@given(calls(names=STATIONARY), st.integers(-4000, 4000))
def test_stationary_kernels_do_not_see_a_translation(call, quarters):
    # a lattice moved by a multiple of its step stays exact, and so does every difference: only feature maps, which take
    # the sine of the points themselves, see the moved coordinates, and they are centred first
    shift = quarters / 4
    moved = call.run(query=call.query + shift, key=call.key + shift)
    assert_close(moved, call.run(), FORWARD, call.scale())


@given(calls(), st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_a_bandwidth_is_a_scaling_of_the_points(call, factor):
    scaled = call.run(query=call.query * factor, key=call.key * factor, bandwidth=call.options["bandwidth"] * factor)
    assert_close(scaled, call.run(), FORWARD, call.scale())


@given(calls(masked=True))
def test_what_a_masked_key_holds_does_not_matter(call):
    mask = call.options["key_mask"]
    shape = (-1, *(1,) * (call.key.dim() - 3), mask.shape[-1], 1) if call.key.dim() > 2 else (mask.shape[-1], 1)
    seen = mask.reshape(shape) if call.key.dim() != 2 else mask[0][:, None]
    if call.options["enable_gqa"] and call.key.dim() == 3:
        # one mask for every query head: a key counts if any head of its group sees it
        group = call.query.shape[-3] // call.key.shape[-3]
        seen = mask.unflatten(0, (-1, group)).any(1)[..., None]
    key = torch.where(seen, call.key, torch.nan)
    value = torch.where(seen, call.value, torch.inf)
    assert_close(call.run(key=key, value=value), call.run(), FORWARD, call.scale())


@given(calls(causal=False, masked=False))
def test_attention_to_equal_values_is_that_value(call):
    output = call.run(value=torch.full_like(call.value, 3.0))
    total = call.run(sortattn.kernel_sum, value=torch.ones_like(call.value))
    # queries without any weight get zero; no kernel here has a weight between 0 and 1e-6 on this lattice
    wanted = torch.where(total.abs() > 1e-9, 3.0, output)
    assert_close(output, wanted, FORWARD, call.scale())
