import time

from sortattn.bench.measure import LEAST_ROUNDS, MOST_REPEATS, measure, sample, warm_up


def test_every_round_goes_through_all_calls():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    samples = measure(calls, dict.fromkeys(calls, 1), rounds=4, budget=60)
    assert all(sorted(order[first : first + 3]) == list("abc") for first in range(0, 12, 3))
    assert {name: len(found) for name, found in samples.items()} == {"a": 4, "b": 4, "c": 4}


def test_no_call_always_comes_after_the_same_one():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abcdefgh"}
    measure(calls, dict.fromkeys(calls, 1), rounds=7, budget=60)
    rounds = [order[first : first + 8] for first in range(0, 56, 8)]
    for name in calls:
        before = [one[one.index(name) - 1] for one in rounds if one.index(name)]
        assert all(before.count(other) <= len(before) / 2 for other in calls)


def test_a_spent_budget_ends_after_three_rounds():
    samples = measure({"a": lambda: time.sleep(0.002)}, {"a": 1}, rounds=50, budget=0)
    assert len(samples["a"]) == LEAST_ROUNDS == 3


def test_on_round_hears_every_round():
    heard = []
    measure({"a": lambda: None}, {"a": 1}, rounds=3, budget=60, on_round=heard.append)
    assert heard == [0, 1, 2]


def test_a_sample_is_the_mean_of_its_calls():
    calls = []
    milliseconds = sample(lambda: (calls.append(0), time.sleep(0.01)), 3)
    assert len(calls) == 3
    # sleep never wakes early; how late it wakes is up to the machine
    assert 10 <= milliseconds < 100


def test_short_calls_are_repeated_and_long_ones_are_not():
    assert warm_up(lambda: None) == MOST_REPEATS
    assert warm_up(lambda: time.sleep(0.03)) == 1
    assert 1 < warm_up(lambda: time.sleep(0.002)) <= 10


def test_first_calls_that_compile_do_not_say_how_long_a_call_is():
    # such as 300 ms to compile, 30 to note what is launched, and what it takes from then on
    waits = iter([0.3, 0.03, 0.002, 0.002, 0.002])
    assert 1 < warm_up(lambda: time.sleep(next(waits))) <= 10


def test_a_long_call_is_made_twice_before_it_is_measured():
    calls = []
    assert warm_up(lambda: (calls.append(0), time.sleep(0.03))) == 1
    assert len(calls) == 2
