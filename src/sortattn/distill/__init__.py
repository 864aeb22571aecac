"""Distillation of a transformer into the same one with another attention, in the paper's three stages.

`pair` copies the weights, `Layerwise` fits every attention module on the teacher's own inputs, `EndToEnd` the whole
model; `distill` runs stages with checkpoints and continues where it was interrupted, `distill_together` does so for
several students of one teacher.
"""

from .objectives import embedding_loss, logit_loss
from .run import Pupil, distill, distill_together
from .schedule import END_TO_END, LAYERWISE, Stage
from .training import Settings
from .work import EndToEnd, Layerwise, pair

__all__ = [
    "END_TO_END",
    "LAYERWISE",
    "EndToEnd",
    "Layerwise",
    "Pupil",
    "Settings",
    "Stage",
    "distill",
    "distill_together",
    "embedding_loss",
    "logit_loss",
    "pair",
]
