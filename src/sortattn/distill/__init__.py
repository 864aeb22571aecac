"""Distillation of a transformer into the same one with another attention, in the paper's three stages.

`pair` copies the weights, `Layerwise` fits every attention module on the teacher's own inputs, `EndToEnd` the whole
model; `distill` runs stages with checkpoints and continues where it was interrupted.
"""

from .objectives import embedding_loss, logit_loss
from .run import Settings, distill
from .schedule import END_TO_END, LAYERWISE, Stage
from .work import EndToEnd, Layerwise, pair

__all__ = [
    "END_TO_END",
    "LAYERWISE",
    "EndToEnd",
    "Layerwise",
    "Settings",
    "Stage",
    "distill",
    "embedding_loss",
    "logit_loss",
    "pair",
]
