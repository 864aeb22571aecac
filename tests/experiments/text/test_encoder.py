import json
import shutil
import sys

import pytest
import torch

from sortattn.errors import CommandError
from sortattn.experiments.text import encoder as module
from sortattn.experiments.text.encoder import Encoder, load, stretch

from ...integrations import tiny
from .conftest import TEXTS


def embed(teacher, texts, tokens=32, kernel=None):
    return Encoder(*load(teacher, tokens=tokens, kernel=kernel), tokens).embed(texts)


@pytest.mark.parametrize("kernel", [None, "add_laplace"])
def test_embeddings_keep_their_order_and_do_not_depend_on_the_batch(teacher, kernel, monkeypatch):
    together = embed(teacher, TEXTS, kernel=kernel)
    alone = torch.cat([embed(teacher, [text], kernel=kernel) for text in TEXTS])
    assert (together - alone).abs().max() < 1e-5
    assert together.norm(dim=-1).tolist() == pytest.approx([1.0] * 6)
    monkeypatch.setattr(module, "BATCH_TOKENS", 10)
    assert (embed(teacher, TEXTS, kernel=kernel) - alone).abs().max() < 1e-5


def test_an_embedding_is_the_normalised_mean_of_the_last_rows(teacher):
    model, tokenizer = load(teacher, tokens=32)
    given = tokenizer(TEXTS[0], return_tensors="pt")
    mean = tiny.output(model, given)[0].mean(0)
    assert (embed(teacher, TEXTS[:1])[0] - mean / mean.norm()).abs().max() < 1e-5


def test_converted_to_softmax_the_embeddings_are_the_same(teacher):
    assert (embed(teacher, TEXTS, kernel="softmax") - embed(teacher, TEXTS)).abs().max() < 1e-5


def test_long_texts_are_cut(teacher):
    long = " ".join(["a cat"] * 50)
    assert torch.equal(embed(teacher, [long], tokens=12), embed(teacher, [" ".join(["a cat"] * 5)], tokens=12))


def test_positions_are_stretched_beyond_the_trained_length(teacher):
    long = " ".join(["a cat sat"] * 40)
    model, tokenizer = load(teacher, tokens=100)
    encoder = Encoder(model, tokenizer, 100)
    # up to the trained length nothing changes
    assert torch.equal(encoder.embed(TEXTS), embed(teacher, TEXTS))
    rotary = next(part for part in model.modules() if hasattr(part, "inv_freq"))
    before = rotary.inv_freq.clone()
    assert encoder.embed([long]).isfinite().all()
    dims, factor, trained = 8, 2.0, 32
    base = 1000.0 * (factor * 100 / trained - (factor - 1)) ** (dims / (dims - 2))
    expected = 1 / base ** (torch.arange(0, dims, 2) / dims)
    assert rotary.inv_freq.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    # and for the next short text they are as before
    encoder.embed(TEXTS)
    assert torch.equal(rotary.inv_freq, before)


def test_absolute_positions_cannot_be_stretched():
    config = tiny.build("bert", max_position_embeddings=16).config
    assert stretch(config, 16) is config
    with pytest.raises(CommandError, match="has 16 positions and no rotary ones .* got 17"):
        stretch(config, 17)


def test_a_model_that_is_not_there(monkeypatch):
    def unreachable(name):
        raise OSError("We couldn't connect to the hub.\nCheck your connection.")

    monkeypatch.setattr(tiny.transformers.AutoConfig, "from_pretrained", unreachable)
    message = r"cannot load the model no/where: no such folder, and the hub .*\(We couldn't connect to the hub.\)"
    with pytest.raises(CommandError, match=message):
        load("no/where", tokens=32)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("num_hidden_layers", 3, r"of another shape than its config: missing_keys layers\.2\."),
        ("intermediate_size", 64, r"of another shape than its config: mismatched_keys .*layers\.0\.mlp"),
    ],
)
def test_weights_of_another_shape_are_refused(entry, value, message, teacher, tmp_path):
    shutil.copytree(teacher, tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), entry: value}))
    with pytest.raises(CommandError, match=message):
        load(str(tmp_path / "other"), tokens=32)


def test_a_pooler_is_not_missed(tmp_path):
    model = tiny.build("bert")
    weights = {name: part for name, part in model.state_dict().items() if not name.startswith("pooler.")}
    model.save_pretrained(tmp_path, state_dict=weights)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert load(str(tmp_path), tokens=32)[0].eval()


def test_damaged_weights_and_a_missing_tokenizer_are_messages(teacher, tmp_path):
    shutil.copytree(teacher, tmp_path / "other")
    for path in (tmp_path / "other").glob("*token*"):
        path.unlink()
    with pytest.raises(CommandError, match="there is no tokenizer beside it|cannot load the model .*this folder"):
        load(str(tmp_path / "other"), tokens=32)
    path = tmp_path / "other" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CommandError, match=r"cannot load the model .*other: this folder \(.*header"):
        load(str(tmp_path / "other"), tokens=32)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CommandError, match=r"need transformers 4.57 or later: pip install 'sortattn\[hf\]'"):
        load("anything", tokens=32)
