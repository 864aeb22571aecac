"""No matrix of queries times keys is ever in memory, forward and backward; the definition has one, and is seen to."""

import pytest
import torch

import sortattn
from sortattn.bench.memory import CLEAR, peak_rise

from .cases import CASES, Shape, draw, leaves

pytestmark = [
    pytest.mark.usefixtures("cpu_only"),
    pytest.mark.skipif(not CLEAR.exists(), reason="only Linux can reset the high-water mark"),
]
LENGTH = 4096
MATRIX = 4 * LENGTH**2
CALLS = {
    "more_dims": (Shape((), LENGTH, LENGTH, 2, 1), {}),
    "more_channels": (Shape((), LENGTH, LENGTH, 1, 9), {}),
    "causal_masked": (Shape((), LENGTH, LENGTH, 1, 1), {"is_causal": True, "key_mask": torch.arange(LENGTH) % 3 > 0}),
}


def peak(case, backend, shape, options) -> int:
    def run(points, options):
        sortattn.kernel_attention(*points, case.kernel, backend=backend, **options).sum().backward()

    points = leaves(*draw(shape, torch.float32))
    # whatever is loaded by a first call is not counted
    few = {name: option[:64] if isinstance(option, torch.Tensor) else option for name, option in options.items()}
    run([part[:64].detach().requires_grad_() for part in points], few)
    return peak_rise(lambda: run(points, options))


# torch's own attention, which has a way for every shape; and one of each kind that is summed by blocks
PAIRS = [(name, call) for name in ("softmax", "gauss") for call in CALLS]
PAIRS += [("laplace", "causal_masked"), ("add_bump", "more_channels"), ("tri", "causal_masked")]


@pytest.mark.parametrize(("name", "call"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_tiled_calls_never_hold_the_matrix(name, call):
    assert peak(CASES[name], "tiled", *CALLS[call]) < MATRIX / 2


def test_the_definition_holds_the_matrix():
    shape, options = CALLS["more_dims"]
    assert peak(CASES["add_laplace"], "reference", shape, options) > MATRIX
