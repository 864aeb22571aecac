"""The compiled loops over pairs on the CPU: where they change their way, and how they are cut into tasks."""

import pytest
import torch

import sortattn
from sortattn.ops.tiled import blocks, cpu, cpu_pairs
from sortattn.ops.tiled.inputs import Inputs

from .cases import CASES, Shape, assert_close, cotangent, draw, leaves
from .definition import FORWARD, GRADIENT, check, define

pytestmark = pytest.mark.usefixtures("cpu_only")
NAMES = ("add_riesz", "add_laplace", "add_bump", "gauss", "laplace", "riesz")
every_kernel = pytest.mark.parametrize("name", NAMES)
# with two made by the user
every_kind = pytest.mark.parametrize("name", [*NAMES, "spline_jumps", "matern52"])
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=lambda dtype: str(dtype)[6:])


def inputs(name: str, *points, **changes) -> Inputs:
    call = Inputs(*points, None, None, None, 1.5, name, False, 1, True, False)
    return call._replace(**changes)


def test_kernels_have_the_numbers_that_the_loops_know():
    assert {name: getattr(cpu_pairs, name.upper()) for name in cpu._NUMBERS} == cpu._NUMBERS
    assert set(NAMES) < set(cpu._NUMBERS)
    assert cpu._BLOCK == cpu_pairs.KEYS


@every_kind
def test_they_are_taken(name, monkeypatch):
    monkeypatch.setattr(blocks, "forward", lambda _: pytest.fail("torch has summed"))
    monkeypatch.setattr(blocks, "backward", lambda *_: pytest.fail("torch has differentiated"))
    points = leaves(*draw(Shape((2,), 9, 8, 3, 2), torch.float32))
    sortattn.kernel_attention(*points, CASES[name].kernel, backend="tiled").sum().backward()


# tiles of 4 queries, blocks of 64 keys, vectors of 16, 32 and 64 lanes, tasks of 512 queries and of 256 keys
SHAPES = [
    Shape((1,), 2, 1, 1, 1),
    Shape((3,), 5, 63, 15, 8),
    Shape((3,), 6, 64, 16, 16),
    Shape((3,), 7, 65, 17, 17),
    Shape((1,), 513, 129, 3, 33),
    Shape((1,), 30, 1100, 2, 65),
    Shape((40,), 20, 20, 2, 3),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@dtypes
@every_kind
def test_output_and_gradients_match_the_definition(name, dtype, shape):
    points, gradient = draw(shape, dtype), cotangent(shape, dtype)
    options = {"bandwidth": torch.tensor(2.5, dtype=dtype)}
    expected = define(CASES[name], points, gradient, **options)
    check(expected, CASES[name], points, gradient, backend="tiled", **options)


@pytest.mark.parametrize("spread", [60.0, 120.0, 1e4], ids=lambda spread: f"spread{spread:g}")
@dtypes
def test_exponentials_of_points_far_apart(spread, dtype):
    # beside one point in a thousand that is so far away, in units of the bandwidth
    shape = Shape((2,), 70, 90, 3, 4)
    query, key, value = draw(shape, dtype)
    key[0, 7, 1] = spread / 2
    query[1, 5, 2] = -spread / 2
    gradient, points = cotangent(shape, dtype), (query, key, value)
    options = {"bandwidth": 0.5}
    expected = define(CASES["add_laplace"], points, gradient, **options)
    check(expected, CASES["add_laplace"], points, gradient, backend="tiled", **options)


def test_a_key_far_away_changes_the_way_and_nothing_else():
    query, key, value = draw(Shape((2,), 70, 90, 16, 4), torch.float32)
    weight = torch.ones(2, 90)
    # which nobody sees
    weight[:, -1] = 0.0
    products, *_ = cpu.forward(inputs("add_laplace", query, key, value, weight=weight))
    # so far away that products would overflow
    key[:, -1, 3] = 1e6
    exponentials, *_ = cpu.forward(inputs("add_laplace", query, key, value, weight=weight))
    assert not torch.equal(products, exponentials)
    assert_close(exponentials, products.double(), FORWARD[torch.float32])


def test_sums_of_many_queries_keep_their_digits():
    points = leaves(*draw(Shape((1,), 60_000, 64, 4, 4), torch.float32))
    # which do not cancel
    gradient = torch.rand(1, 60_000, 4, generator=torch.Generator().manual_seed(5))
    exact = leaves(*(part.double() for part in points))
    found, wanted = (
        torch.autograd.grad(
            sortattn.kernel_attention(*given, "add_riesz", backend="tiled"), given, gradient.to(given[0])
        )
        for given in (points, exact)
    )
    for name, one, other in zip(("query", "key", "value"), found, wanted, strict=True):
        assert_close(one, other, 2e-6, name=name)


@every_kind
def test_a_head_that_holds_what_is_no_number_has_no_gradients_and_others_have(name):
    query, key, value = draw(Shape((3,), 9, 70, 5, 4), torch.float32)
    for given in (query, key, value):
        given[1, 3, 0] = torch.nan
        points = leaves(query, key, value)
        gradients = torch.autograd.grad(
            sortattn.kernel_attention(*points, CASES[name].kernel, backend="tiled").sum(), points
        )
        given[1, 3, 0] = 1.0
        assert all(part[1].isnan().all() and part[::2].isfinite().all() for part in gradients)


@pytest.mark.parametrize("name", ["add_laplace", "add_bump", "laplace"])
def test_a_shift_by_100_costs_no_digits(name):
    query, key, value = draw(Shape((2,), 100, 130, 16, 8), torch.float32)
    points = query + 100, key + 100, value
    exact = sortattn.kernel_attention(*(part.double() for part in points), name, backend="reference")
    assert_close(sortattn.kernel_attention(*points, name, backend="tiled"), exact, FORWARD[torch.float32])


def test_keys_of_a_few_heads_are_several_tasks_and_of_many_one():
    assert len(cpu._ranges(1, 1100)) == 5
    assert len(cpu._ranges(8, 1100)) == 1
    assert cpu._ranges(1, 0) == [(0, 0)]
    for problems, columns in ((1, 1), (1, 65), (2, 1000), (3, 513)):
        ranges = cpu._ranges(problems, columns)
        assert [start for start, _ in ranges[1:]] == [stop for _, stop in ranges[:-1]]
        assert (ranges[0][0], ranges[-1][1]) == (0, columns)
        # two tasks never share a block
        assert all(start % cpu_pairs.KEYS == 0 for start, _ in ranges)


@every_kernel
def test_ties_and_the_edge_of_a_bump_have_the_mean_of_both_slopes(name):
    query, key, value = torch.zeros(1, 3, 2), torch.zeros(1, 4, 2), torch.arange(4.0).reshape(1, 4, 1)
    # as far as the bump reaches
    key[0, 1], key[0, 2], key[0, 3] = 1.5, -1.5, torch.tensor([1.5, 0.0])
    gradient = torch.tensor([1.0, -2.0, 0.5]).reshape(1, 3, 1)
    points = leaves(query, key, value)
    exact = leaves(*(part.double() for part in points))
    found, wanted = (
        torch.autograd.grad(
            sortattn.kernel_attention(*given, name, bandwidth=1.5, backend=backend), given, gradient.to(given[0])
        )
        for given, backend in ((points, "tiled"), (exact, "reference"))
    )
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, GRADIENT[torch.float32], scale=1.0)


@pytest.mark.parametrize("far", [1e2, 1e4, 1e6], ids=lambda far: f"far{far:g}")
def test_gauss_keeps_its_digits_where_keys_are_far_from_their_mean(far):
    # as inner products scores would lose digits by the square of these distances
    query, key, value = draw(Shape((2,), 100, 256, 8, 4), torch.float32)
    key[0, 3] = far
    side = torch.arange(256) % 2 == 0
    key[1, side], query[1, :50] = key[1, side] + far, query[1, :50] + far
    wanted = sortattn.kernel_attention(query.double(), key.double(), value.double(), "gauss", backend="reference")
    assert_close(sortattn.kernel_attention(query, key, value, "gauss"), wanted, FORWARD[torch.float32])
