"""What docs/convert-your-model.md shows is run, on small models."""

import re
from pathlib import Path

import pytest

from .integrations import tiny

sentence_transformers = pytest.importorskip("sentence_transformers")
TEXT = (Path(__file__).parents[1] / "docs" / "convert-your-model.md").read_text()
TEACHER = "nomic-ai/nomic-embed-text-v1.5"


@pytest.mark.skipif(tiny.VERSION < 5, reason="NomicBert is not there in transformers 4")
def test_the_python_examples_run(tmp_path, monkeypatch):
    teacher = tmp_path / "teacher"
    tiny.build("nomic").save_pretrained(teacher)
    tiny.tokenizer().save_pretrained(teacher)
    monkeypatch.chdir(tmp_path)
    space = {}
    for example in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(example.replace(TEACHER, str(teacher)), space)
    assert space["encoder"].encode("a cat").shape == (32,)
    assert space["model"].config._attn_implementation == "sortattn_add_laplace"
