"""`sortattn bench --paper`."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sortattn.bench import cases
from sortattn.bench.cases import BOTH, FORWARD, Case, Settings, make_call, make_inputs
from sortattn.bench.crossover import crossover
from sortattn.bench.machine import Machine
from sortattn.bench.paper import methods, run
from sortattn.bench.paper.methods import SOFTMAX_METHODS, usable_methods
from sortattn.bench.paper.plot import HUES, draw
from sortattn.bench.paper.run import PaperRow, timings, wanted
from sortattn.bench.paper.tables import (
    blocks,
    break_even_table,
    measured,
    memory_table,
    published,
    slope,
    slope_table,
    time_table,
)
from sortattn.cli import main
from sortattn.records import Records, read

ROOT = Path(__file__).parents[3]
SETTINGS = Settings(batch=1, heads=1, head_dim=8, value_dim=8)
MACHINE = Machine("Linux", "Some CPU", "", "3.12.1", "2.13.0", "0.68.1", "0.1.0")
COMMON = {**asdict(SETTINGS), **asdict(MACHINE)}
LINEAR = methods.KERNEL_METHODS[0]
SOFTMAX = SOFTMAX_METHODS["cpu"][0]


def make_row(method, passes, n, spent, memory=2**20):
    case = asdict(method.case(passes, n))
    times = {"mean_ms": spent, "std_ms": spent / 10, "runs": 10, "warm_ups": 5, "memory_bytes": memory}
    return PaperRow(**case, method=method.name, **times, date="2026-01-31 12:00", **COMMON)


@pytest.fixture
def rows():
    """A kernel that takes N and softmax that takes N^2 / 1000 milliseconds: they meet at N = 1000."""
    return [
        make_row(method, passes, n, spent)
        for passes in (FORWARD, BOTH)
        for n in (256, 512, 1024, 2048)
        for method, spent in ((LINEAR, float(n)), (SOFTMAX, n * n / 1000))
    ]


# the paper's figures


def test_the_papers_figures_are_complete_and_say_where_they_come_from():
    tables, source = published()
    assert {passes: len(columns) for passes, columns in tables.items()} == {FORWARD: 8, BOTH: 7}
    for columns in tables.values():
        for (_, method), column in columns.items():
            assert list(column) == [2**power for power in range(7, 13 if method == "FUSED" else 18)]
            assert all(one < other for one, other in zip(column.values(), list(column.values())[1:], strict=False))
    assert tables[FORWARD]["add_laplace", "GLOBAL"][131072] == 190.1
    assert tables[BOTH]["softmax", "CUDNN16"][128] == 0.057
    assert "Rux, Hertrich, Neumayer" in source
    assert "Tables 2 and 5" in source
    assert "RTX 5090" in source


def test_break_even_points_of_the_papers_figures_are_those_of_its_text():
    # "FUSED becomes faster than MEM_EFF32 at N ~ 2048 ... against FLASH16 slightly beyond N = 16384"
    lines = [line.split() for line in break_even_table(published()[0][FORWARD]).splitlines()]
    fused, riesz = (next(line for line in lines if line[:2] == ["add_riesz", name]) for name in ("FUSED", "GLOBAL"))
    assert 1024 < float(fused[2].replace(",", "")) < 2048
    assert 16384 < float(riesz[4].replace(",", "")) < 20000


def test_slopes_of_the_papers_figures_are_one_and_two():
    columns = published()[0][FORWARD]
    assert slope(columns["softmax", "FLASH16"]) == pytest.approx(2, abs=0.05)
    assert slope(columns["add_laplace", "GLOBAL"]) == pytest.approx(1.08, abs=0.02)


# measuring


def test_ten_runs_are_timed_after_five_warm_ups(monkeypatch):
    calls = []
    monkeypatch.setattr(run, "sample", lambda call, repeats, device: call() or float(len(calls)))
    assert timings(lambda: calls.append(0), "cpu", 20.0) == ([float(number) for number in range(6, 16)], 5)


@pytest.mark.parametrize(("seconds", "runs"), [(2.0, 9), (30.0, 3)])
def test_slow_calls_have_one_warm_up_and_as_many_runs_as_fit_but_three(monkeypatch, seconds, runs):
    clock = []
    monkeypatch.setattr(run, "sample", lambda call, repeats, device: clock.append(seconds) or seconds * 1e3)
    monkeypatch.setattr(run.time, "perf_counter", lambda: sum(clock))
    assert timings(lambda: None, "cpu", 20.0) == ([seconds * 1e3] * runs, 1)


def test_a_first_call_that_compiles_does_not_make_the_others_slow(monkeypatch):
    spent = iter([9e3, *range(1, 15)])
    monkeypatch.setattr(run, "sample", lambda call, repeats, device: next(spent))
    assert timings(lambda: None, "cpu", 20.0) == (list(range(5, 15)), 5)


def test_softmax_goes_through_the_backend_of_torch_that_the_column_names(monkeypatch):
    from torch.nn.attention import SDPBackend

    seen = []
    monkeypatch.setattr("torch.nn.attention.sdpa_kernel", lambda kind: seen.append(kind) or cases.nullcontext())
    for method in (*SOFTMAX_METHODS["cuda"], *SOFTMAX_METHODS["cpu"]):
        case = method.case(FORWARD, 4)
        make_call(case, SETTINGS, make_inputs(case, SETTINGS))()
    efficient, flash, cudnn = (
        SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION,
    )  # fmt: skip
    assert seen == [efficient, efficient, flash, cudnn]
    types = {method.name: method.dtype for method in SOFTMAX_METHODS["cuda"]}
    assert types == {"MEM_EFF32": "float32", "MEM_EFF16": "float16", "FLASH16": "float16", "CUDNN16": "float16"}


def test_on_a_gpu_the_grid_is_measured_too(monkeypatch):
    monkeypatch.setattr(methods, "_trouble", lambda *_: None)
    for device, expected in (("cpu", []), ("cuda", ["add_laplace", "add_bump", "add_riesz"])):
        found, _ = usable_methods(replace(SETTINGS, device=device))
        grid = [method for method in found if method.backend == "grid"]
        assert [method.kernel for method in grid] == expected
        assert {method.dtype for method in grid} <= {"float16"}


def test_methods_that_this_machine_lacks_are_left_out_with_a_reason(monkeypatch):
    monkeypatch.setattr(methods, "KERNEL_METHODS", (LINEAR, methods.Method("add_bump", "LINEAR", "linear")))
    found, reasons = usable_methods(SETTINGS)
    assert found == [LINEAR, SOFTMAX]
    (reason,) = reasons
    assert reason.startswith("add_bump LINEAR is left out: ")


@pytest.mark.parametrize(
    ("samples", "message"), [([60_000.0], "took 60 s a call"), (RuntimeError("no memory"), "failed.*no memory")]
)
def test_a_method_that_fails_or_takes_too_long_is_not_measured_at_larger_sizes(tmp_path, monkeypatch, samples, message):
    def timing(call, device, budget):
        if isinstance(samples, Exception):
            raise samples
        return samples, 1

    monkeypatch.setattr(run, "timings", timing)
    records = Records(tmp_path / "paper.csv", PaperRow, COMMON)
    advanced = []
    problems = run.run(
        wanted([SOFTMAX], [8, 4]),
        SETTINGS,
        records,
        memory=False,
        budget=20.0,
        patience=30.0,
        advance=lambda text, steps: advanced.append(steps),
    )
    assert len(problems) == 2
    for problem in problems:
        assert re.search(message, problem)
        assert "N=4 " in problem
    assert sum(advanced) == 4
    assert [row.n for row in records.rows] == ([] if isinstance(samples, Exception) else [4, 4])


def test_memory_is_measured_if_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "extra_bytes", lambda case, settings: 123)
    records = Records(tmp_path / "paper.csv", PaperRow, COMMON)
    run.run(
        wanted([SOFTMAX], [4]),
        SETTINGS,
        records,
        memory=True,
        budget=20.0,
        patience=30.0,
        advance=lambda text, steps: None,
    )
    assert [row.memory_bytes for row in records.rows] == [123, 123]


# showing


def test_tables_have_means_deviations_break_even_points_memory_and_slopes(rows):
    lines = [line.split() for line in time_table(rows, FORWARD).splitlines()]
    assert lines[0] == ["N", "add_laplace", "SORTED", "SDPA32"]
    assert lines[2] == ["256", "256", "±26", "65.54", "±6.6*"]
    assert lines[-1][1:3] == ["2,048", "±2e+02*"]
    assert break_even_table(measured(rows, FORWARD)).splitlines()[-1].split() == ["add_laplace", "SORTED", "1,000"]
    assert memory_table(rows, FORWARD).splitlines()[-1].split() == ["2,048", "1.0", "1.0"]
    assert memory_table([replace(row, memory_bytes=None) for row in rows], FORWARD) is None
    slopes = [line.split() for line in slope_table(rows).splitlines()]
    assert ["forward", "here", "SDPA32", "2.00"] in slopes
    assert ["forward", "here", "add_laplace", "SORTED", "1.00"] in slopes
    headings = [heading for heading, _ in blocks(rows)]
    assert "Forward, the paper's Table 2 (RTX 5090)" in headings
    assert "Forward and backward, the paper's Table 5 (RTX 5090)" in headings


def test_the_plot_shows_both_machines_with_their_slopes(rows):
    forward, both = draw(rows).axes
    labels = [line.get_label() for line in forward.get_lines()]
    assert "add_laplace SORTED, here (slope 1.00)" in labels
    assert "SDPA32, here (slope 2.00)" in labels
    assert "FLASH16, RTX 5090 (slope 1.98)" in labels
    assert len(both.get_lines()) == 2 + 7
    assert (forward.get_xscale(), forward.get_yscale()) == ("log", "log")


# the committed tables


@pytest.fixture(scope="module")
def committed():
    return read(ROOT / "benchmarks" / "results" / "h200-paper.csv", PaperRow)


def test_the_committed_tables_are_the_papers(committed):
    assert {(row.batch, row.heads, row.head_dim, row.value_dim, row.causal) for row in committed} == {
        (4, 12, 64, 64, False)
    }
    # fewer only where fifteen calls take longer than ten seconds
    assert all(row.runs == 10 or (row.runs >= 3 and row.mean_ms > 1e4 / 15) for row in committed)
    assert all(row.warm_ups == 5 or row.mean_ms > 1e4 / 15 for row in committed)
    assert all(row.memory_bytes > 0 for row in committed)
    for passes in (FORWARD, BOTH):
        columns = measured(committed, passes)
        for kernel in ("add_laplace", "add_bump", "add_riesz"):
            for method in ("SORTED", "GRID16"):
                assert sorted(columns[kernel, method]) == list(methods.PAPER_SIZES)
        for method in ("MEM_EFF32", "MEM_EFF16", "FLASH16", "CUDNN16"):
            assert sorted(columns["softmax", method]) == list(methods.PAPER_SIZES)


def test_the_document_says_what_the_committed_tables_show(committed):
    text = " ".join((ROOT / "docs" / "experiments.md").read_text().split())
    forward, both = (measured(committed, passes) for passes in (FORWARD, BOTH))

    def points(columns, method, softmax):
        found = (
            crossover(columns["softmax", softmax], columns[kernel, method])
            for kernel in ("add_laplace", "add_riesz", "add_bump")
        )
        return [f"{point:,.0f}" for point in found]

    one, two, three = points(forward, "SORTED", "MEM_EFF32")
    assert f"float32 from N = {one} (`add_laplace`), {two} (`add_riesz`) and {three} (`add_bump`) on, forward" in text
    one, two, three = points(both, "SORTED", "MEM_EFF32")
    assert f"from {one}, {two} and {three} forward and backward" in text
    one, two, three = points(forward, "SORTED", "CUDNN16")
    assert f"than cuDNN in float16 from {one}, {two} and {three}." in text
    one, two, three = points(forward, "GRID16", "CUDNN16")
    assert f"faster than cuDNN, both in float16, from {one}, {two} and {three} on." in text
    slopes = [slope(column) for columns in (forward, both) for key, column in columns.items() if key[1] == "SORTED"]
    assert f"{min(slopes):.2f} to {max(slopes):.2f} for `sorted`" in text
    here, there = (columns["add_riesz", "SORTED"][16384] for columns in (forward, both))
    assert f"`add_riesz` takes {here:.1f} instead of 16.9 ms at 16,384 and {there:.1f} instead of 50" in text


# the command


@pytest.fixture
def quick(monkeypatch, threads):
    """Two methods, so that a run takes no time."""
    threads(1)
    elu = methods.Method("elu", "LINEAR", "linear")
    monkeypatch.setattr(methods, "KERNEL_METHODS", (elu,))
    monkeypatch.setitem(HUES, "elu", "0.5")


def test_the_smoke_run_leaves_rows_and_a_plot_and_an_interrupted_one_continues(quick, tmp_path, monkeypatch, capsys):
    arguments = ["bench", "--paper", "--smoke", "--threads", "1", "--out", str(tmp_path)]
    honest = run.timings
    calls = []

    def interrupted(call, device, budget):
        calls.append(device)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return honest(call, device, budget)

    monkeypatch.setattr(run, "timings", interrupted)
    assert main(arguments) == 130
    assert "3 rows are in" in capsys.readouterr().err
    first = read(tmp_path / "paper.csv", PaperRow)
    monkeypatch.setattr(run, "timings", honest)
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert "3 of 12 rows are in" in output.err
    assert "Forward and backward, here" in output.out
    found = read(tmp_path / "paper.csv", PaperRow)
    assert found[:3] == first
    assert [(row.passes, row.n, row.method) for row in found] == [
        (passes, n, method) for passes in (FORWARD, BOTH) for n in (16, 32, 64) for method in ("LINEAR", "SDPA32")
    ]
    assert {(row.runs, row.warm_ups, row.batch, row.heads, row.head_dim) for row in found} == {(10, 5, 1, 1, 8)}
    assert (tmp_path / "paper.png").read_bytes().startswith(b"\x89PNG")


def test_the_shape_and_the_sizes_are_the_papers_unless_given(monkeypatch):
    seen = []
    monkeypatch.setattr("sortattn.bench.command.bench", lambda options: seen.append(options) or 0)
    main(["bench", "--paper"])
    main(["bench", "--paper", "--device", "cuda", "--heads", "3", "-n", "7"])
    main(["bench", "--paper", "--device", "cuda"])
    main(["bench"])
    cpu, given, cuda, plain = seen
    assert (cpu.batch, cpu.heads, cpu.head_dim, cpu.sizes[-1], cpu.name) == (4, 12, 64, 4096, "paper")
    assert (given.heads, given.sizes) == (3, [7])
    assert cuda.sizes == [2**power for power in range(7, 18)]
    assert (plain.batch, plain.heads, plain.head_dim, plain.name) == (1, 8, 64, "bench")


def test_a_case_names_torch_backends_only_for_softmax():
    case = Case("elu", "flash", "float32", FORWARD, 4)
    call = make_call(case, SETTINGS, make_inputs(case, SETTINGS))
    with pytest.raises(ValueError, match="flash"):
        call()


def test_a_real_interrupt_ends_with_130_and_the_same_command_finishes(tmp_path, interrupt, threads):
    arguments = ["bench", "--paper", "--smoke", "--threads", "1", "--out", str(tmp_path)]
    path = tmp_path / "paper.csv"
    code, errors = interrupt(arguments, path.exists)
    assert code == 130
    assert "the same command continues" in errors
    first = read(path, PaperRow)
    assert main(arguments) == 0
    assert read(path, PaperRow)[: len(first)] == first
