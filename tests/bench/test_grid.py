"""`sortattn grid`: its table, its file, and what it refuses."""

import csv
from pathlib import Path

import pytest
import torch

from sortattn.bench import report
from sortattn.bench.grid import COLUMNS, DATA
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
    assert tuple(rows[0]) == COLUMNS
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


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--kernel", "cosine"], "unknown kernel 'cosine'"),
        (["--kernel", "softmax"], "a grid sums additive kernels"),
        (["--nodes", "4"], "must name a whole number of nodes from 8 to 1024"),
        (["--activations", "."], "expected files NAME.pt"),
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


def test_the_tables_of_the_document_are_those_of_the_results():
    document = ROOT / "docs" / "grid.md"
    assert report.main([str(document), "--results", str(ROOT / "benchmarks" / "results"), "--check"]) == 0


def test_a_file_of_another_kind_is_told(tmp_path, capsys):
    (tmp_path / "errors.csv").write_text("kernel,backend\n")
    (tmp_path / "page.md").write_text("<!-- grid:errors -->\n<!-- /grid:errors -->\n")
    assert report.main([str(tmp_path / "page.md"), "--results", str(tmp_path)]) == 2
    assert "is not a results file of this version" in capsys.readouterr().err
