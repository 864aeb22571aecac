"""What docs/convert-your-model.md shows is run, on small models."""

import gzip
import json
import re
import shlex
from pathlib import Path

import pytest

from sortattn.cli import main

from .integrations import tiny

sentence_transformers = pytest.importorskip("sentence_transformers")
TEXT = (Path(__file__).parents[1] / "docs" / "convert-your-model.md").read_text()
TEACHER = "nomic-ai/nomic-embed-text-v1.5"


COMMANDS = re.findall(r"^sortattn .*$", TEXT, re.MULTILINE)

pytestmark = pytest.mark.skipif(tiny.VERSION < 5, reason="NomicBert is not there in transformers 4")


@pytest.fixture
def teacher(tmp_path, monkeypatch):
    """A small teacher in the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "nomic-embed-text-v1.5"
    tiny.build("nomic").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def write_data(folder):
    """Small files under the names that the guide uses."""
    texts = ["a cat sat", "the mat", "all day", "a document"]
    rows = [{"id": str(place), "text": text, "queries": [text]} for place, text in enumerate(texts)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "passages.jsonl").write_text(lines)
    (folder / "val.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "stsb-dev.csv").write_text("sentence1,sentence2,score\na cat,a mat,1\nthe day,all day,3\na,a,5\n")
    (folder / "cranfield").mkdir()
    (folder / "cranfield" / "corpus.jsonl").write_text(lines)
    (folder / "cranfield" / "queries.jsonl").write_text(lines)
    (folder / "cranfield" / "qrels.txt").write_text("0 0 1 1\n")


def test_the_commands_run(teacher, tmp_path):
    write_data(tmp_path)
    assert len(COMMANDS) == 4
    for command in COMMANDS:
        assert main([*shlex.split(command)[1:], "--smoke"]) == 0, command


def test_the_python_examples_run(teacher, tmp_path):
    space = {}
    for example in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(example.replace(TEACHER, str(teacher)), space)
    assert space["encoder"].encode("a cat").shape == (32,)
    assert (tmp_path / "my-model" / "config.json").exists()
    assert len(space["rows"]) == 4
    assert space["student"].config._attn_implementation == "sortattn_add_laplace"
