"""Queries, keys and values as a Hugging Face encoder makes them: one text of given length, every layer, every head."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CommandError
from ..experiments.text.encoder import inputs, load
from ..integrations.transformers import interfaces

# the name of the attention that keeps what it is given
_LISTENER = "sortattn_listener"


def layers(
    model: str, text: Path, tokens: Sequence[int], device: str
) -> Iterator[tuple[str, tuple[Tensor, Tensor, Tensor]]]:
    """Query, key and value `(heads, N, D)` of each layer, after its rotary embedding, for texts of each length."""
    network, tokenizer = load(model, tokens=max(tokens), device=device)
    try:
        words = text.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read the text {text}: {error}") from error
    heard = _listen(network)
    for length in tokens:
        rows = tokenizer(words, truncation=True, max_length=length, return_tensors="pt")["input_ids"].to(device)
        if rows.shape[1] < length:
            raise CommandError(f"expected a text of at least {length} tokens, {text} has {rows.shape[1]}")
        heard.clear()
        with torch.no_grad():
            network(**inputs(network, rows, torch.ones_like(rows)))
        for number, parts in enumerate(heard):
            yield f"{Path(model).name}-{length}-layer{number:02d}", parts


def _listen(network) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A list to which each layer adds its query, key and value whenever the network is called."""
    heard: list[tuple[Tensor, Tensor, Tensor]] = []
    attention, masks = interfaces()
    plainly = attention()["sdpa"]

    def listen(module, query: Tensor, key: Tensor, value: Tensor, *others, **options):
        group = query.shape[1] // key.shape[1]
        heard.append((query[0], *(part[0].repeat_interleave(group, 0) for part in (key, value))))
        return plainly(module, query, key, value, *others, **options)

    attention.register(_LISTENER, listen)
    masks.AttentionMaskInterface.register(_LISTENER, masks.AttentionMaskInterface()["sdpa"])
    try:
        network.set_attn_implementation(_LISTENER)
    except ValueError as error:
        raise CommandError(f"this model's attention cannot be listened to: {error}") from error
    return heard
