"""A small teacher and small files."""

import json

import pytest

from sortattn.experiments.text.results import Result
from sortattn.records import columns

TEXTS = ["a cat sat on the mat", "the cat slept all day", "day and mat", "on a mat", "search a document", "all the day"]


def make_result(**facts):
    """A row of results, with these facts and others."""
    named = {
        "model": "m",
        "kernel": "own",
        "task": "t",
        "metric": "ndcg@10",
        "device": "cpu",
        "date": "2026-01-01 00:00",
    }
    others = {"tokens": 64, "limit": 0, "prefixes": True, "value": 0.5, "texts": 1, "seconds": 1.0}
    return Result(**{**dict.fromkeys(columns(Result), ""), **named, **others, **facts})


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """The folder of a small NomicBert with its tokenizer, for 32 positions."""
    # not above: without transformers the tests that need it are left out, and the others are not
    pytest.importorskip("transformers")
    from ...integrations import tiny

    folder = tmp_path_factory.mktemp("teacher")
    tiny.build("nomic", max_position_embeddings=32).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def sts(tmp_path):
    """Pairs of sentences."""
    path = tmp_path / "pairs.csv"
    rows = [f'"{one}",{two},{score}' for score, (one, two) in enumerate(zip(TEXTS, TEXTS[1:], strict=False))]
    path.write_text("\n".join(["sentence1,sentence2,score", *rows]) + "\n")
    return path


@pytest.fixture
def cranfield(tmp_path):
    """Six documents, two queries."""
    folder = tmp_path / "abstracts"
    folder.mkdir()
    rows = [json.dumps({"id": str(place), "text": text}) for place, text in enumerate(TEXTS)]
    (folder / "corpus.jsonl").write_text("\n".join(rows) + "\n")
    queries = [{"id": "a", "text": "the cat"}, {"id": "b", "text": "mat"}, {"id": "c", "text": "nothing"}]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)) + "\n")
    (folder / "qrels.txt").write_text("a 0 0 1\na 0 1 2\nb 0 3 1\nb 0 2 0\n")
    return folder


@pytest.fixture
def qmsum(tmp_path):
    """Meetings with their queries."""
    path = tmp_path / "val.jsonl"
    rows = [
        {
            "id": str(place),
            "text": " ".join([text] * 20),
            "queries": [f"the {place} day", text],
            "general_queries": ["a"],
        }
        for place, text in enumerate(TEXTS)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path
