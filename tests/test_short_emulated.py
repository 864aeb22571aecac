"""The kernels for short sequences, run on the CPU, against the definition in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sortattn
from sortattn.ops.tiled import cuda, short
from sortattn.ops.tiled.inputs import Inputs

from .cases import CASES, Shape, assert_close, cotangent, draw, leaves
from .definition import FORWARD, GRADIENT, check, define
from .emulation.device import check_sides_of_steps, emulate
from .emulation.emulator import AVAILABLE

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
NAMES, TYPES = short.NAMES, short.TYPES


@pytest.fixture(autouse=True)
def _as_on_a_device(device, monkeypatch):
    """Calls on the CPU take the way of CUDA devices, and only that of short ones."""
    if device != "cpu":
        pytest.skip("a CUDA device needs no emulation")
    emulate(monkeypatch)
    # what the other kernels are launched by
    monkeypatch.setattr(cuda, "Call", None)


# With one key nothing depends on queries and keys, and their gradients are zero: an error is then promised relative to
# the parts that cancel, as `definition.py` has it.
def compare(name, shape, change=lambda part: part, **options):
    case, inputs, gradient = CASES[name], draw(shape, torch.float32), cotangent(shape, torch.float32)
    inputs = [*map(change, inputs[:2]), inputs[2]]
    check(define(case, inputs, gradient, **options), case, inputs, gradient, backend="tiled", **options)


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 90], ids=lambda rows: f"N{rows}")
@pytest.mark.parametrize("name", NAMES)
def test_every_length_computes_the_definition(name, rows, monkeypatch):
    compare(name, Shape((1,), rows, rows, 8, 8))
    # with many heads a block has all rows of one
    monkeypatch.setattr(short, "_FEW", 0)
    short._plan.cache_clear()
    compare(name, Shape((1,), rows, rows, 8, 8))
    short._plan.cache_clear()


@pytest.mark.parametrize("rows", [97, 127, 128])
def test_longer_sequences_are_for_the_other_kernels(rows):
    for shape in (Shape((1,), rows, 5, 4, 4), Shape((1,), 5, rows, 4, 4)):
        inputs = Inputs(*draw(shape, torch.float32), None, None, None, 1.0, "add_bump", False, 1, True, False)
        assert not short.serves(inputs)
        assert short.serves(
            inputs._replace(query=inputs.query[:, :5], key=inputs.key[:, :5], value=inputs.value[:, :5])
        )


@pytest.mark.parametrize("name", NAMES)
def test_every_path_computes_the_definition(name):
    compare(name, Shape((1, 2), 40, 70, 64, 64))
    # odd rows, which are read number by number, and heads of their own
    compare(name, Shape((2, 2), 70, 40, 33, 5))
    compare(name, Shape((2,), 3, 90, 3, 6))
    # ties at the kinks are the rule
    compare(name, Shape((1,), 65, 66, 7, 4), lambda part: (part * 4).round() / 4)
    # far apart, where factors do not serve, and a long way from zero
    compare(name, Shape((1,), 20, 30, 7, 4), lambda part: part * 20)
    compare(name, Shape((1,), 20, 30, 7, 4), lambda part: part + 100)
    tiny = CASES[name].bandwidth(7) * 1e-30
    compare(name, Shape((1,), 20, 30, 7, 4), lambda part: part * 1e-30, bandwidth=tiny)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", NAMES)
def test_inputs_of_16_bits_are_read_and_written_as_they_are(name, dtype):
    shape = Shape((1, 2), 50, 65, 12, 9)
    inputs, gradient = draw(shape, dtype), cotangent(shape, dtype)

    def run(dtype, backend):
        points = leaves(*(part.to(dtype) for part in inputs))
        output = sortattn.kernel_attention(*points, name, backend=backend)
        return output, *torch.autograd.grad(output, points, gradient.to(dtype))

    for actual, wanted in zip(run(dtype, "tiled"), run(torch.float64, "reference"), strict=True):
        assert actual.dtype == dtype
        # sums are float32: nothing but the result is rounded
        assert_close(actual, wanted, GRADIENT[dtype] / 3)


@pytest.mark.parametrize("name", NAMES)
def test_a_leading_dimension_of_one_may_lie_anywhere(name):
    # contiguous to torch, which does not ask where a single head lies: it says as far apart as a row
    case, gradient = CASES[name], cotangent(Shape((2, 3, 1), 5, 5, 4, 4), torch.float32)
    drawn = draw(Shape((2, 3), 5, 5, 4, 4), torch.float32)
    inputs = [part.view(2, 3, 5, 1, 4).transpose(2, 3) for part in drawn]
    assert inputs[0].is_contiguous()
    assert inputs[0].stride(2) == 4
    check(define(case, inputs, gradient), case, inputs, gradient, backend="tiled")


@pytest.mark.parametrize("name", NAMES)
def test_sums_that_are_not_divided_have_gradients(name):
    shape = Shape((2,), 30, 40, 6, 5)
    inputs, gradient = draw(shape, torch.float32), cotangent(shape, torch.float32)
    found = []
    for dtype, backend in ((torch.float32, "tiled"), (torch.float64, "reference")):
        points = leaves(*(part.to(dtype) for part in inputs))
        output = sortattn.kernel_sum(*points, name, backend=backend)
        found.append((output, *torch.autograd.grad(output, points, gradient.to(dtype))))
    for actual, wanted in zip(*found, strict=True):
        assert_close(actual, wanted, GRADIENT[torch.float32])


def test_heads_between_the_rows_are_read_where_they_lie():
    shape = Shape((2, 3), 20, 30, 8, 8)
    inputs, gradient = draw(shape, torch.float32), cotangent(shape, torch.float32)

    def run(change):
        points = leaves(*map(change, inputs))
        output = sortattn.kernel_attention(*points, "add_laplace", backend="tiled")
        return output, *torch.autograd.grad(output, points, change(gradient))

    laid = run(lambda part: part.transpose(1, 2).contiguous().transpose(1, 2))
    for one, other in zip(laid, run(lambda part: part), strict=True):
        assert torch.equal(one, other)
        # so that the next layer finds its rows side by side
        assert one.transpose(1, 2).is_contiguous()
    # parts of one tensor, and rows that are not contiguous
    apart = run(lambda part: torch.stack([part, part], -2).flatten(-2)[..., : part.shape[-1]])
    scattered = run(lambda part: part.mT.contiguous().mT)
    for one, other, third in zip(laid, apart, scattered, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("name", ["add_laplace", "add_bump"])
def test_a_bad_number_spoils_its_head_and_no_other(name, which, bad):
    # so many that several blocks have queries of the head
    inputs = draw(Shape((2,), 90, 80, 5, 4), torch.float32)
    inputs[which][1, -1, 2] = bad
    points = leaves(*inputs)
    output = sortattn.kernel_attention(*points, name, backend="tiled")
    assert output[1].isnan().all()
    assert output[0].isfinite().all()
    for part in torch.autograd.grad(output, points, torch.ones_like(output)):
        assert part[1].isnan().all()
        assert part[0].isfinite().all()


@pytest.mark.parametrize("name", ["add_laplace", "add_bump"])
def test_rows_of_hardly_any_weight_keep_their_digits(name):
    query, key, value = draw(Shape((1,), 50, 60, 40, 8), torch.float32)
    query[:, 3] = 12.0
    query[:, 3, 0] = key[:, 7, 0] + 1.0
    actual = sortattn.kernel_attention(query, key, value, name, backend="tiled")
    exact = (part.double() for part in (query, key, value))
    wanted = sortattn.kernel_attention(*exact, name, backend="reference")
    assert_close(actual[:, 3], wanted[:, 3], FORWARD[torch.float32])


@pytest.mark.parametrize("side", [1.0, -1.0], ids=["positive", "negative"])
def test_a_query_that_shares_next_to_nothing_with_its_keys_keeps_its_digits(side):
    query, key, value = draw(Shape((1,), 4, 90, 3, 8), torch.float32)
    query, key = side * query.abs(), -side * key.abs()
    key[0, 5] = side * 0.01
    actual = sortattn.kernel_attention(query, key, value, "add_riesz", backend="tiled")
    wanted = sortattn.kernel_attention(query.double(), key.double(), value.double(), "add_riesz", backend="reference")
    assert_close(actual, wanted, FORWARD[torch.float32])


def test_rounding_does_not_choose_the_side_of_a_step():
    check_sides_of_steps()


def test_autocast_takes_the_quick_way():
    inputs = draw(Shape((2, 2), 5, 7, 3, 4), torch.float32)
    points = leaves(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        output = sortattn.kernel_attention(*points, "add_bump", backend="tiled")
    narrow = leaves(*(part.bfloat16() for part in inputs))
    wanted = sortattn.kernel_attention(*narrow, "add_bump", backend="tiled")
    assert torch.equal(output, wanted)
    assert output.dtype == torch.bfloat16
    for one, other in zip(
        torch.autograd.grad(output.sum(), points), torch.autograd.grad(wanted.sum(), narrow), strict=True
    ):
        assert one.dtype == torch.float32
        assert torch.equal(one, other.float())


@given(st.integers(1, 500), st.integers(1, 96), st.integers(1, 96), st.sampled_from(NAMES), st.sampled_from([*TYPES]))
def test_every_block_has_its_share_of_rows_and_of_shared_memory(problems, rows, columns, name, dtype):
    plan, shape = short._plan(problems, rows, columns, name, dtype), short.shape_of(name, dtype)
    for part, own, others in ((plan.query_part, rows, columns), (plan.key_part, columns, rows)):
        assert 0 < part <= own
        down, across = -(-part // shape.own), -(-others // shape.others)
        assert down * across <= shape.threads
        assert part <= plan.rows * shape.groups
        # what lies beside each other, in numbers: other points, and then scores and vectors, or own points
        width = short._stride(name)
        assert across * shape.others * width <= plan.scores
        assert plan.scores + max(others * plan.rows * shape.groups, down * shape.own * 68) <= plan.vectors
        assert 4 * (plan.vectors + across * shape.others * 68) <= plan.size
        assert 4 * (plan.scores + down * shape.own * width) <= plan.size
