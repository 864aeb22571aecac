"""`sortattn text` to the end, interrupted and continued, and given nonsense."""

import csv
import gzip

import pytest
import torch

from sortattn.cli import _parser, main
from sortattn.experiments.text import command
from sortattn.experiments.text.batches import Prepared


def distill(teacher, data, out, *options):
    return main(["text", "distill", teacher, "--data", str(data), "--out", str(out), "--smoke", *options])


def student(out):
    from safetensors.torch import load_file

    return load_file(out / "add_laplace" / "end-to-end" / "model.safetensors")


def interrupt_after(monkeypatch, count):
    left = iter(range(count))
    draw = Prepared.__call__

    def batch(self, number):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return draw(self, number)

    monkeypatch.setattr(Prepared, "__call__", batch)


def test_distil_and_evaluate_to_the_end(teacher, sts, cranfield, qmsum, tmp_path, capsys):
    out = tmp_path / "run"
    folder = out / "add_laplace"
    assert distill(teacher, qmsum, out, "--learn-bandwidth") == 0
    printed = capsys.readouterr().out
    assert "add_laplace, layerwise: loss" in printed
    assert f"Student: {folder / 'end-to-end'}" in printed
    assert (folder / "losses.png").exists()
    tasks = ["--sts", str(sts), "--cranfield", str(cranfield), "--qmsum", str(qmsum), "--lengths", "16", "48"]
    arguments = ["text", "eval", str(folder / "end-to-end"), *tasks, "--out", str(out)]
    assert main(arguments) == 0
    rows = list(csv.DictReader((out / "results.csv").open()))
    assert [(row["task"], row["tokens"], row["metric"]) for row in rows] == [
        ("pairs", "512", "spearman"),
        ("abstracts", "512", "ndcg@10"),
        ("qmsum-val", "16", "ndcg@10"),
        ("qmsum-val", "48", "ndcg@10"),
    ]
    assert all(-1 <= float(row["value"]) <= 1 for row in rows)
    assert capsys.readouterr().out.count("ndcg@10") == 3


def test_an_interrupted_distillation_continues_exactly(teacher, sts, tmp_path, capsys, monkeypatch):
    assert distill(teacher, sts, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, 7)
        assert distill(teacher, sts, tmp_path / "parts") == 130
    assert "The same command continues from the last checkpoint" in capsys.readouterr().err
    assert distill(teacher, sts, tmp_path / "parts") == 0
    whole, parts = student(tmp_path / "whole"), student(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_an_evaluation_does_not_repeat_itself(teacher, sts, cranfield, tmp_path, capsys, monkeypatch):
    arguments = ["text", "eval", teacher, "--sts", str(sts), "--out", str(tmp_path), "--smoke"]
    assert main(arguments) == 0
    first = (tmp_path / "results.csv").read_text()

    def never(*arguments, **options):
        raise AssertionError("it has measured again")

    with monkeypatch.context() as patch:
        patch.setattr(command, "load", never)
        assert main(arguments) == 0
        assert (tmp_path / "results.csv").read_text() == first
        with pytest.raises(AssertionError, match="measured again"):
            main([*arguments, "--fresh"])
    # interrupted in the second task, the first is kept
    with monkeypatch.context() as patch:
        patch.setattr(command, "retrieval", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main([*arguments, "--cranfield", str(cranfield)]) == 130
    assert (tmp_path / "results.csv").read_text() == first


def test_kernels_may_replace_the_attention_for_an_evaluation(teacher, sts, tmp_path):
    for options in ([], ["--kernel", "softmax", "gauss"]):
        assert main(["text", "eval", teacher, "--sts", str(sts), "--out", str(tmp_path), *options]) == 0
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [row["kernel"] for row in rows] == ["own", "softmax", "gauss"]
    assert rows[0]["value"] == rows[1]["value"] != rows[2]["value"]


def test_several_models_are_evaluated_and_loaded_as_often_as_needed(teacher, qmsum, tmp_path, monkeypatch):
    loaded = []
    load = command.load
    monkeypatch.setattr(
        command, "load", lambda name, **options: loaded.append(options["tokens"]) or load(name, **options)
    )
    assert distill(teacher, qmsum, tmp_path, "--kernel", "tri", "elu") == 0
    models = [str(tmp_path / kernel / "end-to-end") for kernel in ("tri", "elu")]
    lengths = ["--lengths", "8", "16", "48", "64"]
    assert main(["text", "eval", *models, "--qmsum", str(qmsum), *lengths, "--out", str(tmp_path)]) == 0
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert [(row["model"], row["kernel"]) for row in rows[::4]] == [(models[0], "tri"), (models[1], "elu")]
    # 32 positions were trained
    assert loaded == [8, 48, 64] * 2


def test_the_options_are_the_papers_settings():
    options = _parser().parse_args(["text", "distill", "teacher", "--data", "texts"])
    settings = (options.layerwise_steps, options.end_to_end_steps, options.tokens, options.batch, options.accumulation)
    assert settings == (10_000, 10_000, 512, 16, 1)
    assert (options.bandwidth, options.lengths, options.prefixes) == (None, None, True)


def test_broken_lines_are_shown_and_the_rest_is_used(teacher, sts, tmp_path, capsys):
    with sts.open("a") as file:
        file.write("broken\n" * 7)
    assert main(["text", "eval", teacher, "--sts", str(sts), "--out", str(tmp_path)]) == 0
    errors = capsys.readouterr().err
    assert f"{sts}, line 7: expected 3 fields, got 1; left out" in errors
    assert "... and 2 more lines" in errors


def test_other_texts_are_another_run(teacher, sts, qmsum, tmp_path, capsys):
    assert distill(teacher, sts, tmp_path / "run") == 0
    assert distill(teacher, qmsum, tmp_path / "run") == 2
    assert "was made with data='10 texts, " in capsys.readouterr().err


def test_a_full_disk_is_a_message(teacher, sts, tmp_path, capsys, monkeypatch):
    def full(state, file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert distill(teacher, sts, tmp_path / "run") == 2
    assert "No space left on device; the last checkpoint" in capsys.readouterr().err


def test_a_model_that_finds_no_room_is_a_message(teacher, sts, tmp_path, capsys, monkeypatch):
    from safetensors import SafetensorError
    from transformers import PreTrainedModel

    def full(self, folder):
        folder.mkdir()
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", full)
        assert distill(teacher, sts, tmp_path / "run") == 2
    assert "No space left on device (os error 28)); the last checkpoint" in capsys.readouterr().err
    assert distill(teacher, sts, tmp_path / "run") == 0
    assert distill(teacher, sts, tmp_path / "whole") == 0
    one, other = student(tmp_path / "run"), student(tmp_path / "whole")
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("words", [["eval", "--sts", "STS"], ["pareto", "--kernel", "elu"]])
def test_results_that_cannot_be_written_are_a_message(words, teacher, sts, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    what, *words = [str(sts) if word == "STS" else word for word in words]
    assert main(["text", what, teacher, *words, "--smoke", "--out", str(tmp_path / "file" / "run")]) == 2
    assert "cannot be written: expected a folder with leave to write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "TEACHER"], "expected something to evaluate on: --sts FILE"),
        (["eval", "TEACHER", "--kernel", "laplac", "--sts", "STS"], "unknown kernel 'laplac', expected one of softmax"),
        (["eval", "TEACHER", "--sts", "nowhere.csv"], "cannot read nowhere.csv"),
        (["eval", "/no/where", "--sts", "STS"], "cannot load the model /no/where: no such folder"),
        (["distill", "TEACHER", "--kernel", "laplac", "--data", "STS"], "unknown kernel 'laplac'"),
        (["distill", "TEACHER", "--data", "EMPTY"], "found no texts in"),
        (["distill", "TEACHER", "--data", "STS", "--device", "cuda:7"], "torch finds no CUDA device here"),
        (["distill", "TEACHER", "--data", "STS", "--bandwidth", "-1"], "bandwidth must be positive, got -1.0"),
    ],
)
def test_wrong_wishes_are_messages(arguments, message, teacher, sts, tmp_path, capsys):
    if torch.cuda.is_available() and "--device" in arguments:
        pytest.skip("there is a CUDA device")
    empty = tmp_path / "empty.jsonl.gz"
    empty.write_bytes(gzip.compress(b""))
    names = {"TEACHER": teacher, "STS": str(sts), "EMPTY": str(empty)}
    arguments = [names.get(word, word) for word in arguments]
    assert main(["text", *arguments, "--out", str(tmp_path / "out"), "--smoke"]) == 2
    assert message in capsys.readouterr().err
