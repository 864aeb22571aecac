"""The quotient that the sorted backend takes on a GPU, against `normalise`, which all others take."""

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


def test_nothing_to_divide(device):
    problem, sums, total = inputs(device, rows=0)
    found = unfit(problem.query, problem.key, problem.value, 1)
    assert quotient(sums, total, found, 0.0).shape == (6, 0, 6)


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
    code = cubin(_SOURCE, (("REAL", real),), architecture)
    for entry in (b"look", b"divide", b"divide_backward"):
        assert entry in code
