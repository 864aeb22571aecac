"""`sortattn vision` to the end, interrupted and continued, and given nonsense."""

import csv
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from sortattn.cli import _parser, main
from sortattn.experiments.vision.batches import Batches


def smoke(stage, *words):
    return main(["vision", stage, *map(str, words), "--smoke"])


def read(path):
    return list(csv.DictReader(path.open()))


def left_by(folder):
    """All that a run has left, but for how long it took."""
    from safetensors.torch import load_file

    losses = [{**row, "seconds": ""} for row in read(folder / "losses.csv")]
    weights = load_file(next(folder.glob("*/model.safetensors")))
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    return losses, read(folder / "accuracy.csv"), state["step"], weights


def assert_same(one, other):
    *here, weights = left_by(one)
    *there, others = left_by(other)
    assert here == there
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def interrupt_after(monkeypatch, count):
    left = iter(range(count))
    draw = Batches.__call__

    def batch(self, number):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return draw(self, number)

    monkeypatch.setattr(Batches, "__call__", batch)


def test_every_stage_has_its_row_and_its_curves(teacher, student):
    (first,) = read(teacher.parent / "vision.csv")
    layerwise, last = read(student / "vision.csv")
    assert [row["stage"] for row in (first, layerwise, last)] == ["scratch", "layerwise", "end-to-end"]
    assert (first["steps"], first["epochs"], first["teacher"]) == ("8", "2.0", "")
    assert (last["steps"], last["layerwise_steps"], last["kernel"]) == ("4", "4", "elu")
    assert last["teacher"] == first["accuracy"]
    assert all(row["machine"] and row["torch"] and row["transformers"] for row in (first, layerwise, last))
    for folder in (teacher, student / "layerwise-elu", student / "end-to-end-elu"):
        points = read(folder / "accuracy.csv")
        assert [int(point["step"]) for point in points] == list(range(2, len(points) * 2 + 1, 2))
        assert (folder / "curves.png").exists()
    assert float(points[-1]["accuracy"]) == pytest.approx(float(last["accuracy"]), abs=1e-4)


def test_a_compiled_model_learns_the_same(teacher, tmp_path, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **more: compiled(self, backend=backend, **more))
    assert smoke("scratch", "--out", tmp_path, "--compile") == 0
    # one for the steps; tests of the model, with batches of another size, are not compiled
    assert len(graphs) == 1
    plain, (losses, *_) = left_by(teacher)[0], left_by(tmp_path / "scratch-softmax")
    assert [float(row["loss"]) for row in losses] == pytest.approx([float(row["loss"]) for row in plain], rel=1e-4)
    # roundings may differ, so a checkpoint is continued as it was begun
    assert smoke("scratch", "--out", tmp_path) == 2


def test_a_copy_of_softmax_is_its_teacher_and_is_not_counted_twice(teacher, tmp_path, capsys):
    for _ in range(2):
        assert smoke("copy", teacher, "--kernel", "softmax", "gauss", "--out", tmp_path) == 0
    softmax, gauss = read(tmp_path / "vision.csv")
    assert softmax["accuracy"] == softmax["teacher"]
    printed = capsys.readouterr().out
    # the paper's figures for gauss stand beside ours
    assert all(number in printed for number in ("96.70", "96.10", "96.56", "96.55", "Table 6"))
    assert gauss["stage"] == "copy"


@pytest.mark.parametrize(("stage", "batches"), [("scratch", 5), ("layerwise", 3), ("end-to-end", 7)])
def test_an_interrupted_run_continues_exactly(stage, batches, teacher, student, tmp_path, capsys, monkeypatch):
    words = ["--out", tmp_path] if stage == "scratch" else [teacher, "--kernel", "elu", "--out", tmp_path]
    with monkeypatch.context() as patch:
        interrupt_after(patch, batches)
        assert smoke(stage, *words) == 130
    assert "The same command continues from the last checkpoint" in capsys.readouterr().err
    assert smoke(stage, *words) == 0
    if stage == "scratch":
        assert_same(tmp_path / "scratch-softmax", teacher)
    else:
        assert_same(tmp_path / f"{stage}-elu", student / f"{stage}-elu")


def test_a_finished_run_is_not_trained_again(teacher, student, tmp_path, monkeypatch):
    shutil.copytree(student, tmp_path / "run")
    interrupt_after(monkeypatch, 0)
    # elsewhere too: its row says where it was trained
    monkeypatch.setattr("sortattn.bench.machine.cpu_model", lambda: "another")
    assert smoke("end-to-end", teacher, "--kernel", "elu", "--out", tmp_path / "run") == 0
    assert read(tmp_path / "run" / "vision.csv") == read(student / "vision.csv")


def test_sixteen_bits_train_other_weights(teacher, tmp_path):
    losses = {}
    for precision in ("bf16", "fp32"):
        out = tmp_path / precision
        assert smoke("layerwise", teacher, "--kernel", "add_laplace", "--precision", precision, "--out", out) == 0
        (row,) = read(out / "vision.csv")
        assert (row["precision"], row["bandwidth"]) == (precision, "0.5")
        losses[precision] = [float(line["loss"]) for line in read(out / "layerwise-add_laplace" / "losses.csv")]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.5)
    assert all(one != other for one, other in zip(*losses.values(), strict=True))


def test_bandwidths_are_learned_if_asked_for(teacher, tmp_path):
    from safetensors.torch import load_file

    for stage, words in (("scratch", ["--kernel", "gauss"]), ("layerwise", [teacher, "--kernel", "gauss"])):
        assert smoke(stage, *words, "--learn-bandwidth", "--out", tmp_path) == 0
        weights = load_file(tmp_path / f"{stage}-gauss" / stage / "model.safetensors")
        learned = [part for name, part in weights.items() if name.endswith("log_bandwidth")]
        assert len(learned) == 2
        assert all(len(part.unique()) == 2 for part in learned)
    assert [row["learned"] for row in read(tmp_path / "vision.csv")] == ["True", "True"]
    assert smoke("layerwise", teacher, "--kernel", "gauss", "--out", tmp_path) == 2


def test_two_processes_train_one_model(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    words = ["-m", "sortattn", "vision", "scratch", "--kernel", "elu", "--smoke", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Test accuracy in per cent") == 1
    (row,) = read(tmp_path / "vision.csv")
    # 64 images in batches of two times 16
    assert (row["processes"], row["steps"], row["epochs"]) == ("2", "4", "2.0")
    assert len(read(tmp_path / "scratch-elu" / "losses.csv")) == 4


def test_the_options_are_the_papers_settings():
    scratch = _parser().parse_args(["vision", "scratch"])
    assert (scratch.kernel, scratch.epochs, scratch.batch) == (["softmax"], 1000, 128)
    last = _parser().parse_args(["vision", "end-to-end", "teacher"])
    assert (last.layerwise_steps, last.end_to_end_steps, len(last.kernel)) == (10_000, 50_000, 10)


def test_another_seed_is_another_run(teacher, capsys):
    assert smoke("scratch", "--seed", 1, "--out", teacher.parent) == 2
    assert "was made with seed=0, this run has seed=1; choose another folder" in capsys.readouterr().err


def test_a_full_disk_is_a_message_and_the_checkpoint_stays(teacher, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        assert smoke("scratch", "--out", tmp_path) == 130
    before = (tmp_path / "scratch-softmax" / "checkpoint.pt").read_bytes()

    def full(state, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert smoke("scratch", "--out", tmp_path) == 2
    assert "No space left on device; the last checkpoint" in capsys.readouterr().err
    assert (tmp_path / "scratch-softmax" / "checkpoint.pt").read_bytes() == before


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("image_size", 64, "has image_size=64, expected 32"),
        ("num_hidden_layers", 3, "are of another shape than its config: missing_keys vit."),
        ("hidden_size", 32, "of another shape than its config: m"),
        ("model_type", "bert", "has model_type='bert', expected 'vit'"),
    ],
)
def test_a_teacher_of_another_shape_is_refused(entry, value, message, teacher, tmp_path, capsys):
    shutil.copytree(teacher / "scratch", tmp_path / "teacher")
    path = tmp_path / "teacher" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, entry: value}))
    assert smoke("copy", tmp_path / "teacher", "--out", tmp_path) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_teacher_must_have_softmax(student, tmp_path, capsys):
    assert smoke("copy", student / "layerwise-elu" / "layerwise", "--out", tmp_path) == 2
    assert "expected a teacher with softmax, the one in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scratch", "--kernel", "laplac", "--smoke"], "unknown kernel 'laplac', expected one of softmax"),
        (["scratch", "--bandwidth", "-1", "--smoke"], "bandwidth must be positive, got -1.0"),
        (["scratch"], "expected --data FOLDER with CIFAR-10"),
        (["scratch", "--data", "nowhere"], "no folder nowhere; expected one with data_batch_1.bin"),
        (["scratch", "--device", "cuda:7", "--smoke"], "torch finds no CUDA device here"),
        (["copy", "nowhere", "--smoke"], "no model in nowhere: expected the folder that `sortattn vision scratch`"),
        (["layerwise", "EMPTY", "--smoke"], "cannot load the model in"),
    ],
)
def test_wrong_wishes_are_messages(words, message, tmp_path, capsys):
    pytest.importorskip("transformers")
    if torch.cuda.is_available() and "--device" in words:
        pytest.skip("there is a CUDA device")
    (tmp_path / "config.json").write_text("{}")
    words = [str(tmp_path) if word == "EMPTY" else word for word in words]
    assert main(["vision", *words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
