"""Spearman's correlation and nDCG@10."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def ranks(values: Tensor) -> Tensor:
    """Ranks from 1, the mean rank for ties.

    >>> ranks(torch.tensor([3.0, 1.0, 3.0]))
    tensor([2.5000, 1.0000, 2.5000], dtype=torch.float64)
    """
    _, group, sizes = values.unique(return_inverse=True, return_counts=True)
    last = sizes.cumsum(0).double()
    return (last - (sizes.double() - 1) / 2)[group]


def spearman(one: Tensor, other: Tensor) -> float:
    """The correlation of the ranks; NaN if one of them is constant.

    >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 9.0, 5.0])), 6)
    0.5
    """
    first, second = (ranks(values) - ranks(values).mean() for values in (one, other))
    return ((first @ second) / (first.norm() * second.norm())).item()


def ndcg(ranking: Sequence[str], gains: Mapping[str, float], depth: int = 10) -> float:
    """The discounted gain of the first `depth` documents over the best there could be, `sum_r gain_r / log2(r + 1)`.

    >>> ndcg(["b", "a"], {"a": 1.0})
    0.6309297535714575
    """
    discounts = 1 / torch.arange(2, depth + 2, dtype=torch.float64).log2()
    found = torch.tensor([gains.get(name, 0.0) for name in ranking[:depth]], dtype=torch.float64)
    best = torch.tensor(sorted(gains.values(), reverse=True)[:depth], dtype=torch.float64)
    ideal = (best * discounts[: len(best)]).sum()
    return ((found * discounts[: len(found)]).sum() / ideal).item() if ideal else 0.0
