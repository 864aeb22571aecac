"""The CUDA sources compile, for every variant that is ever launched; no device is needed for that."""

import pytest
import torch

from sortattn.cuda.compile import cubin
from sortattn.ops.tiled import cuda

pytest.importorskip("cuda.core")

ARCHITECTURES = ("sm_80", "sm_90", "sm_120")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    """Nothing compiled before counts."""
    monkeypatch.setenv("SORTATTN_CACHE", str(tmp_path))


def variants(dtype, wide, kernels=cuda.NAMES):
    # one entry stands for all of its pass: they are compiled together
    return [
        pytest.param(cuda.kernel_of(entry, name, dtype, wide), id=f"{name}-{str(dtype)[6:]}-{entry}{'-wide' * wide}")
        for name in kernels
        for entry in ("forward", "backward_query")
    ]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", variants(torch.float32, False))
def test_tiled_kernels_compile(kernel, architecture):
    code = cubin(kernel.source, kernel.defines, architecture)
    assert kernel.entry.encode() in code


# a table, a distance and a plain sum: what differs with the type and the width is shared by the others
FEW = ("spline", "riesz", "add_riesz")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [*variants(torch.float32, True, FEW), *variants(torch.float64, False, FEW)],
)
def test_tiled_kernels_for_float64_and_wide_heads_compile(kernel):
    assert kernel.entry.encode() in cubin(kernel.source, kernel.defines, "sm_90")


def test_all_entries_of_a_pass_are_compiled_together():
    kernel = cuda.kernel_of("backward_query", "spline", torch.float32, False)
    code = cubin(kernel.source, kernel.defines, "sm_90")
    for entry in ("backward_query", "backward_key", "backward_table"):
        assert cuda.kernel_of(entry, "spline", torch.float32, False).defines == kernel.defines
        assert entry.encode() in code
