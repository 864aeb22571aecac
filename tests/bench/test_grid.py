"""`sortattn grid`: its table, its file, and what it refuses."""

import csv
from pathlib import Path

import pytest
import torch

from sortattn import records
from sortattn.bench import report
from sortattn.bench.grid import DATA, Row
from sortattn.cli import main

SMALL = ["--kernel", "add_riesz", "--nodes", "16", "64", "--length", "300", "--heads", "1", "--head-dim", "4"]


ROOT = Path(__file__).parents[2]


def rows_of(path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_it_tabulates_every_kind_of_data(tmp_path, capsys):
    assert main(["grid", *SMALL, "--out", str(tmp_path), "--name", "errors"]) == 0
    rows = rows_of(tmp_path / "errors.csv")
    assert [(row["data"], row["nodes"]) for row in rows] == [(name, count) for name in DATA for count in ("16", "64")]
    assert tuple(rows[0]) == records.columns(Row)
    assert all(row["torch"] and row["date"] and row["machine"] for row in rows)
    few, many = rows[:2]
    assert float(many["error"]) < float(few["error"]) / 4
    assert 1e-3 < float(few["bfloat16"]) < 2e-2
    assert float(few["float16"]) < float(few["bfloat16"]) / 4
    printed = capsys.readouterr().out
    assert "G=16" in printed
    assert "clusters" in printed


def test_it_takes_activations_from_a_folder(tmp_path):
    parts = {name: torch.randn(2, 100, 4, dtype=torch.float16) for name in ("query", "key", "value")}
    torch.save(parts, tmp_path / "layer0.pt")
    assert main(["grid", *SMALL, "--activations", str(tmp_path), "--out", str(tmp_path)]) == 0
    assert {(row["data"], row["n"], row["heads"]) for row in rows_of(tmp_path / "grid.csv")} == {("layer0", "100", "2")}


def test_it_listens_to_every_layer_of_a_model(tmp_path):
    pytest.importorskip("transformers")
    from ..integrations import tiny

    model = tiny.build("nomic", max_position_embeddings=64)
    model.save_pretrained(tmp_path / "small")
    tiny.tokenizer().save_pretrained(tmp_path / "small")
    text = tmp_path / "text"
    text.write_text("a cat sat on the mat all day and the cat slept " * 9)
    given = ["--model", str(tmp_path / "small"), "--text", str(text), "--tokens", "20", "40"]
    assert main(["grid", *SMALL, *given, "--out", str(tmp_path)]) == 0
    rows = rows_of(tmp_path / "grid.csv")
    heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
    assert {row["heads"] for row in rows} == {str(heads)}
    assert {row["data"] for row in rows} == {f"small-{n}-layer{i:02d}" for n in (20, 40) for i in range(layers)}
    # different layers see different points
    assert len({row["float16"] for row in rows}) > layers


def test_what_it_hears_makes_the_output_of_the_attention(tmp_path):
    pytest.importorskip("transformers")
    from sortattn.bench.layers import layers

    from ..integrations import tiny

    model = tiny.build("llama").model.eval()
    model.save_pretrained(tmp_path / "small")
    tiny.tokenizer().save_pretrained(tmp_path / "small")
    (tmp_path / "text").write_text("a cat sat on the mat all day " * 9)
    heard = dict(layers(str(tmp_path / "small"), tmp_path / "text", [12], "cpu"))
    query, key, value = heard["small-12-layer00"]
    # grouped heads are told apart
    assert query.shape[0] == key.shape[0] == value.shape[0] == model.config.num_attention_heads
    seen = []
    attention = model.layers[0].self_attn
    attention.o_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    words = tiny.tokenizer()("a cat sat on the mat all day " * 9, truncation=True, max_length=12, return_tensors="pt")
    with torch.no_grad():
        model(words["input_ids"])
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(output.transpose(0, 1).reshape(seen[0][0].shape), seen[0][0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--kernel", "cosine"], "unknown kernel 'cosine'"),
        (["--kernel", "softmax"], "a grid sums additive kernels"),
        (["--nodes", "4"], "must name a whole number of nodes from 8 to 1024"),
        (["--activations", "."], "expected files NAME.pt"),
        (["--model", "somewhere"], "--model and --text need each other"),
        (["--device", "cube"], "unknown device 'cube'"),
        (["--model", "a", "--text", "b", "--activations", "."], "expected --model or --activations, got both"),
    ],
)
def test_a_wrong_wish_is_told(wrong, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["grid", *wrong]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_files_that_hold_something_else_are_told(tmp_path, capsys):
    torch.save({"query": torch.zeros(1, 2, 3)}, tmp_path / "layer0.pt")
    assert main(["grid", "--activations", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "layer0.pt must hold a dict with query, key and value" in capsys.readouterr().err
    (tmp_path / "layer0.pt").write_text("no tensors")
    assert main(["grid", "--activations", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "layer0.pt cannot be read as tensors saved by torch.save" in capsys.readouterr().err


def test_the_committed_rows_show_what_the_document_says():
    for name, largest in (("grid-nomic-h200", 72), ("grid-cpu", None)):
        rows = records.read(ROOT / "benchmarks" / "results" / f"{name}.csv", Row)
        assert all(row.error / 3 < row.estimate < 10 * row.error for row in rows if row.error > 1e-5)
        if largest:
            fine = [row for row in rows if row.nodes == 64]
            # 12 layers, 3 kernels, 2 lengths
            assert len(fine) == largest
            assert all(row.error < row.bfloat16 for row in fine)
            assert all(row.error < row.float16 for row in fine if row.kernel != "add_laplace")


def test_the_tables_of_the_document_are_those_of_the_results():
    document = ROOT / "docs" / "grid.md"
    assert report.main([str(document), "--results", str(ROOT / "benchmarks" / "results"), "--check"]) == 0


def test_a_file_of_another_kind_is_told(tmp_path, capsys):
    (tmp_path / "errors.csv").write_text("kernel,backend\n")
    (tmp_path / "page.md").write_text("<!-- grid:errors -->\n<!-- /grid:errors -->\n")
    assert report.main([str(tmp_path / "page.md"), "--results", str(tmp_path)]) == 2
    assert "is not a results file of this version" in capsys.readouterr().err
