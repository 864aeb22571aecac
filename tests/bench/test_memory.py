from types import SimpleNamespace

import pytest
import torch

from sortattn.bench import memory
from sortattn.bench.cases import BOTH, FORWARD, SOFTMAX, Case, Settings, input_bytes
from sortattn.bench.memory import CLEAR, extra_bytes, peak_rise

linux = pytest.mark.skipif(not CLEAR.exists(), reason="only Linux can reset the high-water mark")
# Linux counts the resident pages of each thread in batches, so a mark may be a few hundred kilobytes off
MEGABYTE = 2**20


@linux
def test_the_peak_is_seen_although_it_is_freed_before_the_end():
    def call():
        torch.ones(64 * MEGABYTE, dtype=torch.uint8)

    assert 63 * MEGABYTE <= peak_rise(call) < 72 * MEGABYTE


@linux
def test_an_earlier_peak_does_not_hide_a_later_one():
    torch.ones(128 * MEGABYTE, dtype=torch.uint8)
    assert peak_rise(lambda: torch.ones(32 * MEGABYTE, dtype=torch.uint8)) >= 31 * MEGABYTE
    assert peak_rise(lambda: None) < MEGABYTE


@linux
def test_memory_that_was_freed_before_counts_when_it_is_taken_again():
    def small_blocks():
        return [b"x" * 65536 for _ in range(512)]

    blocks = small_blocks()
    # a block that lives on keeps the heap from shrinking by itself
    guard = b"x" * 65536
    del blocks
    assert peak_rise(small_blocks) >= 28 * MEGABYTE
    del guard


@linux
def test_the_dense_matrix_shows_in_a_process_of_its_own():
    settings = Settings(heads=1, head_dim=8, value_dim=8, threads=1)
    n = 2048
    softmax = extra_bytes(Case(*SOFTMAX, "float32", FORWARD, n), settings)
    dense = extra_bytes(Case("elu", "reference", "float32", FORWARD, n), settings)
    matrix = 4 * n * n
    assert softmax < matrix < dense < 8 * matrix


@linux
@pytest.mark.parametrize("kernel", ["add_riesz", "add_laplace", "add_bump"])
def test_forward_and_backward_by_sorting_take_at_most_three_times_the_inputs(kernel):
    # the shortest sequence that the README lists: what does not grow with it shows most
    settings, case = Settings(threads=2), Case(kernel, "sorted", "float32", BOTH, 512)
    bound = 3 * input_bytes(case, settings)
    # other threads of the process may take pages of their own while it is measured, now and then
    taken = []
    while not taken or (taken[-1] > bound and len(taken) < 3):
        taken.append(extra_bytes(case, settings))
    assert min(taken) <= bound, taken


@linux
def test_a_child_that_dies_is_reported(monkeypatch):
    dead = SimpleNamespace(returncode=-9, stderr="Traceback\nMemoryError: too much\n", stdout="")
    monkeypatch.setattr(memory, "subprocess", SimpleNamespace(run=lambda *args, **options: dead))
    with pytest.raises(RuntimeError, match="status -9: MemoryError: too much"):
        extra_bytes(Case(*SOFTMAX, "float32", FORWARD, 16), Settings())


def test_where_the_mark_cannot_be_reset_nothing_is_claimed(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "missing")
    assert extra_bytes(Case(*SOFTMAX, "float32", FORWARD, 16), Settings()) is None


def test_input_bytes_are_those_of_query_key_and_value():
    settings = Settings(batch=2, heads=3, head_dim=8, value_dim=5)
    assert input_bytes(Case(*SOFTMAX, "float64", FORWARD, 10), settings) == 2 * 3 * 10 * (8 + 8 + 5) * 8
    assert input_bytes(Case(*SOFTMAX, "bfloat16", FORWARD, 10), settings) == 2 * 3 * 10 * (8 + 8 + 5) * 2
