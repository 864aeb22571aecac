"""A small causal transformer with any kernel in its attention."""

import torch
from torch import Tensor, nn

from ...kernels import Kernel
from ...module import KernelAttention

# how many tokens the convolution before the attention sees: enough to tie a value to the key before it
TAPS = 3


class RecallModel(nn.Module):
    """Token embeddings, blocks, a normalisation and the embeddings again as output, as in the Zoology benchmark.

    `forward(tokens (B, N), places (B, Q))` returns logits `(B, Q, vocabulary)` at the places that are asked for only.
    """

    def __init__(self, vocabulary: int, width: int, kernel: str | Kernel, *, layers: int, heads: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, kernel, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """The logits of the next token at `places`."""
        rows = self.tokens(tokens)
        for block in self.blocks:
            rows = block(rows)
        asked = rows.gather(1, places[..., None].expand(-1, -1, rows.shape[-1]))
        return self.norm(asked) @ self.tokens.weight.T


class Block(nn.Module):
    """A short causal convolution in each channel and causal attention, both normalised before and added."""

    def __init__(self, width: int, kernel: str | Kernel, heads: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.convolution = nn.Conv1d(width, width, TAPS, groups=width)
        self.attention = KernelAttention(width, heads, kernel, is_causal=True)

    def forward(self, rows: Tensor) -> Tensor:
        """`(B, N, width)` to the same."""
        past = nn.functional.pad(self.norms[0](rows).transpose(1, 2), (TAPS - 1, 0))
        rows = rows + self.convolution(past).transpose(1, 2)
        return rows + self.attention(self.norms[1](rows))


def make_model(vocabulary: int, width: int, kernel: str | Kernel, *, layers: int, heads: int, seed: int) -> RecallModel:
    """A model whose weights depend on the arguments only; torch's own generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return RecallModel(vocabulary, width, kernel, layers=layers, heads=heads)
