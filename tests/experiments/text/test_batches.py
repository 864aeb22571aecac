"""Batches of passages: what is drawn, where it is cut, and that prepared ones are the same."""

from collections import Counter

import pytest
import torch

from sortattn.experiments.text import batches as module
from sortattn.experiments.text.batches import PassageBatches, Prepared
from sortattn.experiments.text.encoder import load

from .conftest import TEXTS

LONG = [*TEXTS, " ".join(TEXTS), " ".join(TEXTS * 4)]


@pytest.fixture
def tokenizer(teacher):
    return load(teacher, tokens=32)[1]


def test_batches_are_a_function_of_seed_and_number(tokenizer):
    batches = PassageBatches(TEXTS, tokenizer, size=16, lengths=[8], seed=0)
    assert batches(3)["input_ids"].equal(batches(3)["input_ids"])
    assert batches(3)["input_ids"].shape == (16, 8)
    other = PassageBatches(TEXTS, tokenizer, size=16, lengths=[8], seed=1)
    assert batches.texts(3) != other.texts(3)
    assert batches.texts(3) != batches.texts(4)
    plain = PassageBatches(TEXTS, tokenizer, size=16, lengths=[8], seed=0, prefixes=False)
    assert set(plain.texts(0)[0]) <= set(TEXTS)


def test_prefixes_are_drawn_with_the_paper_s_probabilities():
    batches = PassageBatches(TEXTS, None, size=4000, lengths=[8], seed=0)
    counts = Counter(text.partition(": ")[0] for text in batches.texts(0)[0])
    paper = {"classification": 0.45, "clustering": 0.1, "search_document": 0.35, "search_query": 0.1}
    assert counts.keys() == paper.keys()
    for name, share in paper.items():
        assert counts[name] / 4000 == pytest.approx(share, abs=0.03)


def test_tokens_are_the_tokenizers_with_a_mask_only_where_something_is_padded(tokenizer):
    batches = PassageBatches(LONG, tokenizer, size=4, lengths=[6, 24], seed=0)
    seen = Counter()
    for number in range(20):
        texts, length = batches.texts(number)
        given = batches(number)
        expected = tokenizer(texts, truncation=True, max_length=length, padding=True, return_tensors="pt")
        mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
        width = expected["input_ids"].shape[1]
        assert given["input_ids"][:, :width].equal(expected["input_ids"])
        assert mask[:, :width].equal(expected["attention_mask"])
        assert not mask[:, width:].any()
        assert ("attention_mask" in given) == (not mask.all())
        seen[length, "attention_mask" in given] += 1
    assert set(seen) == {(6, False), (24, True)}


def test_widths_are_few(tokenizer, monkeypatch):
    monkeypatch.setattr(module, "WIDTH", 8)
    batches = PassageBatches(LONG, tokenizer, size=2, lengths=[30], seed=0)
    assert {batches(number)["input_ids"].shape[1] for number in range(40)} <= {8, 16, 24, 30}


def test_prepared_batches_are_the_same_and_are_made_once(tokenizer, tmp_path, monkeypatch):
    source = PassageBatches(LONG, tokenizer, size=4, lengths=[6, 24], seed=0)
    ranges = [range(10), range(100, 120, 2)]
    path = tmp_path / "tokens.npz"
    prepared = Prepared(source, ranges, path, "these texts")
    for number in (0, 9, 100, 118):
        assert all(prepared(number)[name].equal(part) for name, part in source(number).items())
    with pytest.raises(IndexError, match="no batch 101 was prepared"):
        prepared(101)

    def never(self, texts, length):
        raise AssertionError("it has made tokens again")

    monkeypatch.setattr(PassageBatches, "tokens", never)
    again = Prepared(source, ranges, path, "these texts")
    assert again(7)["input_ids"].equal(prepared(7)["input_ids"])
    for other in ("other texts", "these texts"):
        if other == "these texts":
            path.write_bytes(b"half a file")
        with pytest.raises(AssertionError, match="made tokens again"):
            Prepared(source, ranges, path, other)
