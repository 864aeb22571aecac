"""What the CPU's committed rows have to show: the README's table is made of them."""

from pathlib import Path

import pytest

from sortattn.bench.cases import BOTH, FORWARD
from sortattn.bench.store import read

ROWS = {
    (row.kernel, row.passes, row.n): row
    for row in read(Path(__file__).parents[2] / "benchmarks" / "results" / "cpu.csv")
    if row.dtype == "float32"
}
SIZES = sorted({n for _, _, n in ROWS})
additive = pytest.mark.parametrize("kernel", ["add_riesz", "add_laplace", "add_bump"])
both_passes = pytest.mark.parametrize("passes", [FORWARD, BOTH])


def test_the_rows_are_of_the_shape_that_is_promised():
    assert {(row.batch, row.heads, row.head_dim, row.value_dim, row.threads) for row in ROWS.values()} == {
        (1, 8, 64, 64, 2)
    }
    assert SIZES == [512, 1024, 2048, 4096, 8192, 16_384]


@additive
@pytest.mark.parametrize(("passes", "first"), [(FORWARD, 2048), (BOTH, 4096)])
def test_additive_kernels_overtake_softmax(kernel, passes, first):
    assert all(ROWS[kernel, passes, n].speedup > 1 for n in SIZES if n >= first)


@pytest.mark.parametrize(("kernel", "least"), [("add_riesz", 8), ("add_laplace", 8), ("add_bump", 5)])
def test_at_16384_they_are_several_times_as_fast(kernel, least):
    assert ROWS[kernel, FORWARD, 16_384].speedup >= least


@additive
@both_passes
def test_memory_is_at_most_three_times_the_inputs(kernel, passes):
    assert all(ROWS[kernel, passes, n].memory_ratio <= 3 for n in SIZES)


@additive
@both_passes
def test_twice_the_length_takes_at_most_2_3_times_as_long_where_it_is_sorted(kernel, passes):
    times = {n: ROWS[kernel, passes, n].median_ms for n in SIZES}
    # from there on `auto` sorts
    for n in SIZES[2:-1]:
        assert times[2 * n] <= 2.3 * times[n]
