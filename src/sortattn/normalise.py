"""From kernel sums to attention."""

import torch
from torch import Tensor


def normalise(sums: Tensor, total: Tensor, floor: float) -> Tensor:
    """`sums (P, M, C) / total (P, M)`, zero where no key is seen; a positive `floor` clamps the total."""
    if floor:
        return sums / total.clamp(min=floor)[..., None]
    # a total of zero has sums of zero above it
    return sums / torch.where(total == 0, 1.0, total)[..., None]
