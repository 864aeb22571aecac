import pytest

from sortattn.bench.crossover import crossover, describe

SIZES = (512, 1024, 2048, 4096)


def power_law(factor, exponent, sizes=SIZES):
    return {n: factor * n**exponent for n in sizes}


@pytest.mark.parametrize("meeting", [700.0, 1500.0, 3999.0])
def test_two_power_laws_cross_where_they_are_equal(meeting):
    # n**2 / meeting equals n at n == meeting, and both are straight lines in the log-log plot
    assert crossover(power_law(1 / meeting, 2), power_law(1, 1)) == pytest.approx(meeting, rel=1e-6)


def test_a_kernel_that_is_always_faster_crosses_at_zero():
    assert crossover(power_law(2, 1), power_law(1, 1)) == 0.0
    assert describe(power_law(2, 1), power_law(1, 1)) == "faster at every N measured, from 512"


def test_a_kernel_that_is_slower_at_the_end_does_not_cross():
    assert crossover(power_law(1, 1), power_law(2, 1)) is None
    assert describe(power_law(1, 1), power_law(2, 1)) == "slower up to N = 4,096, the largest measured"


def test_the_last_crossing_counts():
    softmax = {512: 1.0, 1024: 1.0, 2048: 1.0, 4096: 1.0}
    kernel = {512: 0.5, 1024: 2.0, 2048: 0.5, 4096: 0.25}
    assert 1024 < crossover(softmax, kernel) < 2048


def test_only_sizes_that_both_have_count():
    assert crossover({512: 1.0, 2048: 16.0}, {512: 2.0, 1024: 9.0, 2048: 8.0}) == pytest.approx(1024)
    assert describe({512: 1.0}, {1024: 1.0}) == "not measured"
