"""The compiled argsort of the sorted backend."""

import pytest
import torch

from sortattn.ops.sorted import cpu

pytestmark = pytest.mark.usefixtures("cpu_only")

LINES = {
    "normal": lambda points: points,
    "offset": lambda points: points + 100.0,
    "ties": lambda points: points.round(decimals=1),
    "one_value": lambda points: torch.ones_like(points),
    "outlier": lambda points: torch.cat([points[:, :-1], torch.full_like(points[:, :1], 1e30)], 1),
    "crowds": lambda points: points.sign() + 1e-7 * points,
    "infinite_range": lambda points: points.sign() * 3e38,
    "subnormal_range": lambda points: points * 1e-44,
}


@pytest.mark.parametrize("count", [1, 2, 47, 49, 300, 5000])
@pytest.mark.parametrize("line", LINES)
def test_argsorts_are_stable_whatever_the_points(line, count):
    points = LINES[line](torch.randn(2, count, 3))
    expected = points.transpose(1, 2).sort(dim=-1, stable=True).indices
    assert torch.equal(cpu.sort(points), expected.int())
