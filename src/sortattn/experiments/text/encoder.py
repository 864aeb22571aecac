"""Embeddings of texts: a Hugging Face encoder, mean over its tokens, length one."""

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...distill.objectives import pooled
from ...errors import CommandError
from ...integrations.bandwidths import ENTRY
from ...integrations.convert import convert
from ...integrations.transformers import register

# tokens in a batch, padding included: 16 texts of 512
BATCH_TOKENS = 8192
# the attention of a model that was not converted
OWN = "own"
# of NTK scaling, as nomic-embed-text has it
NTK_FACTOR = 2.0


def load(name: str, *, tokens: int, device: str = "cpu", kernel: str | None = None):
    """A model and its tokenizer, for texts of up to `tokens` tokens; with another attention if a kernel is named."""
    try:
        register()
    except ImportError as error:
        raise CommandError(str(error)) from error
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModel, AutoTokenizer
    from transformers.utils import logging

    # the command has a bar of its own
    logging.disable_progress_bar()
    try:
        config = stretch(AutoConfig.from_pretrained(name), tokens)
        # shapes that differ are refused below, with their names
        model, info = AutoModel.from_pretrained(
            name, config=config, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, SafetensorError) as error:
        where = "this folder" if Path(name).exists() else "no such folder, and the hub does not answer with it"
        reason = str(error).splitlines()[0]
        raise CommandError(f"cannot load the model {name}: {where} ({reason})") from error
    _refuse_other_shape(name, info)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # transformers makes one without words where none is saved
        raise CommandError(f"cannot load the model {name}: there is no tokenizer beside it")
    # what the tokenizer was trained for is no limit of the model
    tokenizer.model_max_length = tokens
    model = model.eval().to(device)
    try:
        return (model if kernel is None else convert(model, kernel)), tokenizer
    except ValueError as error:
        raise CommandError(str(error)) from error


def _refuse_other_shape(name: str, info: dict) -> None:
    """Weights that transformers would draw at random are no model; what is made after the last layer is not used."""
    lost = [key for key in info["missing_keys"] if not key.startswith("pooler.")]
    for problem, found in {"mismatched_keys": info["mismatched_keys"], "missing_keys": lost}.items():
        if found:
            names = ", ".join(str(part) for part in sorted(found, key=str)[:3])
            raise CommandError(f"the weights of {name} are of another shape than its config: {problem} {names}")


def saved_kernel(name: str) -> str:
    """The kernel that a model was converted to, `own` for any other."""
    path = Path(name) / "config.json"
    try:
        return json.loads(path.read_text())[ENTRY]["kernel"]
    except (OSError, ValueError, KeyError, TypeError):
        return OWN


def stretch(config, tokens: int):
    """The config, with NTK scaling of its rotary positions if texts are longer than the model was trained for."""
    trained = getattr(config, "max_position_embeddings", None)
    if trained is None or tokens <= trained:
        return config
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        raise CommandError(
            f"this model has {trained} positions and no rotary ones to stretch; expected --tokens up to {trained}, "
            f"got {tokens}"
        )
    if rope.get("rope_type", "default") == "default":
        config.rope_parameters = {**rope, "rope_type": "dynamic", "factor": NTK_FACTOR}
    return config


def inputs(model, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """What a model is called with, for `tokens (B, N)` and `mask (B, N)`."""
    given = {"input_ids": tokens, "attention_mask": mask}
    length = tokens.shape[1]
    if length > getattr(model.config, "max_position_embeddings", length):
        # models keep tables of the default ones that end there
        more = {"token_type_ids": torch.zeros_like(tokens)}
        more["position_ids"] = torch.arange(length, device=tokens.device)[None]
        accepted = inspect.signature(model.forward).parameters
        given.update({name: tensor for name, tensor in more.items() if name in accepted})
    return given


@dataclass(frozen=True)
class Encoder:
    """Turns texts, cut at `tokens` tokens, into embeddings `(texts, channels)`; with where it was loaded from."""

    model: object
    tokenizer: object
    tokens: int
    name: str = ""
    kernel: str = OWN

    def serves(self, name: str, kernel: str, tokens: int) -> bool:
        """Whether the model is the one of that name with that kernel, for texts of so many tokens."""
        # dynamic scaling remembers the longest text it has seen, so that every length beyond has a model of its own
        trained = getattr(self.model.config, "max_position_embeddings", 0)
        same_positions = tokens == self.tokens or max(tokens, self.tokens) <= trained
        return (name, kernel) == (self.name, self.kernel) and same_positions

    def embed(self, texts: Sequence[str], done: Callable[[int], None] = lambda count: None) -> Tensor:
        """In batches of texts of similar length; `done` hears how many texts were finished."""
        tokens = self.tokenizer(list(texts), truncation=True, max_length=self.tokens)["input_ids"]
        order = sorted(range(len(tokens)), key=lambda place: len(tokens[place]))
        rows: list[Tensor | None] = [None] * len(tokens)
        for batch in _batches(order, [len(text) for text in tokens]):
            embeddings = self._embed([tokens[place] for place in batch])
            for place, embedding in zip(batch, embeddings, strict=True):
                rows[place] = embedding
            done(len(batch))
        return torch.stack(rows)

    @torch.no_grad()
    def _embed(self, batch: list[list[int]]) -> Tensor:
        padded = self.tokenizer.pad({"input_ids": batch}, return_tensors="pt").to(self.model.device)
        given = inputs(self.model, padded["input_ids"], padded["attention_mask"])
        rows = self.model(**given)[0]
        return torch.nn.functional.normalize(pooled(rows, given["attention_mask"]), dim=-1).cpu()


def _batches(order: list[int], lengths: list[int]) -> list[list[int]]:
    """Cuts the texts, ascending in length, into batches of at most `BATCH_TOKENS` tokens with their padding."""
    batches: list[list[int]] = []
    for place in order:
        if not batches or lengths[place] * (len(batches[-1]) + 1) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(place)
    return batches
