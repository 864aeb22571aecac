"""The CUDA sources compile, for every variant that is ever launched; no device is needed for that."""

import os
from concurrent.futures import ThreadPoolExecutor

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


def compile_all(kernels, architectures) -> None:
    """Compile side by side: NVRTC does not hold the interpreter's lock."""
    jobs = [(kernel, architecture) for kernel in kernels for architecture in architectures]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        codes = pool.map(lambda job: cubin(job[0].source, job[0].defines, job[1]), jobs)
        for (kernel, _), code in zip(jobs, codes, strict=True):
            assert kernel.entry.encode() in code


def passes(name, dtype, wide, coarse=False):
    # one entry stands for all of its pass: they are compiled together
    entries = ("forward", "backward_query")
    if name in cuda.STEPS and dtype == torch.float32 and not wide:
        entries = ("forward", "forward_values", "slopes")
    return [cuda.kernel_of(entry, name, dtype, wide, coarse) for entry in entries]


@pytest.mark.parametrize("name", cuda.NAMES)
def test_tiled_kernels_compile(name):
    compile_all(passes(name, torch.float32, False), ARCHITECTURES)


@pytest.mark.slow
@pytest.mark.parametrize("name", cuda.STEPS)
def test_tiled_kernels_for_inputs_of_16_bits_compile(name):
    compile_all(passes(name, torch.float32, False, coarse=True), ["sm_90"])


# a table, a distance and a plain sum: what differs with the type and the width is shared by the others
FEW = ("spline", "riesz", "add_riesz")


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_tiled_kernels_for_float64_and_wide_heads_compile(name):
    compile_all([*passes(name, torch.float32, True), *passes(name, torch.float64, False)], ["sm_90"])


def test_the_look_through_the_inputs_compiles():
    compile_all([cuda.survey_of(dtype) for dtype in cuda.ROWS], ARCHITECTURES)


def test_all_entries_of_a_pass_are_compiled_together():
    kernel = cuda.kernel_of("backward_query", "spline", torch.float32, False)
    code = cubin(kernel.source, kernel.defines, "sm_90")
    for entry in ("backward_query", "backward_key", "backward_table", "backward_quotient"):
        assert cuda.kernel_of(entry, "spline", torch.float32, False).defines == kernel.defines
        assert entry.encode() in code
