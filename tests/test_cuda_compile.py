"""The CUDA sources compile, for every variant that is ever launched; no device is needed for that."""

import pytest
import torch

from sortattn.ops.tiled import cuda_kernels, short

from .nvrtc import ARCHITECTURES, machine_code

pytest.importorskip("cuda.core")


def compile_all(kernels, architecture, **options) -> None:
    for kernel in kernels:
        code = machine_code(kernel.source, kernel.defines, architecture, entry=kernel.entry, **options)
        assert kernel.entry.encode() in code


def passes(name, dtype, wide, coarse=False):
    entries = ("forward", "backward_quotient", "backward_query", "backward_key", "backward_table")
    if name in cuda_kernels.STEPS and dtype == torch.float32 and not wide:
        entries = ("forward", "prepare", "slopes", "forward_values")
    return [cuda_kernels.kernel_of(entry, name, dtype, wide, coarse) for entry in entries]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", cuda_kernels.NAMES)
def test_tiled_kernels_compile(name, architecture):
    compile_all(passes(name, torch.float32, False), architecture)


# a table, a distance and a plain sum
@pytest.mark.parametrize("name", ["spline", "riesz", "add_riesz"])
def test_tiled_kernels_compile_as_for_a_user(name):
    compile_all(passes(name, torch.float32, False), "sm_90", optimised=True)


@pytest.mark.parametrize("name", ["spline", "polynomial_exponential"])
def test_tiled_kernels_with_the_numbers_of_a_user_in_registers_compile(name):
    entries = ("forward", "backward_query", "backward_key", "backward_table")
    for dtype in (torch.float32, torch.float64):
        compile_all([cuda_kernels.kernel_of(entry, name, dtype, False, count=3) for entry in entries], "sm_90")


@pytest.mark.parametrize("name", cuda_kernels.STEPS)
def test_tiled_kernels_for_inputs_of_16_bits_compile(name):
    compile_all(passes(name, torch.float32, False, coarse=True), "sm_90")


@pytest.mark.parametrize("name", cuda_kernels.STEPS)
def test_tiled_kernels_for_few_blocks_compile(name):
    entries = ("forward", "forward_values")
    compile_all([cuda_kernels.kernel_of(entry, name, torch.float32, False, groups=2) for entry in entries], "sm_90")


@pytest.mark.parametrize("name", ["add_riesz", "add_bump"])
def test_tiled_kernels_for_blocks_of_fewer_rows_compile(name):
    entries = ("forward", "forward_values")
    compile_all([cuda_kernels.kernel_of(entry, name, torch.float32, False, rows=32) for entry in entries], "sm_90")


@pytest.mark.parametrize("architecture", ["sm_90", "sm_120"])
@pytest.mark.parametrize("name", cuda_kernels.STEPS)
def test_a_forward_kernel_that_begins_before_the_survey_ends_compiles(name, architecture):
    forward = cuda_kernels.kernel_of("forward", name, torch.float32, False, taus=False, early=True)
    compile_all([forward, cuda_kernels.survey_of(torch.float32, early=True)], architecture)


@pytest.mark.parametrize("architecture", ["sm_90", "sm_120"])
@pytest.mark.parametrize("name", cuda_kernels.STREAMED)
def test_a_forward_kernel_that_walks_over_chunks_compiles(name, architecture):
    for coarse in (False, True):
        forward = cuda_kernels.kernel_of("forward", name, torch.float32, False, coarse, early=True, stream=True)
        compile_all([forward, cuda_kernels.chunks_of(name, early=True)], architecture)


def test_the_forward_kernel_for_gpus_with_little_shared_memory_compiles():
    assert cuda_kernels.shared_of("forward", "add_laplace", torch.float32, False, roomy=False) <= 99 << 10
    compile_all([cuda_kernels.kernel_of("forward", "add_laplace", torch.float32, False, roomy=False)], "sm_120")


@pytest.mark.parametrize("name", cuda_kernels.STEPS[1:])
def test_gradients_for_gpus_with_little_shared_memory_compile(name):
    entries = ("backward_query", "backward_key")
    compile_all([cuda_kernels.kernel_of(entry, name, torch.float32, False) for entry in entries], "sm_120")


@pytest.mark.parametrize("name", cuda_kernels.NAMES)
def test_tiled_kernels_for_float64_and_wide_heads_compile(name):
    compile_all([*passes(name, torch.float32, True), *passes(name, torch.float64, False)], "sm_90")


def short_passes(name, dtype, rows):
    return [short.kernel_of(entry, name, dtype, rows) for entry in ("short_forward", "short_backward")]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", short.NAMES)
def test_kernels_for_short_sequences_compile(name, architecture):
    for dtype in short.TYPES:
        # few rows and many take turns, as that makes no other code
        rows = short.shape_of(name, dtype).rows[dtype == torch.bfloat16]
        compile_all(short_passes(name, dtype, rows), architecture)


def test_kernels_for_short_sequences_compile_as_for_a_user():
    compile_all(short_passes("add_laplace", torch.bfloat16, 6), "sm_90", optimised=True)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_look_through_the_inputs_compiles(architecture):
    compile_all([cuda_kernels.survey_of(dtype) for dtype in cuda_kernels.ROWS], architecture)
