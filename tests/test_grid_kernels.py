"""The grid's Triton kernels, run by Triton's interpreter on the CPU beside float64.

It is switched on before Triton is imported, so every check is a process of its own, see `interpreted`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[1]


def interpret(*check: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}"}
    command = [sys.executable, "-m", "tests.interpreted", *check]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("name", "dtype", "dims"),
    [
        ("add_riesz", "float32", "17"),
        ("add_riesz", "bfloat16", "3"),
        ("add_laplace", "float32", "2"),
        ("add_laplace", "float16", "3"),
        ("add_bump", "float32", "2"),
        ("add_bump", "float16", "17"),
        ("spline", "float32", "2"),
        ("matern", "float32", "2"),
    ],
)
def test_output_and_gradients_are_those_of_the_surrogate(name, dtype, dims):
    interpret("gradients", name, dtype, dims)


@pytest.mark.parametrize(
    ("name", "dtype", "dims"),
    [
        ("add_riesz", "float32", "17"),
        ("add_riesz", "bfloat16", "3"),
        ("add_laplace", "float32", "2"),
        ("add_bump", "float16", "17"),
        ("spline", "float32", "2"),
        ("matern", "float32", "2"),
    ],
)
def test_causal_output_and_gradients_are_those_of_the_surrogate(name, dtype, dims):
    interpret("causal_gradients", name, dtype, dims)


@pytest.mark.parametrize(
    ("name", "dtype", "dims"),
    [
        ("add_riesz", "float16", "17"),
        ("add_bump", "float32", "3"),
        ("add_laplace", "float32", "2"),
    ],
)
def test_causal_gradients_by_kernels_are_those_by_torch(name, dtype, dims):
    interpret("causal_ways", name, dtype, dims)


def test_causal_masks_groups_and_lengths():
    interpret("causal")


def test_the_kernel_between_nodes_is_corrected_as_by_torch():
    interpret("matrix")


def test_masks_groups_and_what_is_no_number():
    interpret("masks")


def test_sums_many_channels_and_many_nodes():
    interpret("sums")


def test_the_operator_compiles_and_maps():
    interpret("operators")
