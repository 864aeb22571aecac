import pytest

from sortattn.bench import run as module
from sortattn.bench.cases import make_groups
from sortattn.bench.run import preflight, run
from sortattn.bench.store import Store, read
from sortattn.errors import CommandError


@pytest.fixture
def store(tmp_path, settings, machine):
    return Store(tmp_path / "bench.csv", settings, machine)


def go(groups, settings, store, memory=False):
    steps = []
    problems = run(
        groups,
        settings,
        store,
        rounds=3,
        budget=60,
        memory=memory,
        advance=lambda text, count: steps.append(count),
    )
    return problems, sum(steps)


def test_every_case_becomes_a_row_with_its_ratio_to_softmax(settings, store):
    groups = make_groups(["elu", "relu"], ["reference"], ["float32"], [8, 16], backward=True)
    problems, steps = go(groups, settings, store)
    assert problems == []
    assert steps == 12
    assert [row.case for row in read(store.path)] == [case for group in groups for case in group.cases]
    for row in store.rows:
        assert row.rounds == 3
        assert 0 < row.min_ms <= row.median_ms
        assert row.speedup == pytest.approx(row.softmax_ms / row.median_ms, rel=1e-3)
    assert {row.speedup for row in store.rows if row.kernel == "softmax"} == {1.0}


def test_rows_that_are_there_are_not_measured_again(settings, store, monkeypatch):
    go(make_groups(["elu"], ["reference"], ["float32"], [8]), settings, store)
    before = list(store.rows)
    measured = []
    honest = module.measure
    monkeypatch.setattr(
        module, "measure", lambda calls, *args, **more: measured.append(list(calls)) or honest(calls, *args, **more)
    )
    groups = make_groups(["elu", "relu"], ["reference"], ["float32"], [8])
    go(groups, settings, store)
    # softmax once more, for the ratio of the new kernel, but its row stays
    assert [[case.kernel for case in calls] for calls in measured] == [["softmax", "relu"]]
    assert store.rows[:2] == before
    assert [row.kernel for row in store.rows] == ["softmax", "elu", "relu"]
    assert go(groups, settings, store) == ([], 0)


def test_an_interrupt_keeps_the_groups_before_it(settings, store, monkeypatch):
    honest = module.measure

    def interrupted(calls, *args, **more):
        if next(iter(calls)).n == 16:
            raise KeyboardInterrupt
        return honest(calls, *args, **more)

    monkeypatch.setattr(module, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        go(make_groups(["elu"], ["reference"], ["float32"], [8, 16, 32]), settings, store)
    assert [row.n for row in read(store.path)] == [8, 8]


def test_a_case_that_fails_is_reported_and_not_tried_at_larger_sizes(settings, store, monkeypatch):
    tried = []
    honest = module.make_call

    def make_call(case, settings, inputs):
        def call():
            tried.append(case.n)
            raise RuntimeError("not enough memory")

        return call if case.kernel == "relu" and case.n >= 16 else honest(case, settings, inputs)

    monkeypatch.setattr(module, "make_call", make_call)
    problems, steps = go(make_groups(["elu", "relu"], ["reference"], ["float32"], [8, 16, 32]), settings, store)
    assert problems == [
        "relu (reference) failed at forward float32 N=16: not enough memory; larger sizes were not tried"
    ]
    assert tried == [16]
    assert [row.n for row in store.rows if row.kernel == "relu"] == [8]
    assert [row.n for row in store.rows if row.kernel == "elu"] == [8, 16, 32]


def test_kernels_are_measured_even_where_softmax_fails(settings, store, monkeypatch):
    honest = module.make_call

    def make_call(case, settings, inputs):
        def call():
            raise RuntimeError("not enough memory")

        return call if case.is_softmax else honest(case, settings, inputs)

    monkeypatch.setattr(module, "make_call", make_call)
    problems, _ = go(make_groups(["elu"], ["reference"], ["float32"], [8]), settings, store)
    assert len(problems) == 1
    assert [(row.kernel, row.softmax_ms, row.speedup) for row in read(store.path)] == [("elu", None, None)]


def test_memory_stands_in_the_row_and_its_failure_costs_only_itself(settings, store, monkeypatch):
    def extra_bytes(case, settings):
        if case.kernel == "elu":
            raise RuntimeError("killed")
        return 3 * 8 * 2 * 8 * 4

    monkeypatch.setattr(module, "extra_bytes", extra_bytes)
    problems, _ = go(make_groups(["elu"], ["reference"], ["float32"], [8]), settings, store, memory=True)
    assert problems == ["memory of elu (reference) at N=8: killed"]
    assert [(row.memory_bytes, row.memory_ratio) for row in store.rows] == [(1536, 1.0), (None, None)]


def test_preflight_says_which_contender_cannot_serve(settings):
    groups = make_groups(["add_bump"], ["linear"], ["float32"], [8])
    with pytest.raises(
        CommandError, match=r"add_bump with backend 'linear' cannot be measured \(forward, float32, cpu\)"
    ):
        preflight(groups, settings)
