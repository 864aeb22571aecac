"""The training of section 4.1, and the command around it."""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
import torch

from sortattn.cli import main
from sortattn.experiments.capacity import loss as dense_loss
from sortattn.experiments.checkpoint import Checkpoint
from sortattn.experiments.recall import command, training
from sortattn.experiments.recall.command import Row, best, loss_table, make_batches
from sortattn.experiments.recall.plot import draw
from sortattn.experiments.recall.training import PARAMETERS, TARGET, TRAINED, Batch, Trainer, losses, start
from sortattn.kernels import KERNELS
from sortattn.records import read, write

ROOT = Path(__file__).parents[2]

every_kernel = pytest.mark.parametrize("name", TRAINED)


def rows_of(folder):
    return read(folder / "recall.csv", Row)


def without_time(rows):
    return [replace(row, seconds=0.0, date="") for row in rows]


# training


@every_kernel
def test_the_loss_is_that_of_the_attention_matrix_and_padding_does_not_count(name):
    batch = Batch(name, (5, 8), 2, 3, "cpu")
    state = start(batch)
    generator = torch.Generator().manual_seed(1)
    for part in ("query_map", "key_map"):
        state[part] += 0.3 * torch.randn(state[part].shape, generator=generator)
    # whatever stands in the padding
    state["tokens"][:2, 5:] = 7.0
    found = losses(TRAINED[name], *(state[part] for part in PARAMETERS), batch.counts)
    for index, (size, _) in enumerate(batch.runs):
        tokens = state["tokens"][index, :size].double()
        query, key = (tokens @ state[part][index].double().T for part in ("query_map", "key_map"))
        assert float(found[index]) == pytest.approx(dense_loss(TRAINED[name], query, key), rel=1e-4)


@every_kernel
def test_a_padded_run_trains_like_one_alone(name):
    together, alone = Batch(name, (4, 7), 1, 3, "cpu"), Batch(name, (4,), 1, 3, "cpu")
    states = [start(batch) for batch in (together, alone)]
    for batch, state in zip((together, alone), states, strict=True):
        Trainer(batch, state).advance(5)
    assert torch.isfinite(states[0]["tokens"]).all()
    torch.testing.assert_close(states[0]["tokens"][:1, :4], states[1]["tokens"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kernel", "adam", "epsilons", "betas"),
    [
        ("gauss", "own", (1e-12, 0.1), (0.9, 0.99)),
        ("elu", "own", (1e-2, 3e-5), (0.0, 0.9)),
        ("relu", "own", (1e-20, 1e4), (0.0, 0.9)),
        ("elu", "authors", (1e-4, 1e-3), (0.9, 0.999)),
    ],
)
def test_a_step_is_torchs_adam(kernel, adam, epsilons, betas):
    batch = Batch(kernel, (6,), 1, 4, "cpu", adam)
    state = start(batch)
    twins = [state[name].clone().requires_grad_() for name in PARAMETERS]
    groups = [{"params": part, "eps": eps} for part, eps in zip((twins[:1], twins[1:]), epsilons, strict=True)]
    optimizer = torch.optim.Adam(groups, lr=0.03, betas=betas)
    for _ in range(10):
        optimizer.zero_grad()
        (losses(KERNELS[kernel], *twins, None).sum() / 6).backward()
        torch.nn.utils.clip_grad_norm_(twins, 2.0)
        optimizer.step()
    Trainer(batch, state).advance(10)
    for name, twin in zip(PARAMETERS, twins, strict=True):
        torch.testing.assert_close(state[name], twin.detach(), rtol=1e-4, atol=1e-5)


def test_it_starts_from_normal_tokens_that_are_the_same_for_every_kernel_and_from_identities():
    one, two = (start(Batch(name, (50,), 2, 8, "cpu")) for name in ("relu", "gauss"))
    assert torch.equal(one["tokens"], two["tokens"])
    assert not torch.equal(one["tokens"][0], one["tokens"][1])
    assert one["tokens"].std() == pytest.approx(1, abs=0.1)
    assert torch.equal(one["query_map"][1], torch.eye(8))
    assert torch.equal(one["key_map"][0], torch.eye(8))


def test_the_experiment_is_the_papers_unless_told_otherwise(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "recall", lambda options: seen.append(options) or 0)
    main(["recall"])
    (options,) = seen
    assert (options.head_dim, options.steps, options.seeds, options.kernel) == (64, 120_000, 3, list(KERNELS))
    assert options.sizes == [20, 40, 60, 100, 120, 140, 200, 300, 380, 400, 500, 600]
    assert TARGET == 1e-4


def test_a_run_below_the_target_stands_still_while_the_others_go_on(monkeypatch):
    batch = Batch("gauss", (4,), 2, 4, "cpu")
    state = start(batch)
    # farther apart, so with a lower loss, but not without a gradient
    state["tokens"][0] *= 1.5
    low, high = losses(KERNELS["gauss"], *(state[name] for name in PARAMETERS)).tolist()
    monkeypatch.setattr(training, "TARGET", (low + high) / 2)
    before = state["tokens"].clone()
    Trainer(batch, state).advance(3)
    assert state["active"].tolist() == [False, True]
    assert state["steps"].tolist() == [0, 3]
    assert float(state["loss"][0]) == pytest.approx(low)
    assert torch.equal(state["tokens"][0], before[0])
    assert not torch.equal(state["tokens"][1], before[1])


def test_gpus_train_all_lengths_of_a_kernel_together_and_finished_ones_are_left_out():
    options = Namespace(kernel=["relu", "elu"], sizes=[20, 600, 40], seeds=1, head_dim=4, device="cuda", adam="authors")
    done = [Namespace(kernel="relu", n=40, seed=0), *(Namespace(kernel="elu", n=n, seed=0) for n in (20, 40, 600))]
    assert [(batch.kernel, batch.sizes) for batch in make_batches(options, done)] == [("relu", (20, 600))]
    assert all(batch.adam == "authors" for batch in make_batches(options, done))
    options.device = "cpu"
    assert [batch.sizes for batch in make_batches(options, done)] == [(20,), (600,)]


@pytest.fixture(scope="module")
def fused_errors():
    """Of every kernel: how far the kernels for GPUs, run on the CPU in float64, are from the definition."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("interpreted_step.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_steps_for_gpus_are_those_of_autograd(fused_errors):
    assert {case.split()[0] for case in fused_errors} == set(TRAINED)
    # the kernels have their constants in float32, and a loss of `tri` is divided by one of them
    assert {case: error for case, error in fused_errors.items() if not error < 1e-8} == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_kernel
def test_a_gpu_follows_the_definition_in_float64_and_repeats_its_bits(name):
    # with epsilons that are above what rounding leaves of a gradient
    batch = Batch(name, (20, 130), 2, 64, "cuda", "authors")
    exact = {part: tensor.double() if tensor.is_floating_point() else tensor for part, tensor in start(batch).items()}
    states = [start(batch) for _ in range(2)]
    Trainer(batch, exact).advance(5)
    # by a graph and its remainder, and step by step
    for state, strides in zip(states, ([25], [5] * 5), strict=True):
        trainer = training.make_trainer(batch, state)
        for stride in strides:
            trainer.advance(stride)
        trainer.wait()
    assert all(torch.equal(states[0][part], states[1][part]) for part in states[0])
    short = start(batch)
    trainer = training.make_trainer(batch, short)
    trainer.advance(5)
    trainer.wait()
    torch.testing.assert_close(short["loss"].double(), exact["loss"], rtol=1e-4, atol=1e-4)


# the command


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder that an undisturbed smoke run leaves."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(["recall", "--smoke", "--threads", "1", "--out", str(folder)]) == 0
    return folder


def test_the_smoke_run_leaves_rows_and_a_figure_and_shows_the_capacity(whole):
    rows = rows_of(whole)
    assert [(row.kernel, row.n, row.seed) for row in rows] == [
        (kernel, n, seed) for kernel in ("add_bump", "relu") for n in (3, 6, 9) for seed in (0, 1)
    ]
    assert (whole / "recall.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in whole.iterdir()) == ["recall.csv", "recall.png"]
    for row in rows:
        assert row.lowest_loss <= row.final_loss
        assert row.lowest_loss >= row.bound * (1 - 1e-4)
        assert (row.final_loss < TARGET) or row.steps == 200
    # capacity infinite, and at most D = 4
    assert all(row.lowest_loss < TARGET for row in rows if row.kernel == "add_bump")
    assert {(row.n, row.bound) for row in rows if row.kernel == "relu"} == {(3, 0.0), (6, 2.0), (9, 5.0)}


def test_an_interrupted_run_ends_with_130_and_continues_to_bitwise_the_same_rows(whole, tmp_path, interrupt):
    arguments = ["recall", "--smoke", "--threads", "1", "--out", str(tmp_path)]
    code, errors = interrupt(arguments, lambda: any(tmp_path.glob("recall.*.checkpoint")))
    assert code == 130
    assert "the same command continues" in errors
    assert len(rows_of(tmp_path) if (tmp_path / "recall.csv").exists() else []) < 12
    assert main(arguments) == 0
    assert without_time(rows_of(tmp_path)) == without_time(rows_of(whole))
    assert not list(tmp_path.glob("*.checkpoint"))


def test_the_draft_of_a_run_that_was_killed_is_removed_and_nothing_else(tmp_path):
    draft, other = (tmp_path / f".recall.add_bump-3.checkpoint.{end}" for end in ("4711", "mine"))
    for path in (draft, other):
        path.write_bytes(b"half a checkpoint")
    assert main(["recall", "--smoke", "--kernel", "add_bump", "-n", "3", "--threads", "1", "--out", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "recall.csv", "recall.png"]


def test_a_smoke_run_takes_the_options_that_are_given(tmp_path):
    given = ["--kernel", "elu", "-n", "5", "--head-dim", "3", "--seeds", "1", "--steps", "7"]
    assert main(["recall", "--smoke", *given, "--threads", "1", "--out", str(tmp_path)]) == 0
    (row,) = rows_of(tmp_path)
    assert (row.kernel, row.n, row.head_dim, row.seed, row.most_steps) == ("elu", 5, 3, 0, 7)


def test_a_full_disk_is_a_message_and_the_same_command_continues(whole, tmp_path, monkeypatch, capsys):
    def full(self, state):
        raise OSError(28, "No space left on device")

    arguments = ["recall", "--smoke", "--threads", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(Checkpoint, "save", full)
    assert main(arguments) == 2
    assert "No space left on device; 0 rows are in" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(arguments) == 0
    assert without_time(rows_of(tmp_path)) == without_time(rows_of(whole))


def test_the_bar_shows_the_loss_of_now(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(command, "progress", lambda total: nullcontext(lambda text, steps: shown.append((text, steps))))
    assert main(["recall", "--smoke", "--threads", "1", "--out", str(tmp_path)]) == 0
    found = [re.fullmatch(r"relu N=9 loss (\S+)", text) for text, _ in shown]
    losses = [float(match[1]) for match in found if match]
    # after every stride, and falling to the bound
    assert len(losses) == 10
    assert losses[0] > losses[-1] >= 5.0
    # runs that end early are counted in full
    assert sum(steps for _, steps in shown) == 6 * 200


@pytest.mark.parametrize("stop", [20, 40, 100])
def test_a_stop_at_any_stride_changes_no_bit(whole, tmp_path, stop, monkeypatch):
    honest = Trainer.advance

    def stopping(self, steps):
        if int(self.state["time"]) == stop:
            raise KeyboardInterrupt
        honest(self, steps)

    arguments = ["recall", "--smoke", "--threads", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(Trainer, "advance", stopping)
    assert main(arguments) == 130
    assert list(tmp_path.glob("recall.*.checkpoint"))
    monkeypatch.undo()
    starts = []
    monkeypatch.setattr(command, "start", lambda batch: starts.append(batch) or start(batch))
    assert main(arguments) == 0
    assert without_time(rows_of(tmp_path)) == without_time(rows_of(whole))
    # the batch that was stopped went on from its checkpoint
    assert len(starts) < 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_stop_on_a_gpu_changes_no_bit(tmp_path, monkeypatch):
    from sortattn.experiments.recall.gpu import GpuTrainer

    honest = GpuTrainer.advance

    def stopping(self, steps):
        if int(self.state["time"]) == 80:
            raise KeyboardInterrupt
        honest(self, steps)

    arguments = ["recall", "--smoke", "--device", "cuda", "--threads", "1", "--out"]
    monkeypatch.setattr(command, "GPU_STRIDE", 40)
    assert main([*arguments, str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(GpuTrainer, "advance", stopping)
        assert main([*arguments, str(tmp_path / "stopped")]) == 130
    assert list((tmp_path / "stopped").glob("recall.*.checkpoint"))
    assert main([*arguments, str(tmp_path / "stopped")]) == 0
    whole, stopped = (without_time(rows_of(tmp_path / name)) for name in ("whole", "stopped"))
    assert stopped == whole


def test_a_finished_run_trains_nothing_again_unless_fresh(whole, monkeypatch, capsys):
    monkeypatch.setattr(command, "train", lambda *args: pytest.fail("trained again"))
    assert main(["recall", "--smoke", "--threads", "1", "--out", str(whole)]) == 0
    assert "N=9" in capsys.readouterr().out
    with pytest.raises(pytest.fail.Exception):
        main(["recall", "--smoke", "--threads", "1", "--out", str(whole), "--fresh"])


@pytest.mark.parametrize(
    "content",
    [b"", b"no checkpoint", [1], {"plan": None, "state": {}}, None],
    ids=["empty", "text", "list", "no-plan", "another-plan"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_named(tmp_path, capsys, content):
    path = tmp_path / "recall.add_bump-3.checkpoint"
    if content is None:
        torch.save({"plan": {"kernel": "add_bump", "sizes": [3], "seeds": 9}, "state": {}}, path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    arguments = ["recall", "--smoke", "--threads", "1", "--out", str(tmp_path)]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert path.name in message
    assert "--fresh" in message
    if content is None:
        assert "seeds=9, this one has seeds=2" in message
        assert main([*arguments, "--fresh"]) == 0


def test_a_checkpoint_with_wrong_numbers_in_it_is_refused(tmp_path, capsys):
    path = tmp_path / "recall.add_bump-3.checkpoint"
    batch = Batch("add_bump", (3,), 2, 4, "cpu")
    plan = {**asdict(batch), "sizes": [3], "most_steps": 200}
    checkpoint = Checkpoint(path, plan, every=0.0)
    state = start(batch)
    checkpoint.save({"tensors": state, "seconds": [0.0, 0.0]})
    assert torch.equal(checkpoint.load()["tensors"]["tokens"], state["tokens"])
    content = path.read_bytes()
    numbers = state["tokens"].numpy().tobytes()
    assert content.count(numbers) == 1
    path.write_bytes(content.replace(numbers, bytes(len(numbers))))
    assert main(["recall", "--smoke", "--threads", "1", "--out", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert f"{path.name} is no checkpoint (the checksum of" in message
    assert "--fresh" in message


def test_a_checkpoint_runs_no_code(tmp_path, capsys):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("code was run",))

    torch.save({"plan": Trap(), "state": {}}, tmp_path / "recall.add_bump-3.checkpoint")
    assert main(["recall", "--smoke", "--threads", "1", "--out", str(tmp_path)]) == 2
    assert "is no checkpoint" in capsys.readouterr().err


def test_a_loss_below_its_bound_is_an_error(whole, tmp_path, capsys):
    rows = rows_of(whole)
    low = replace(rows[-1], lowest_loss=rows[-1].bound * 0.99)
    write(tmp_path / "recall.csv", Row, [*rows[:-1], low])
    assert main(["recall", "--smoke", "--threads", "1", "--out", str(tmp_path)]) == 1
    assert "below its bound 5.0" in capsys.readouterr().err


def test_the_figure_shows_the_best_seed_the_bounds_and_the_capacities(whole):
    rows = rows_of(whole)
    (axes,) = draw(rows, "conditions").axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    best = [min(row.lowest_loss for row in rows if (row.kernel, row.n) == ("relu", n)) for n in (3, 6, 9)]
    assert lines["relu (1)"] == [max(TARGET, loss) for loss in best]
    assert "add_bump (1.5)" in lines
    assert [2.0, 5.0] in [list(line.get_ydata()) for line in axes.get_lines()]
    assert [4.0, 4.0] in [list(line.get_xdata()) for line in axes.get_lines()]
    assert axes.get_yscale() == "log"
    (name,) = axes.texts
    assert name.get_text() == "relu"
    # no line crosses the name
    assert name.get_window_extent().y0 > axes.get_window_extent().y1


def test_without_matplotlib_the_rows_are_there_and_the_extra_is_named(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write(tmp_path / "recall.csv", Row, rows_of(whole))
    assert main(["recall", "--smoke", "--threads", "1", "--out", str(tmp_path)]) == 0
    assert "pip install 'sortattn[bench]'" in capsys.readouterr().out


@pytest.fixture(scope="module")
def committed():
    return read(ROOT / "benchmarks" / "results" / "recall-h200.csv", Row)


def test_the_committed_run_is_the_papers_keeps_its_bounds_and_stands_in_the_document(committed):
    sizes = (20, 40, 60, 100, 120, 140, 200, 300, 380, 400, 500, 600)
    assert {(row.kernel, row.n, row.seed) for row in committed} == set(product(TRAINED, sizes, range(3)))
    assert {(row.head_dim, row.most_steps) for row in committed} == {(64, 120_000)}
    assert all(row.lowest_loss < TARGET or row.steps == row.most_steps for row in committed)
    assert all(row.lowest_loss >= row.bound * (1 - 1e-4) for row in committed)
    assert loss_table(committed, "markdown") in (ROOT / "docs" / "experiments.md").read_text()


def test_the_committed_run_shows_what_the_document_says_of_it(committed):
    loss = {key: row.lowest_loss for key, row in best(committed).items()}
    sizes = sorted({row.n for row in committed})
    assert {row.adam for row in committed} == {"own"}
    limits = {"softmax": 601, "gauss": 601, "laplace": 601, "add_laplace": 601, "add_bump": 601}
    limits |= {"relu": 64, "elu": 64, "tri": 128, "dpfp": 128, "dpfp_123": 384}
    for kernel, limit in limits.items():
        assert all((loss[kernel, n] < TARGET) == (n < limit) for n in sizes)
    failed = [row for row in committed if row.n < limits.get(row.kernel, 0) and row.lowest_loss >= TARGET]
    assert [(row.kernel, row.n, round(row.lowest_loss)) for row in failed] == [("relu", 60, 2), ("relu", 60, 1)]
    for kernel, capacity in (("elu", 64), ("tri", 128), ("dpfp_123", 384), ("relu", 64)):
        assert all(loss[kernel, n] - (n - capacity) < 0.1 for n in sizes if n > capacity)
    assert all(loss["riesz", n] == max(loss[kernel, n] for kernel in TRAINED) for n in sizes)
    assert [loss["add_riesz", n] for n in (20, 40, 60)] == pytest.approx([0.003, 0.06, 3.7], rel=0.1)
    longest = {row.kernel: 0 for row in committed}
    for row in committed:
        longest[row.kernel] = max(longest[row.kernel], row.steps)
    assert (longest["add_laplace"], longest["add_bump"]) == (26_180, 31_610)
    assert 180 <= max(row.seconds for row in committed) < 190
    assert max(row.seconds for row in committed if row.kernel == "relu") == pytest.approx(14, abs=0.5)


def test_with_the_authors_adam_the_committed_run_shows_what_the_document_says():
    rows = read(ROOT / "benchmarks" / "results" / "recall-h200-authors.csv", Row)
    assert {(row.adam, row.head_dim, row.most_steps) for row in rows} == {("authors", 64, 120_000)}
    loss = {key: row.lowest_loss for key, row in best(rows).items()}
    assert [n for (kernel, n), low in loss.items() if kernel == "add_laplace" and low < TARGET] == [20]
    ends = {("add_laplace", 600): 0.32, ("relu", 60): 5.1, ("elu", 60): 5.0, ("tri", 100): 0.034, ("dpfp", 120): 1.6}
    ends["dpfp_123", 380] = 6.0
    assert {key: loss[key] for key in ends} == pytest.approx(ends, rel=0.05)
    assert all(row.lowest_loss >= row.bound * (1 - 1e-4) for row in rows)


def test_wrong_wishes_are_refused(tmp_path, capsys):
    assert main(["recall", "--kernel", "sofmax", "--out", str(tmp_path)]) == 2
    assert "unknown kernel 'sofmax'" in capsys.readouterr().err
    assert main(["recall", "--device", "toaster", "--out", str(tmp_path)]) == 2
    assert "unknown device 'toaster'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
