"""The grid's Triton kernels, run by Triton's interpreter on the CPU beside float64.

It is switched on before Triton is imported, so a process of its own does the checks, see `interpreted`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .emulation.emulator import AVAILABLE

pytest.importorskip("triton")
ROOT = Path(__file__).parents[1]
# the last line of a check, see `interpreted`
END = "the end of a check\n"


@pytest.fixture(scope="module")
def interpret():
    """Does a check, by its name and its arguments."""
    command = [sys.executable, "-m", "tests.interpreted"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:

        def check(*what: str) -> None:
            print(*what, file=process.stdin, flush=True)
            said = []
            for line in process.stdout:
                if line == END:
                    break
                said.append(line)
            else:
                said.append(f"the interpreter has ended with {process.wait()}")
            assert not said, "".join(said)[-3000:]

        yield check


@pytest.mark.parametrize(
    ("name", "dtype", "dims"),
    [
        ("add_riesz", "float32", "3"),
        ("add_riesz", "bfloat16", "3"),
        ("add_riesz", "bfloat16", "17"),
        ("add_laplace", "float32", "2"),
        ("add_laplace", "float16", "3"),
        ("add_laplace", "float16", "17"),
        ("add_bump", "float32", "2"),
        ("add_bump", "float16", "17"),
        ("spline", "float32", "2"),
        ("matern", "float32", "2"),
    ],
)
def test_output_and_gradients_are_those_of_the_surrogate(name, dtype, dims, interpret):
    interpret("gradients", name, dtype, dims)


def test_codes_of_eight_bits_give_the_surrogate(interpret):
    # keys of so many nodes have them where values are bfloat16
    interpret("gradients", "add_riesz", "bfloat16", "16", "40")


HOPPER = [
    ("add_riesz", "float16", "32"),
    ("add_riesz", "bfloat16", "64"),
    ("add_bump", "bfloat16", "30"),
    ("add_laplace", "float16", "64"),
    ("add_laplace", "bfloat16", "60"),
    ("add_laplace", "float16", "32"),
]


@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
@pytest.mark.parametrize(("name", "dtype", "count"), HOPPER)
def test_steps_in_cuda_are_those_of_the_definition_and_of_triton(name, dtype, count, interpret):
    interpret("hopper_steps", name, dtype, "16", count)


@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
@pytest.mark.parametrize(("name", "dtype", "count"), HOPPER[::3])
def test_calls_with_steps_in_cuda_give_the_surrogate(name, dtype, count, interpret):
    interpret("hopper_gradients", name, dtype, "16", count)


# more keys than stages hold; nodes far from all keys; channels that fill no block, or two; samples; recorded calls
@pytest.mark.skipif(not AVAILABLE, reason="needs g++ on Linux, and its halves")
@pytest.mark.parametrize("check", ["many_keys", "far_nodes", "few_channels", "lines_in_order", "played_with_cuda"])
def test_steps_in_cuda_are_right_elsewhere_too(check, interpret):
    interpret(check)


@pytest.mark.parametrize(("dtype", "dims", "count"), [("float16", "16", "64"), ("bfloat16", "17", "40")])
def test_ramps_times_factors_give_the_surrogate(dtype, dims, count, interpret):
    # exponentials have them where others have codes
    interpret("gradients", "add_laplace", dtype, dims, count)


@pytest.mark.parametrize(
    ("name", "dtype", "dims"),
    [
        ("add_riesz", "float32", "3"),
        ("add_riesz", "bfloat16", "3"),
        ("add_laplace", "float32", "2"),
        ("add_bump", "float16", "17"),
        ("spline", "float32", "2"),
        ("matern", "float32", "2"),
    ],
)
def test_causal_output_and_gradients_are_those_of_the_surrogate(name, dtype, dims, interpret):
    interpret("causal_gradients", name, dtype, dims)


@pytest.mark.parametrize(
    ("name", "dtype", "dims"),
    [
        ("add_riesz", "float16", "17"),
        ("add_bump", "float32", "3"),
        ("add_laplace", "float32", "2"),
    ],
)
def test_causal_gradients_by_kernels_are_those_by_torch(name, dtype, dims, interpret):
    interpret("causal_ways", name, dtype, dims)


# half a block of dimensions for 32 nodes, and a quarter for 64
@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [
        ("add_riesz", "float16", "32"),
        ("add_riesz", "bfloat16", "32"),
        ("add_riesz", "float16", "40"),
        ("add_bump", "bfloat16", "32"),
        ("add_laplace", "bfloat16", "32"),
        ("add_laplace", "float16", "40"),
    ],
)
def test_causal_calls_with_tables_in_registers_give_the_surrogate(name, dtype, count, interpret):
    interpret("marched", name, dtype, "16", count)


def test_causal_masks_groups_and_lengths(interpret):
    interpret("causal")


def test_the_kernel_between_nodes_is_corrected_as_by_torch(interpret):
    interpret("matrix")


def test_places_and_sums_of_ramps_are_those_of_a_search(interpret):
    interpret("places")


def test_codes_and_factors_of_exponentials_are_those_of_a_search(interpret):
    interpret("words")


def test_masks_groups_and_sums_of_exponentials_in_16_bits(interpret):
    interpret("factored")


def test_masks_groups_and_what_is_no_number(interpret):
    interpret("masks")


def test_sums_many_channels_and_many_nodes(interpret):
    interpret("sums")


def test_the_operator_compiles_and_maps(interpret):
    interpret("operators")


def test_a_call_that_is_played_again_gives_the_same_bits(interpret):
    interpret("played")


def test_default_types_autocast_and_fused_optimizers_change_nothing(interpret):
    interpret("types")


def test_a_call_with_one_tensor_for_several_inputs_is_not_played_for_others(interpret):
    interpret("played_shared")


def test_gradients_of_a_call_that_is_played_again_are_the_same_bits(interpret):
    interpret("played_gradients")


def test_causal_calls_of_several_rounds_are_played_too(interpret):
    interpret("played_rounds")
