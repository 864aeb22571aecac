"""What keys give F at the nodes in causal calls of levels.cu, in float64."""

import torch
from torch import Tensor

VALUES = {"bump": lambda u: (1 - u.abs()).clamp(min=0), "laplace": lambda u: torch.exp(-u.abs())}


def key_weights(kind: str, nodes: Tensor, key: Tensor, extra: Tensor, tau: Tensor) -> Tensor:
    """Of `key (..., N)` at `nodes (..., G)`, `(..., N, G)`: the kernel as it is, and the correction.

    `extra (..., G)` is what the diagonal is corrected by, for a change of slope of minus one; `tau (..., 1)`.
    """
    value = VALUES[kind]
    found = value((nodes[..., None, :] - key[..., None]) / tau[..., None])
    width = torch.zeros_like(nodes)
    width[..., 1:-1] = (nodes[..., 2:] - nodes[..., :-2]) / 2 / tau
    # a hat of that height, as a triangle of slope 1/6 with the same area
    reach = (6 * 2 * extra * width).sqrt()
    if kind == "laplace":
        # its area is that of the triangle, up to the third power of the reach
        reach = reach + reach**2 / 3
    return found + (found - value(reach)[..., None, :]).clamp(min=0) / 6
