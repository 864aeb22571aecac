"""The capacity column of Table 1 against the constructions and bounds behind it."""

from dataclasses import replace

import pytest
import torch

from sortattn.cli import main
from sortattn.experiments.capacity import CONSTRUCTIONS, bounds, check, loss, loss_bound, statement
from sortattn.kernels import KERNELS

every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())


@every_kernel
@pytest.mark.parametrize("head_dim", [1, 2, 5])
def test_as_many_tokens_are_separated_as_the_column_says(kernel, head_dim):
    low, high = bounds(kernel, head_dim)
    assert low <= high
    # an infinite capacity is checked far beyond any finite one of the table; nothing is claimed for one token
    count = int(min(low, 100))
    if count > 1:
        found = check(kernel, count, head_dim)
        assert found.limit == 0
        assert found.good
        assert found.reached <= 1e-6


@pytest.mark.parametrize("name", ["tri", "relu", "elu"])
@pytest.mark.parametrize("head_dim", [1, 3, 8])
def test_the_bounds_of_these_feature_maps_are_attained_below_at_and_above_the_capacity(name, head_dim):
    kernel = KERNELS[name]
    _, high = bounds(kernel, head_dim)
    assert high == kernel.dimension * head_dim
    for count in (max(1, int(high) - 1), int(high), int(high) + 1, 3 * int(high)):
        found = check(kernel, count, head_dim)
        assert found.reached == pytest.approx(loss_bound(kernel, count, head_dim), abs=1e-6)


@pytest.mark.parametrize("name", ["tri", "relu", "elu", "dpfp"])
def test_nothing_falls_below_the_bound_of_a_finite_feature_map(name):
    kernel, head_dim = KERNELS[name], 4
    generator = torch.Generator().manual_seed(0)
    for count in (5, 9, 25, 40):
        for scale in (0.3, 3.0, 30.0):
            query, key = (scale * torch.randn(count, head_dim, generator=generator) for _ in range(2))
            assert loss(kernel, query, key) >= loss_bound(kernel, count, head_dim) - 1e-9


@pytest.mark.parametrize("name", ["riesz", "add_riesz"])
def test_on_a_line_the_riesz_kernel_separates_two_tokens_and_no_more(name):
    kernel = KERNELS[name]
    assert bounds(kernel, 1) == (2, 2)
    ends = torch.tensor([[1e4], [-1e4]])
    assert loss(kernel, ends, ends) < 1e-6
    generator = torch.Generator().manual_seed(0)
    for count in (3, 4, 7):
        for _ in range(20):
            query, key = (10 * torch.randn(count, 1, generator=generator) for _ in range(2))
            assert loss(kernel, query, key) >= loss_bound(kernel, count, 1) == (count - 2) / 2


def test_dpfp_separates_two_tokens_a_dimension_and_its_squares_forbid_more():
    # the kernel is at most three times that of its 2D squares, and at least that, so its capacity is theirs: 2D
    kernel, head_dim = KERNELS["dpfp"], 4
    assert check(kernel, 2 * head_dim, head_dim).reached == 0
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(50, head_dim, generator=generator).double() for _ in range(2))
    squares = [torch.cat([part.relu(), (-part).relu()], -1).square() for part in (query, key)]
    gram, least = kernel.gram(query, key, 1.0), squares[0] @ squares[1].T
    assert (gram >= least - 1e-12).all()
    assert (gram <= 3 * least + 1e-12).all()


def test_a_construction_that_does_not_separate_is_noticed(monkeypatch, capsys):
    together = replace(CONSTRUCTIONS["elu"], points=lambda count, head_dim, scale: torch.ones(count, head_dim))
    monkeypatch.setitem(CONSTRUCTIONS, "elu", together)
    assert main(["capacity", "--kernel", "elu", "--head-dim", "3", "-n", "3"]) == 1
    printed = capsys.readouterr().out
    assert "NO" in printed
    assert "elu, N = 3: expected 0" in printed


def test_the_command_prints_statements_bounds_and_losses(capsys):
    assert main(["capacity", "--head-dim", "4", "--kernel", "add_bump", "relu", "riesz", "-n", "6"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["add_bump", "6", "0", "0", "1", "yes"] in lines
    assert ["relu", "6", "2", "2", "1", "yes"] in lines
    assert ["riesz", "6", "0", "no", "points"] in lines


def test_on_a_line_riesz_has_the_papers_points_and_softmax_none(capsys):
    assert main(["capacity", "--head-dim", "1", "--kernel", "softmax", "riesz", "-n", "2", "3"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "softmax no statement none known" in lines
    assert "riesz 2 q = k = +-r Proposition 8" in lines
    assert "riesz 2 0 9.98003e-07 1 yes" in lines
    # every further token costs a half
    assert "riesz 3 0.5 no points" in lines


def test_statements_are_words():
    said = {name: statement(kernel, 64) for name, kernel in KERNELS.items()}
    assert said["softmax"] == said["add_bump"] == "infinite"
    assert said["add_riesz"] == "at least 128"
    assert (said["tri"], said["relu"], said["dpfp"]) == ("at most 128", "at most 64", "at most 384")
    assert statement(KERNELS["softmax"], 1) == said["riesz"] == "no statement"


def test_an_unknown_kernel_is_refused(capsys):
    assert main(["capacity", "--kernel", "sofmax"]) == 2
    assert "unknown kernel 'sofmax', expected one of softmax" in capsys.readouterr().err
