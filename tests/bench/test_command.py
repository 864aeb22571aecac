import signal
import subprocess
import sys
import time

import pytest

from sortattn.bench import command
from sortattn.bench import run as running
from sortattn.bench.store import read
from sortattn.cli import main


@pytest.fixture
def bench(tmp_path):
    """`sortattn bench` at sizes that take no time."""

    def call(*more):
        small = ["--kernel", "elu", "--backend", "reference", "-n", "8", "16", "--heads", "1", "--head-dim", "4"]
        how = ["--threads", "1", "--rounds", "3", "--no-memory", "--out", str(tmp_path)]
        return main(["bench", *small, *how, *more])

    return call


@pytest.fixture(autouse=True)
def threads():
    """The number of threads is global; it is put back."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_writes_rows_and_a_plot_and_prints_the_table(bench, tmp_path, capsys):
    assert bench("--backward") == 0
    printed = capsys.readouterr().out
    rows = read(tmp_path / "bench.csv")
    assert [(row.kernel, row.passes, row.n) for row in rows] == [
        (kernel, passes, n)
        for passes in ("forward", "forward+backward")
        for n in (8, 16)
        for kernel in ("softmax", "elu")
    ]
    assert {(row.heads, row.head_dim, row.value_dim, row.threads) for row in rows} == {(1, 4, 4, 1)}
    assert "elu [ms]" in printed
    assert "elu: " in printed
    assert str(tmp_path / "bench.csv") in printed
    assert (tmp_path / "bench.png").stat().st_size > 1000


def test_an_interrupted_run_keeps_its_rows_and_the_next_one_finishes(bench, tmp_path, capsys, monkeypatch):
    honest = running.measure

    def interrupted(calls, *args, **options):
        if next(iter(calls)).n == 16:
            raise KeyboardInterrupt
        return honest(calls, *args, **options)

    monkeypatch.setattr(running, "measure", interrupted)
    assert bench() == 130
    assert "2 rows are in" in capsys.readouterr().err
    kept = read(tmp_path / "bench.csv")
    assert [row.n for row in kept] == [8, 8]

    measured = []
    monkeypatch.setattr(running, "measure", lambda calls, *a, **o: measured.extend(calls) or honest(calls, *a, **o))
    assert bench() == 0
    assert {case.n for case in measured} == {16}
    rows = read(tmp_path / "bench.csv")
    assert rows[:2] == kept
    assert [row.n for row in rows] == [8, 8, 16, 16]


def test_a_finished_run_measures_nothing_again_unless_fresh(bench, tmp_path, capsys, monkeypatch):
    bench()
    first = (tmp_path / "bench.csv").read_bytes()
    monkeypatch.setattr(command, "run", lambda *args, **options: pytest.fail("measured again"))
    assert bench() == 0
    output = capsys.readouterr()
    assert "4 of 4 rows are in" in output.err
    assert "elu [ms]" in output.out
    assert (tmp_path / "bench.csv").read_bytes() == first
    monkeypatch.undo()
    assert bench("--fresh", "-n", "8") == 0
    assert len(read(tmp_path / "bench.csv")) == 2


def test_another_thread_count_is_refused_before_any_work_and_another_name_is_not(bench, tmp_path, capsys, monkeypatch):
    bench()
    before = (tmp_path / "bench.csv").read_bytes()
    assert bench("--threads", "2") == 2
    assert "threads=1, this run has threads=2" in capsys.readouterr().err
    assert (tmp_path / "bench.csv").read_bytes() == before
    assert bench("--threads", "2", "--name", "two") == 0
    assert {row.threads for row in read(tmp_path / "two.csv")} == {2}


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (["--kernel", "sofmax"], "unknown kernel 'sofmax', expected one of softmax, gauss"),
        (["--backend", "magic"], "unknown backend 'magic', expected one of auto"),
        (["--dtype", "int8"], "unknown dtype 'int8', expected one of float64"),
        (["--device", "toaster"], "unknown device 'toaster'"),
        (["--device", "meta"], "expected the device cpu or cuda, got 'meta'"),
        (["--kernel", "add_bump", "--backend", "linear"], "add_bump with backend 'linear' cannot be measured"),
    ],
)
def test_a_wrong_wish_is_refused_with_a_message_and_no_file(bench, tmp_path, capsys, wish, message):
    assert bench(*wish) == 2
    assert f"sortattn bench: {message}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_rich_and_matplotlib_it_still_measures(bench, tmp_path, capsys, monkeypatch):
    for name in ("rich.console", "rich.progress", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert bench() == 0
    output = capsys.readouterr()
    assert "4/4 forward float32 N=16" in output.err
    assert "pip install 'sortattn[bench]'" in output.out
    assert len(read(tmp_path / "bench.csv")) == 4


def test_a_real_interrupt_ends_with_130_and_a_file_that_can_be_read(tmp_path):
    path = tmp_path / "bench.csv"
    options = ["--kernel", "elu", "--backend", "reference", "--heads", "1", "--head-dim", "4", "--threads", "1"]
    options += ["--no-memory", "--rounds", "100000", "--budget", "0", "--out", str(tmp_path), "-n", "8"]
    # sizes enough to still be running when the signal comes
    command = [sys.executable, "-m", "sortattn", "bench", *options, *map(str, range(9, 3000))]
    # a shell's background job ignores the signal, and its children would too
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "the same command continues" in errors
    assert len(read(path)) >= 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["bench.csv"]
