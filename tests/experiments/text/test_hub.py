"""MTEB and LoCo on tasks that are here: a few pairs and documents."""

import csv
import sys

import pytest

from sortattn.cli import main
from sortattn.errors import CommandError
from sortattn.experiments.text import data, evaluate, hub
from sortattn.experiments.text.encoder import Encoder, load

from .conftest import TEXTS


@pytest.fixture
def encoder(teacher):
    pytest.importorskip("mteb")
    return Encoder(*load(teacher, tokens=32), 32)


def sts_task():
    from datasets import Dataset
    from mteb.abstasks import AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    class Tiny(AbsTaskSTS):
        metadata = TaskMetadata(
            name="Tiny", description="A few pairs.", dataset={"path": "none/none", "revision": "0"}, type="STS",
            category="t2t", eval_splits=["test"], eval_langs=["eng-Latn"], main_score="cosine_spearman",
        )  # fmt: skip
        min_score, max_score = 0, 5

        def load_data(self, *arguments, **options):
            rows = [
                {"sentence1": one, "sentence2": two, "score": float(score)}
                for score, (one, two) in enumerate(zip(TEXTS, TEXTS[1:], strict=False))
            ]
            self.dataset, self.data_loaded = {"test": Dataset.from_list(rows)}, True

    return hub.HubTask("mteb-Tiny", Tiny())


def fake_loco(monkeypatch):
    """LoCo's two tables with two parts, one of them a document without a text."""
    datasets = pytest.importorskip("datasets")
    passages = [{"dataset": "qmsum", "pid": f"p{place}", "passage": text} for place, text in enumerate(TEXTS)]
    passages += [{"dataset": "qmsum", "pid": "none", "passage": None}, {"dataset": "x", "pid": "o", "passage": "a mat"}]
    queries = [
        {"dataset": "qmsum", "qid": f"q{place}", "query": " ".join(text.split()[::-1]), "answer_pids": [f"p{place}"]}
        for place, text in enumerate(TEXTS)
    ]
    queries += [{"dataset": "qmsum", "qid": "lost", "query": "a", "answer_pids": ["none"]}]
    tables = {hub.LOCO_DOCUMENTS: passages, hub.LOCO_QUERIES: queries}
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: datasets.Dataset.from_list(tables[name]))


def test_mteb_finds_the_correlation_that_we_find(encoder, sts):
    metric, value, texts = hub.evaluate_hub(encoder, sts_task(), True, lambda count: None)
    assert (metric, texts) == ("cosine_spearman", 10)
    assert value == pytest.approx(evaluate.similarity(encoder, data.read_sts(sts, data.Report()), True), abs=1e-4)


def test_a_part_of_loco_is_the_retrieval_that_we_find(encoder, monkeypatch):
    fake_loco(monkeypatch)
    (task,) = [task for task in hub.hub_tasks(["LoCo"]) if task.name == "mteb-LoCo-qmsum"]
    metric, value, texts = hub.evaluate_hub(encoder, task, True, lambda count: None)
    assert (metric, texts) == ("ndcg_at_10", 12)
    documents = {f"p{place}": text for place, text in enumerate(TEXTS)}
    queries = {f"q{place}": " ".join(text.split()[::-1]) for place, text in enumerate(TEXTS)}
    gains = {f"q{place}": {f"p{place}": 1.0} for place in range(len(TEXTS))}
    ours = evaluate.retrieval(encoder, data.Retrieval("loco", documents, queries, gains), True)
    assert value == pytest.approx(ours, abs=1e-5)


def test_prefixes_are_nomics():
    assert hub.prefix("Retrieval", "query") == "search_query: "
    assert hub.prefix("Retrieval", "document") == "search_document: "
    assert hub.prefix("Clustering", None) == "clustering: "
    assert hub.prefix("STS", None) == "classification: "


def test_the_command_keeps_the_scores(teacher, tmp_path, monkeypatch):
    pytest.importorskip("mteb")
    monkeypatch.setattr(hub, "hub_tasks", lambda names: [sts_task()])
    arguments = ["text", "eval", teacher, "--mteb", "Tiny", "--mteb-tokens", "16", "--out", str(tmp_path)]
    assert main(arguments) == 0
    (row,) = csv.DictReader((tmp_path / "results.csv").open())
    assert (row["task"], row["tokens"], row["metric"], row["texts"]) == ("mteb-Tiny", "16", "cosine_spearman", "10")
    # it is not asked again
    monkeypatch.setattr(hub, "evaluate_hub", None)
    assert main(arguments) == 0


def test_benchmarks_are_known_by_name():
    pytest.importorskip("mteb")
    assert len(hub.hub_tasks(["MTEB(eng, v2)"])) == 41
    assert len(hub.hub_tasks(["LoCo", "STSBenchmark"])) == 13
    with pytest.raises(CommandError, match="mteb knows no benchmark and no task 'MTEB 3'"):
        hub.hub_tasks(["MTEB 3"])


def test_without_the_hub_there_is_a_message(encoder, monkeypatch):
    def nobody(*arguments, **options):
        raise OSError("nobody answers")

    (task,) = hub.hub_tasks(["STSBenchmark"])
    monkeypatch.setattr(task.task, "load_data", nobody)
    with pytest.raises(CommandError, match=r"cannot evaluate mteb-STSBenchmark: its data .* \(nobody answers\)"):
        hub.evaluate_hub(encoder, task, True, lambda count: None)


def test_without_mteb_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(CommandError, match=r"pip install 'sortattn\[mteb\]'"):
        hub.hub_tasks(["LoCo"])
