"""Sentence embeddings with kernel attention."""

import pytest
import torch

import sortattn

from . import tiny

sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.skipif(tiny.VERSION < 5, reason="BERT has no attention interface in transformers 4")


@pytest.fixture
def folder(tmp_path):
    """A BERT with its tokenizer."""
    tiny.tokenizer().save_pretrained(tmp_path)
    tiny.build("bert").save_pretrained(tmp_path)
    return str(tmp_path)


def test_embeddings_of_a_batch_are_those_one_by_one(folder):
    sortattn.register()
    options = {"attn_implementation": "sortattn_add_laplace"}
    model = sentence_transformers.SentenceTransformer(folder, model_kwargs=options, device="cpu")
    softmax = sentence_transformers.SentenceTransformer(folder, device="cpu")
    texts = ["a cat", "the cat sat on the mat and slept all day", "mat"]
    together = model.encode(texts, convert_to_tensor=True)
    alone = torch.stack([model.encode(text, convert_to_tensor=True) for text in texts])
    assert (together - alone).norm() <= 1e-5 * alone.norm()
    assert (together - softmax.encode(texts, convert_to_tensor=True)).norm() > 1e-2 * alone.norm()
