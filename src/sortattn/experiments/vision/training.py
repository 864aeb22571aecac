"""What the runs do: learn from labels, and count right answers."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...distill import Stage
from ...distill.training import PRECISIONS
from .batches import normalised
from .data import Images

SMOOTHING = 0.1
# the steps come from the epochs, of which a tenth are the warm-up
SCRATCH = Stage("scratch", steps=0, rate=1e-3, final_rate=1e-5, warmup=0.1)
TEST_BATCH = 512


class Scratch:
    """The whole model learns the labels, smoothed by 0.1; `batch["labels"] (B, 10)` are shares of classes."""

    weight_decay = 0.1
    together = False
    # there is none but the labels
    teach = None

    def __init__(self, model: nn.Module):
        self.model = model

    def groups(self) -> list[list[nn.Parameter]]:
        """The parameters that learn, clipped together."""
        return [list(self.model.parameters())]

    def losses(self, batch: dict[str, Tensor], lesson: None) -> Iterator[Tensor]:
        """The one loss of the batch."""
        logits = self.model(pixel_values=batch["pixel_values"]).logits.float()
        yield F.cross_entropy(logits, batch["labels"], label_smoothing=SMOOTHING)


@torch.no_grad()
def accuracy(model: nn.Module, images: Images, precision: str = "fp32") -> float:
    """The share of images whose class has the largest logit, in per cent."""
    device = next(model.parameters()).device
    right = 0
    # other sizes of batches than in training would be compiled anew
    eager = torch.compiler.set_stance("force_eager")
    with eager, torch.autocast(device.type, PRECISIONS["bf16"], enabled=precision == "bf16"):
        for pixels, labels in zip(images.pixels.split(TEST_BATCH), images.labels.split(TEST_BATCH), strict=True):
            logits = model(pixel_values=normalised(pixels.to(device))).logits
            right += (logits.argmax(-1) == labels.to(device)).sum().item()
    return 100 * right / len(images)
