"""MixUp and CutMix: every image of a batch together with its neighbour, and so their labels."""

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from .data import CLASSES

# of the Beta distribution that the shares are drawn from
MIXUP_ALPHA, CUTMIX_ALPHA = 0.8, 1.0


def mix(images: Tensor, labels: Tensor, source: np.random.Generator) -> tuple[Tensor, Tensor]:
    """MixUp or CutMix, one as often as the other: `images (B, C, H, W)` and targets `(B, 10)` from `labels (B,)`."""
    targets = F.one_hot(labels, CLASSES).float()
    if source.random() < 0.5:
        share = source.beta(MIXUP_ALPHA, MIXUP_ALPHA)
        images = share * images + (1 - share) * images.roll(1, 0)
    else:
        images, share = cut(images, source.beta(CUTMIX_ALPHA, CUTMIX_ALPHA), source)
    return images, share * targets + (1 - share) * targets.roll(1, 0)


def cut(images: Tensor, share: float, source: np.random.Generator) -> tuple[Tensor, float]:
    """Puts a box of the neighbour into every image; returns them with the share that each has kept of itself.

    The box has `1 - share` of the area, less what lies outside.
    """
    height, width = images.shape[2:]
    row, column = source.integers(height), source.integers(width)
    reach = 0.5 * (1 - share) ** 0.5
    top, bottom = max(0, int(row - reach * height)), min(height, int(row + reach * height))
    left, right = max(0, int(column - reach * width)), min(width, int(column + reach * width))
    result = images.clone()
    result[:, :, top:bottom, left:right] = images.roll(1, 0)[:, :, top:bottom, left:right]
    return result, 1 - (bottom - top) * (right - left) / (height * width)
