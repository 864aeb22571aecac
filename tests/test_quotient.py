"""The quotient that the sorted backend takes, against `normalise`, which others take."""

import pytest
import torch

from sortattn.cuda.compile import cubin
from sortattn.kernels import resolve
from sortattn.normalise import normalise
from sortattn.ops.sorted.quotient import _SOURCE, quotient, quotient_backward, quotient_directly, unfit
from sortattn.validation import make_problem


def inputs(device, group=1, rows=5, spoil=None):
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(3, heads, n, c, dtype=torch.float64, device=device)
        for heads, n, c in ((2 * group, rows, 4), (2, 7, 4), (2, 7, 6))
    )
    if spoil is not None:
        {"query": query, "key": key, "value": value}[spoil][1, 1, 2, 3] = torch.inf if spoil == "key" else torch.nan
    problem = make_problem(query, key, value, resolve("add_bump"), enable_gqa=group > 1)
    sums = torch.randn(6, group * rows, 6, dtype=torch.float64, device=device, requires_grad=True)
    total = torch.randn(6, group * rows, dtype=torch.float64, device=device)
    # no weight at all, and less than any floor
    total[:1, :1], total[1:2, 1:2] = 0.0, 1e-310
    return problem, sums, total.requires_grad_()


@pytest.mark.parametrize("spoil", [None, "query", "key", "value"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("floor", [0.0, 0.5])
@pytest.mark.parametrize("call", [quotient, quotient_directly], ids=["operator", "directly"])
def test_it_is_what_normalise_computes(call, floor, group, spoil, device):
    problem, sums, total = inputs(device, group, spoil=spoil)
    grad = torch.randn(sums.shape, dtype=sums.dtype, device=device)
    expected = normalise(problem, sums, total, floor)
    gradients = torch.autograd.grad(expected, (sums, total), grad)
    found = unfit(problem.query, problem.key, problem.value, group)
    rows = call(sums, total, found, floor)
    torch.testing.assert_close(rows, expected, equal_nan=True)
    for got, wanted in zip(torch.autograd.grad(rows, (sums, total), grad), gradients, strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.parametrize("call", [quotient, quotient_directly], ids=["operator", "directly"])
def test_the_rows_may_be_changed_in_place(call, device):
    problem, sums, total = inputs(device)
    found = unfit(problem.query, problem.key, problem.value, 1)
    untouched = torch.autograd.grad(call(sums, total, found, 0.5).sum(), (sums, total))
    rows = call(sums, total, found, 0.5)
    rows += 1.0
    for got, wanted in zip(torch.autograd.grad(rows.sum(), (sums, total)), untouched, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_without_gradients_the_rows_take_the_place_of_the_sums(floor):
    problem, sums, total = inputs("cpu", group=3)
    found = unfit(problem.query, problem.key, problem.value, 3)
    expected = quotient(sums, total, found, floor).detach()
    with torch.no_grad():
        # sums of another layout than rows are left alone
        apart = sums.detach().mT.contiguous().mT
        torch.testing.assert_close(quotient_directly(apart, total, found, floor), expected, rtol=0, atol=0)
        assert torch.equal(apart, sums)
        rows = quotient_directly(sums.detach(), total, found, floor)
    assert rows.data_ptr() == sums.data_ptr()
    torch.testing.assert_close(rows, expected, rtol=0, atol=0)


def test_nothing_to_divide(device):
    problem, sums, total = inputs(device, rows=0)
    found = unfit(problem.query, problem.key, problem.value, 1)
    assert quotient(sums, total, found, 0.0).shape == (6, 0, 6)
    none = [part[:0] for part in (problem.query, problem.key, problem.value, sums, total)]
    found = unfit(*none[:3], 1)
    assert quotient(*none[3:], found, 0.0).shape == (0, 0, 6)


@pytest.mark.parametrize("real", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_none_is_found_wherever_it_stands(number, real, device):
    largest = torch.finfo(real).max
    for place in (0, 1, 100, 200):
        numbers = torch.full((2, 67, 3), largest, dtype=real, device=device)
        assert unfit(numbers, -numbers, numbers, 1).tolist() == [[0], [0]]
        spoilt = numbers.clone()
        spoilt[1].view(-1)[place] = number
        assert unfit(numbers, spoilt, numbers, 1).ne(0).tolist() == [[False], [True]]


def test_the_operators_keep_the_rules_of_torch(device):
    problem, sums, total = inputs(device, group=3)
    points = problem.query, problem.key, problem.value
    torch.library.opcheck(unfit, (*points, 3))
    found = unfit(*points, 3)
    torch.library.opcheck(quotient, (sums, total, found, 0.5))
    torch.library.opcheck(quotient_backward, (torch.randn_like(sums), sums.detach(), total.detach(), found, 0.5))


def test_mapped_over_samples(device):
    problem, sums, total = inputs(device)
    found = unfit(problem.query, problem.key, problem.value, 1)
    several = torch.stack([sums.detach(), 2 * sums.detach()])
    mapped = torch.func.vmap(lambda part: quotient(part, total.detach(), found, 0.0))(several)
    torch.testing.assert_close(mapped, torch.stack([quotient(part, total, found, 0.0) for part in several]))
    queries = torch.stack([problem.query, problem.query.clone().fill_(torch.nan)])
    mapped = torch.func.vmap(lambda part: unfit(part, problem.key, problem.value, 1))(queries)
    assert mapped.flatten(1).ne(0).all(1).tolist() == [False, True]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("real", ["float", "double"])
def test_the_kernels_compile(real, architecture, monkeypatch, tmp_path):
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("SORTATTN_CACHE", str(tmp_path))
    for entry in ("look", "divide", "divide_backward"):
        assert entry.encode() in cubin(_SOURCE, entry, (("REAL", real),), architecture)
