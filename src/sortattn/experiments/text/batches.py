"""Batches to learn from: passages with task prefixes, drawn as in the paper."""

import random
from collections.abc import Sequence

from torch import Tensor

# the paper's probabilities
PREFIXES = {"classification": 0.45, "clustering": 0.1, "search_document": 0.35, "search_query": 0.1}


class PassageBatches:
    """The batch with a number: `size` passages, each with a prefix, cut at `tokens` tokens."""

    def __init__(self, passages: Sequence[str], tokenizer, *, size: int, tokens: int, seed: int, prefixes: bool = True):
        self.passages, self.tokenizer = passages, tokenizer
        self.size, self.tokens, self.seed, self.prefixes = size, tokens, seed, prefixes

    def __call__(self, number: int) -> dict[str, Tensor]:
        given = self.tokenizer(
            self.texts(number), truncation=True, max_length=self.tokens, padding=True, return_tensors="pt"
        )
        return {name: given[name] for name in ("input_ids", "attention_mask")}

    def texts(self, number: int) -> list[str]:
        """The texts of a batch: a function of the seed and the number alone."""
        source = random.Random(f"{self.seed} {number}")
        chosen = source.choices(self.passages, k=self.size)
        if not self.prefixes:
            return chosen
        tasks = source.choices(list(PREFIXES), list(PREFIXES.values()), k=self.size)
        return [f"{task}: {text}" for task, text in zip(tasks, chosen, strict=True)]
