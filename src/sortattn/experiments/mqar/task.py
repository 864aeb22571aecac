"""The sequences: pairs of keys and values, and then every key once more, where its value is to be recalled."""

import math

import torch
from torch import Tensor

# the label of a place where nothing is asked, as in `torch.nn.functional.cross_entropy`
NOTHING = -100
# the exponent of the gaps between a pair and its query; small means that most queries come early
POWER = 0.01


def length_for(pairs: int) -> int:
    """The length of a sequence with so many pairs, as the benchmark has it: 4 in 64, 8 in 128, 16 in 256, 64 in 512.

    >>> [length_for(pairs) for pairs in (2, 4, 8, 16, 64, 256)]
    [64, 64, 128, 256, 512, 1024]
    """
    return max(64, min(16 * pairs, 512), 4 * pairs)


def make_batch(
    count: int, *, pairs: int, length: int, vocabulary: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Inputs and labels, both `(count, length)`.

    Keys are distinct tokens of the lower half of the vocabulary (0 is none of them), values of the upper half. After
    the pairs each key appears once, at an even distance from the end of the pairs drawn without replacement from a
    power law; its value is the label there. All other places after the pairs hold random tokens and no label.
    """
    half, device = vocabulary // 2, generator.device
    if pairs >= half or 4 * pairs > length or length % 2:
        raise ValueError(
            f"expected an even length of at least {4 * pairs} and a vocabulary above {2 * pairs + 1} "
            f"for {pairs} pairs, got {length} and {vocabulary}"
        )
    keys = 1 + _distinct(torch.zeros(half - 1, device=device), count, pairs, generator)
    values = half + _distinct(torch.zeros(half, device=device), count, pairs, generator)
    inputs = torch.randint(vocabulary, (count, length), generator=generator, device=device)
    labels = torch.full((count, length), NOTHING, device=device)
    inputs[:, 0 : 2 * pairs : 2], inputs[:, 1 : 2 * pairs : 2] = keys, values
    slots = torch.arange(1, (length - 2 * pairs) // 2 + 1, device=device, dtype=torch.float32)
    places = 2 * pairs + 2 * _distinct((POWER - 1) * slots.log(), count, pairs, generator)
    return inputs.scatter(1, places, keys), labels.scatter(1, places, values)


def _distinct(logits: Tensor, count: int, size: int, generator: torch.Generator) -> Tensor:
    """`count` draws of `size` indices without replacement by the probabilities `exp(logits)`, in order of drawing."""
    uniform = torch.rand(count, len(logits), generator=generator, device=logits.device)
    # the largest of logits with Gumbel noise are such a draw; the noise of 0 and 1 would be infinite
    noise = -(-uniform.clamp(1e-20, math.nextafter(1.0, 0.0)).log()).log()
    return (logits + noise).topk(size, dim=1).indices
