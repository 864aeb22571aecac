"""The walker's CUDA sources compile for every kind of kernel, and what the host makes of a kernel's terms."""

import pytest
import torch

import sortattn
from sortattn.cuda.compile import cubin
from sortattn.ops.sorted import cuda
from sortattn.ops.sorted.api import _derivative

from .cases import BOX, CASES, SIDED

pytest.importorskip("cuda.core")

ARCHITECTURES = ("sm_80", "sm_90", "sm_120")
KERNELS = {name: sortattn.KERNELS.get(name, CASES[name].kernel) for name in SIDED} | {"box": BOX.kernel}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """Nothing compiled before counts."""
    monkeypatch.setenv("SORTATTN_CACHE", str(tmp_path))


def defines_of(terms, products, dtype=torch.float32, width=64, ordered=False):
    return {cuda._defines(side, dtype, width, products, ordered) for side in cuda._sides(terms, mirrored=False)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_walks_of_values_and_of_gradients_compile(name, architecture):
    terms = KERNELS[name].terms()
    for defines in defines_of(terms, False) | defines_of(_derivative(terms), True):
        code = cubin(cuda._WALK, defines, architecture)
        for entry in (b"summarise", b"accumulate", b"walk"):
            assert entry in code


@pytest.mark.parametrize(
    ("dtype", "width", "ordered"),
    [(torch.float64, 64, False), (torch.float32, 32, False), (torch.float32, 128, False), (torch.float32, 64, True)],
    ids=["float64", "few_channels", "many_channels", "ordered"],
)
def test_other_types_and_widths_compile(dtype, width, ordered):
    terms = KERNELS["add_bump"].terms()
    for defines in defines_of(terms, False, dtype, width, ordered) | defines_of(terms, True, dtype, width, ordered):
        assert b"walk" in cubin(cuda._WALK, defines, "sm_90")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sorts_compile(architecture):
    for items in (1, 2, 4, 8, cuda._ITEMS):
        assert b"sort_runs" in cubin(cuda._SORT, (("ITEMS", items),), architecture)
    for real in ("float", "double"):
        assert b"arrange" in cubin(cuda._ARRANGE, (("REAL", real),), architecture)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("derivative", [False, True], ids=["values", "derivative"])
def test_the_sides_add_up_to_the_kernel_at_ties_too(name, derivative):
    kernel = KERNELS[name]
    terms = _derivative(kernel.terms()) if derivative else kernel.terms()
    # between the nodes, at them, and far outside
    places = [-7.0, -0.3, 0.0, 0.4, 9.0, *terms.nodes.tolist(), *(-terms.nodes).tolist()]

    def by_terms(u):
        total = 0.0
        for node, below, above in zip(terms.nodes.tolist(), terms.below.tolist(), terms.above.tolist(), strict=True):
            for side, z in ((below, u - node), (above, -u - node)):
                step = 0.5 if z == 0 else float(z > 0)
                value = sum(number * z**power for power, number in enumerate(side))
                total += step * value * torch.tensor(-terms.rate * z).exp().item() if step else 0.0
        return total

    def by_sides(u):
        total = 0.0
        for side in cuda._sides(terms, mirrored=False):
            nodes = side.numbers[: side.nodes]
            coefficients = torch.tensor(side.numbers[side.nodes : -1]).reshape(side.nodes, side.powers).tolist()
            for j, (node, row) in enumerate(zip(nodes, coefficients, strict=True)):
                z = (-u if side.mirrored else u) - node
                if z > 0 or (z == 0 and side.ties >> j & 1):
                    value = sum(number * z**power for power, number in enumerate(row))
                    total += value * torch.tensor(-terms.rate * z).exp().item()
        return total

    for u in places:
        assert by_sides(u) == pytest.approx(by_terms(u), rel=1e-6, abs=1e-6)


def test_a_kernel_with_more_nodes_than_there_is_room_for_is_refused():
    nodes = torch.arange(200, dtype=torch.float64)
    terms = sortattn.Spline(nodes, torch.ones(201, dtype=torch.float64)).terms()
    with pytest.raises(RuntimeError, match="no room for 200 nodes .* use backend='tiled'"):
        defines_of(terms, False)
