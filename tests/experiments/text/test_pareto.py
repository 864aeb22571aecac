import pytest

import sortattn
from sortattn.cli import main
from sortattn.experiments.text import pareto
from sortattn.records import read

from .conftest import make_result


def result(kernel, value, *, model="m", tokens=64, task="t", metric="ndcg@10"):
    return make_result(model=model, kernel=kernel, task=task, tokens=tokens, metric=metric, value=value)


def test_quality_is_the_mean_over_the_tasks_of_the_last_model():
    rows = [
        result("elu", 0.2, model="old"),
        result("elu", 0.4, task="a"),
        result("elu", 0.6, task="b"),
        result("elu", 0.9, tokens=512),
        result("elu", 0.9, metric="spearman"),
    ]
    assert pareto.quality(rows, "elu", 64) == pytest.approx(0.5)
    assert pareto.quality(rows, "gauss", 64) is None
    assert pareto.quality([result("own", 0.7)], "softmax", 64) == 0.7


def test_times_and_scores_come_together(teacher, qmsum, tmp_path, capsys, monkeypatch):
    evaluate = ["text", "eval", teacher, "--qmsum", str(qmsum), "--out", str(tmp_path), "--smoke"]
    measure = [
        "text",
        "pareto",
        teacher,
        "--out",
        str(tmp_path),
        "--smoke",
        "--kernel",
        "elu",
        "--kernel",
        "add_laplace",
    ]
    assert main(measure) == 0
    assert "Plot: none, as no evaluation has these lengths" in capsys.readouterr().out
    assert main(evaluate) == 0
    assert main([*evaluate, "--kernel", "elu"]) == 0
    monkeypatch.setattr(pareto, "measure", lambda *case: pytest.fail("it has measured again"))
    assert main(measure) == 0
    points = read(tmp_path / "pareto.csv", pareto.Point)
    assert [(point.kernel, point.backend) for point in points] == [
        ("softmax", "sdpa"),
        ("elu", "auto"),
        ("add_laplace", "auto"),
    ]
    assert all(point.milliseconds > 0 for point in points)
    printed = capsys.readouterr().out
    assert f"Plot: {tmp_path / 'pareto.png'}" in printed
    assert (tmp_path / "pareto.png").exists()


def test_what_was_measured_before_an_interrupt_is_kept(teacher, tmp_path, capsys, monkeypatch):
    measure = ["text", "pareto", teacher, "--out", str(tmp_path), "--smoke", "--kernel", "elu"]
    whole = pareto.measure

    def once(model, kernel, *case):
        if kernel == "elu":
            raise KeyboardInterrupt
        return whole(model, kernel, *case)

    with monkeypatch.context() as patch:
        patch.setattr(pareto, "measure", once)
        assert main(measure) == 130
    assert len(read(tmp_path / "pareto.csv", pareto.Point)) == 1
    assert main(measure) == 0
    assert len(read(tmp_path / "pareto.csv", pareto.Point)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kernel", "none"], "unknown kernel 'none'"),
        (["--backend", "none"], "unknown backend 'none'"),
        (["--kernel", "gauss", "--backend", "sorted"], "backend 'sorted' cannot serve this call"),
    ],
)
def test_wrong_wishes_are_messages(teacher, tmp_path, capsys, options, message):
    assert main(["text", "pareto", teacher, "--out", str(tmp_path), "--smoke", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_the_attention_interface_is_refused(tmp_path, capsys):
    pytest.importorskip("transformers")
    from ...integrations import tiny

    tiny.build("deberta").save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    assert main(["text", "pareto", str(tmp_path / "model"), "--out", str(tmp_path), "--smoke"]) == 2
    assert "DebertaV2Model of transformers" in capsys.readouterr().err
    # softmax under the name of a kernel is no measurement
    assert not (tmp_path / "pareto.csv").exists()


def test_bandwidths_of_another_kernel_are_a_message(teacher, tmp_path, capsys):
    from ...integrations import tiny

    model = tiny.transformers.AutoModel.from_pretrained(teacher)
    sortattn.convert(model, "elu", bandwidth=2.0).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    words = ["text", "pareto", str(tmp_path / "model"), "--out", str(tmp_path), "--smoke"]
    assert main([*words, "--kernel", "elu", "--kernel", "gauss"]) == 2
    assert "gauss (auto), 64 tokens: the bandwidths of this model are for the kernel 'elu'" in capsys.readouterr().err


def test_a_damaged_file_is_named(teacher, tmp_path, capsys):
    (tmp_path / "pareto.csv").write_text("kernel,backend\nelu,auto\n")
    assert main(["text", "pareto", teacher, "--out", str(tmp_path), "--smoke"]) == 2
    assert (
        "pareto.csv is not a results file of this version: expected the columns kernel, backend"
        in capsys.readouterr().err
    )
