"""Batches to learn from: passages with task prefixes, drawn as in the paper, and their tokens, made once."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...files import replacing

# the paper's probabilities
PREFIXES = {"classification": 0.45, "clustering": 0.1, "search_document": 0.35, "search_query": 0.1}
# batches are padded to a multiple of it: every width is recorded by itself on a GPU
WIDTH = 64
# texts that are given to the tokenizer at a time
_CHUNK = 4096


@dataclass(frozen=True)
class PassageBatches:
    """The batch with a number: `size` passages, each with a prefix, cut at one of `lengths`, drawn for the batch."""

    passages: Sequence[str]
    tokenizer: object
    size: int
    lengths: Sequence[int]
    seed: int
    prefixes: bool = True

    def __call__(self, number: int) -> dict[str, Tensor]:
        texts, length = self.texts(number)
        return padded(self.tokens(texts, length), length, self.tokenizer.pad_token_id)

    def texts(self, number: int) -> tuple[list[str], int]:
        """The texts of a batch and where they are cut: a function of the seed and the number alone."""
        source = random.Random(f"{self.seed} {number}")
        chosen = source.choices(self.passages, k=self.size)
        if self.prefixes:
            tasks = source.choices(list(PREFIXES), list(PREFIXES.values()), k=self.size)
            chosen = [f"{task}: {text}" for task, text in zip(tasks, chosen, strict=True)]
        return chosen, source.choice(self.lengths) if len(self.lengths) > 1 else self.lengths[0]

    def tokens(self, texts: list[str], length: int) -> list[np.ndarray]:
        """The tokens of texts, cut."""
        rows = self.tokenizer(texts, truncation=True, max_length=length, return_attention_mask=False)["input_ids"]
        return [np.asarray(row, dtype=np.int32) for row in rows]


def padded(rows: Sequence[np.ndarray], length: int, pad: int) -> dict[str, Tensor]:
    """What a model is called with; no mask where all rows have the same length."""
    counts = [len(row) for row in rows]
    width = min(length, -(-max(counts) // WIDTH) * WIDTH)
    tokens = np.full((len(rows), width), pad, dtype=np.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    batch = {"input_ids": torch.from_numpy(tokens)}
    if min(counts) < width:
        batch["attention_mask"] = (torch.arange(width) < torch.tensor(counts)[:, None]).long()
    return batch


class Prepared:
    """Batches whose tokens were made before, all together, and are kept in a file; `facts` says what they come from."""

    def __init__(self, source: PassageBatches, ranges: Sequence[range], path: Path, facts: str):
        self.source, self.ranges = source, ranges
        found = _read(path, f"{facts} {list(ranges)}")
        self._tokens, self._ends = _write(path, f"{facts} {list(ranges)}", source, ranges) if found is None else found

    def __call__(self, number: int) -> dict[str, Tensor]:
        size = self.source.size
        first = self._place(number) * size
        rows = [self._tokens[self._ends[place] : self._ends[place + 1]] for place in range(first, first + size)]
        return padded(rows, self.source.texts(number)[1], self.source.tokenizer.pad_token_id)

    def _place(self, number: int) -> int:
        before = 0
        for numbers in self.ranges:
            if number in numbers:
                return before + numbers.index(number)
            before += len(numbers)
        raise IndexError(f"no batch {number} was prepared, expected one of {list(self.ranges)}")


def _read(path: Path, facts: str) -> tuple[np.ndarray, np.ndarray] | None:
    try:
        with np.load(path) as file:
            return (file["tokens"], file["ends"]) if str(file["facts"]) == facts else None
    except (OSError, ValueError, KeyError):
        # it can be made again
        return None


def _write(path: Path, facts: str, source: PassageBatches, ranges: Sequence[range]) -> tuple[np.ndarray, np.ndarray]:
    numbers = [number for numbers in ranges for number in numbers]
    rows: list[np.ndarray | None] = [None] * (len(numbers) * source.size)
    for length in dict.fromkeys(source.lengths):
        texts = _texts(source, numbers, length)
        while chunk := list(islice(texts, _CHUNK)):
            places, given = zip(*chunk, strict=True)
            for place, row in zip(places, source.tokens(list(given), length), strict=True):
                rows[place] = row
    kind = np.uint16 if len(source.tokenizer) <= 1 << 16 else np.int32
    tokens = np.concatenate(rows).astype(kind)
    ends = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    with replacing(path) as draft, draft.open("wb") as file:
        np.savez(file, tokens=tokens, ends=ends, facts=np.array(facts))
    return tokens, ends


def _texts(source: PassageBatches, numbers: Sequence[int], length: int) -> Iterator[tuple[int, str]]:
    """The texts that are cut at this length, with their places among all."""
    for place, number in enumerate(numbers):
        texts, cut = source.texts(number)
        if cut == length:
            yield from enumerate(texts, place * source.size)
