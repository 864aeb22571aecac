"""How long a stage is and how its learning rate goes; the defaults are the paper's."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A number of steps with Adam, warmed up linearly to `rate`, then annealed to `final_rate` along a cosine.

    `warmup` is the share of the steps that it takes.

    >>> stage = Stage("short", steps=11, rate=1.0, final_rate=0.0)
    >>> [stage.learning_rate(step) for step in (0, 5, 10)]
    [1.0, 0.5, 0.0]
    """

    name: str
    steps: int
    rate: float
    final_rate: float
    warmup: float = 0.0

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, from 0 to `steps - 1`."""
        rising = round(self.warmup * self.steps)
        if step < rising:
            return self.rate * (step + 1) / rising
        share = (step - rising) / max(1, self.steps - 1 - rising)
        return self.final_rate + (self.rate - self.final_rate) * (1 + math.cos(math.pi * share)) / 2


LAYERWISE = Stage("layerwise", steps=10_000, rate=5e-4, final_rate=5e-5)
END_TO_END = Stage("end-to-end", steps=10_000, rate=5e-5, final_rate=1e-5, warmup=0.1)
