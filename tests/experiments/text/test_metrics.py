import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from sortattn.experiments.text.data import Retrieval
from sortattn.experiments.text.evaluate import mean_ndcg
from sortattn.experiments.text.metrics import ndcg, ranks, spearman

stats = pytest.importorskip("scipy.stats")
# few distinct numbers, so that there are ties
numbers = st.lists(st.integers(-3, 3), min_size=3, max_size=30)


@given(numbers)
def test_ranks_are_those_of_scipy(values):
    assert ranks(torch.tensor(values)).tolist() == stats.rankdata(values).tolist()


@given(st.data(), numbers)
def test_spearman_is_that_of_scipy(data, one):
    other = data.draw(st.lists(st.floats(-1, 1), min_size=len(one), max_size=len(one)))
    actual = spearman(torch.tensor(one), torch.tensor(other, dtype=torch.float64))
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert math.isnan(actual)
    else:
        assert actual == pytest.approx(stats.spearmanr(one, other).statistic, abs=1e-12)


def test_ndcg_of_rankings_made_by_hand():
    assert ndcg(["a", "b", "c"], {"a": 1.0}) == 1.0
    assert ndcg(["b", "c", "a"], {"a": 1.0}) == pytest.approx(1 / math.log2(4))
    assert ndcg(["b", "c"], {"a": 1.0}) == 0.0
    # gains 1 and 2 in the wrong order
    expected = (1 + 2 / math.log2(3)) / (2 + 1 / math.log2(3))
    assert ndcg(["a", "b"], {"a": 1.0, "b": 2.0}) == pytest.approx(expected)
    # the eleventh does not count, neither found nor among the best
    many = {str(place): 1.0 for place in range(12)}
    assert ndcg([*map(str, range(12))], many) == pytest.approx(1.0)
    assert ndcg([*"bcdefghijk", "a"], {"a": 1.0}) == 0.0


def test_the_mean_over_the_queries():
    task = Retrieval("t", {"x": "", "y": ""}, {"a": "", "b": ""}, {"a": {"x": 1.0}, "b": {"x": 1.0}})
    scores = torch.tensor([[0.9, 0.1], [0.2, 0.7]])
    assert mean_ndcg(scores, task) == pytest.approx((1 + 1 / math.log2(3)) / 2)
