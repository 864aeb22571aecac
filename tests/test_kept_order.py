"""Argsorts, which only the backward pass needs."""

import pytest
import torch

import sortattn
from sortattn.ops.sorted import api

pytestmark = pytest.mark.usefixtures("cpu_only")

# the last two are sorted apart from the walk
CASES = {
    "fewer_columns_than_are_sorted_together": (3, 16, torch.float32),
    "more_columns": (37, 64, torch.float32),
    "several_blocks_of_channels": (20, 80, torch.float32),
    "float64": (20, 16, torch.float64),
}


def arguments(dims: int, channels: int, dtype: torch.dtype, requires_grad: bool = False):
    points = [
        torch.randn(3, count, n, dtype=dtype).requires_grad_(requires_grad)
        for count, n in ((90, dims), (101, dims), (101, channels))
    ]
    terms = sortattn.KERNELS["add_laplace"].terms()
    middle = (None, None, terms.nodes, terms.below, terms.above)
    return points, (*middle, 1.5, terms.rate, terms.compact, terms.folded, terms.constant)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_sums_are_the_same_whether_argsorts_are_kept_or_not(case):
    points, constants = arguments(*case)
    expected = api._forward(*points, *constants)
    result = api._forward(*points, *constants, kept=False)
    assert all(map(torch.equal, result[:2], expected[:2]))
    assert [part.shape for part in expected[2:]] == [(3, case[0], 90), (3, case[0], 101)]
    assert [part.shape for part in result[2:]] == [(3, case[0], 0)] * 2


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_backward_pass_that_finds_no_argsorts_sorts(case):
    points, constants = arguments(*case, requires_grad=True)
    grad = torch.randn(3, 90, case[1], dtype=case[2])
    expected, result = (
        torch.autograd.grad(api.sided_sum(*points, *constants, kept)[0], points, grad) for kept in (True, False)
    )
    assert all(map(torch.equal, result, expected))


def test_operator_without_argsorts_passes_opcheck():
    points, constants = arguments(5, 16, torch.float32, requires_grad=True)
    torch.library.opcheck(torch.ops.sortattn.sided_sum.default, (*points, *constants, False))


def test_calls_without_gradients_keep_no_argsorts(monkeypatch):
    kept = []
    forward = api.walker("cpu").forward
    monkeypatch.setattr(api.walker("cpu"), "forward", lambda *inputs: kept.append(inputs[-1]) or forward(*inputs))
    query, key, value = torch.randn(3, 1, 30, 4).unbind()
    sortattn.kernel_attention(query, key, value, "add_laplace", backend="sorted")
    sortattn.kernel_attention(query.requires_grad_(), key, value, "add_laplace", backend="sorted").sum().backward()
    assert kept == [False, True]
