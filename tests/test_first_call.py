"""Kernels for the CPU are compiled once for all processes: a later one finds them on disk."""

import os
import subprocess
import sys

import pytest

CODE = """
import time, torch, sortattn
torch.set_num_threads(2)
query, key, value = torch.randn(3, 1, 8, 256, 64).unbind()
start = time.process_time()
sortattn.kernel_attention(query, key, value, "{kernel}", backend="{backend}")
spent = time.process_time() - start
from sortattn.ops.sorted import drive, rows
from sortattn.ops.tiled import cpu_sums
functions = (drive.walk_head, rows.all_finite, rows.divide_rows, cpu_sums.sum_heads)
print(spent, sum(sum(function.stats.cache_misses.values()) for function in functions))
"""


@pytest.mark.parametrize("backend", ["sorted", "tiled"])
@pytest.mark.parametrize("kernel", ["add_riesz", "add_laplace", "add_bump"])
def test_a_second_process_compiles_nothing_and_starts_in_under_three_seconds(kernel, backend):
    # the first may have to compile
    for _ in range(2):
        child = subprocess.run(
            [sys.executable, "-c", CODE.format(kernel=kernel, backend=backend)],
            capture_output=True,
            text=True,
            check=True,
        )
    # seconds of the processor: others may keep it busy meanwhile
    seconds, misses = child.stdout.split()
    assert float(seconds) < 3
    assert int(misses) == 0


def test_a_first_call_with_gradients_imports_no_compiler_of_torch():
    """Which takes seconds, and which an operator does at its first call."""
    code = """
import sys, torch, sortattn
points = [torch.randn(1, 40, 8, requires_grad=True) for _ in range(3)]
sortattn.kernel_attention(*points, "add_bump", backend="sorted").sum().backward()
print("torch._dynamo" in sys.modules)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["False"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sorted", "tiled"])
def test_a_first_call_compiles_hardly_any_function_that_is_not_ours(backend, tmp_path):
    """Of NumPy's and Python's, each of which takes as long as one of ours: arrays and slices had been half of them."""
    code = f"""
import torch, sortattn
from numba.core import event
class Listener(event.Listener):
    others = []
    def on_start(self, found): pass
    def on_end(self, found): self.others.append(found.data["dispatcher"].py_func)
event.register("numba:compile", Listener())
query, key, value = torch.randn(3, 1, 2, 100, 16).unbind()
sortattn.kernel_attention(query, key, value, "add_laplace", backend="{backend}")
ours = [function for function in Listener.others if function.__module__.startswith("sortattn")]
print(len(ours), *sorted({{function.__qualname__ for function in Listener.others if function not in ours}}))
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "SORTATTN_CACHE": str(tmp_path)}
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    number, *others = child.stdout.split()
    assert int(number) > 10
    assert set(others) <= {"ol_min.<locals>.impl", "ol_max.<locals>.impl"}
