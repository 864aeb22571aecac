"""The table of scores."""

import csv

from sortattn.cli import main
from sortattn.experiments.text.results import Result
from sortattn.experiments.text.scores import published, score_table
from sortattn.records import write

from .conftest import make_result


def test_every_model_has_a_line_and_the_newest_score_counts():
    rows = [
        make_result(task="sts", value=0.9),
        make_result(task="sts", value=0.8),
        make_result(model="tri/end-to-end", kernel="tri", task="sts", value=0.7),
        make_result(model="tri/end-to-end", kernel="tri", task="qmsum", tokens=2048, value=0.6),
    ]
    lines = list(csv.DictReader(score_table(rows, "csv").splitlines()))
    assert [line["sts 64"] for line in lines] == ["0.8000", "0.7000"]
    assert [line["qmsum 2,048"] for line in lines] == ["", "0.6000"]
    # the teacher stands beside the paper's
    assert [line["paper: MTEB"] for line in lines] == ["64.41", "61.53"]


def test_the_command_says_where_the_scores_come_from(tmp_path, capsys):
    write(tmp_path / "results.csv", Result, [make_result(accelerator="a GPU", torch="9.9")])
    assert main(["text", "table", str(tmp_path / "results.csv"), "--format", "markdown"]) == 0
    printed = capsys.readouterr().out
    assert "| m " in printed
    assert "ndcg@10 on t. a GPU; torch 9.9" in printed
    assert "Table 3" in printed
    assert main(["text", "table", str(tmp_path / "nowhere.csv")]) == 2
    assert "no scores in" in capsys.readouterr().err


def test_the_papers_table_is_complete():
    found, source = published()
    assert len(found) == 11
    assert (found["add_bump"]["loco-8192"], found["relu"]["loco-2048"]) == ("0.859", "0.472")
    assert "Table 3" in source
