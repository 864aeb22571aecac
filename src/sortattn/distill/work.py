"""The paper's three stages: copy, layer by layer, end to end."""

import copy
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from ..integrations.bandwidths import PREFIX, attention_modules
from ..integrations.convert import Bandwidth, convert
from .objectives import embedding_loss, rows_loss

Batch = dict[str, Tensor]


class Work(Protocol):
    """What a stage does with a batch, and the decay of the matrices that learn from it."""

    weight_decay: float

    def groups(self) -> list[list[nn.Parameter]]:
        """The parameters that learn, clipped group by group."""

    def losses(self, batch: Batch) -> Iterator[Tensor]:
        """The losses whose gradients are added."""


def pair(
    teacher: nn.Module, kernel: str, bandwidth: Bandwidth = None, learn_bandwidth: bool = False
) -> tuple[nn.Module, nn.Module]:
    """The teacher and its copy with another attention, the first stage.

    The teacher's attention is replaced by our `softmax`, in place, which gives the same: then both have the same masks.
    A teacher that has kernel attention already keeps it. Dropout is off in both.
    """
    student = convert(copy.deepcopy(teacher), kernel, bandwidth, learn_bandwidth)
    if not teacher.config._attn_implementation.startswith(PREFIX):
        convert(teacher, "softmax")
    return teacher.eval().requires_grad_(False), student.eval().requires_grad_(True)


class Layerwise:
    """Every attention module of the student is fitted to its teacher's output on the teacher's input to that layer.

    All layers learn in one pass over a batch, as they do not depend on each other; gradients are clipped by layer.
    """

    weight_decay = 0.0

    def __init__(self, teacher: nn.Module, student: nn.Module):
        self.teacher = teacher
        self.modules = list(zip(attention_modules(teacher), attention_modules(student), strict=True))

    def groups(self) -> list[list[nn.Parameter]]:
        """The parameters that learn, clipped group by group."""
        return [list(student.parameters()) for _, student in self.modules]

    def losses(self, batch: Batch) -> Iterator[Tensor]:
        """The losses of the layers, one after another: no more than the graph of one layer is kept."""
        calls = self._record(batch)
        for teacher, student in self.modules:
            arguments, options, expected = calls.pop(teacher)
            yield rows_loss(student(*arguments, **options)[0], expected, batch.get("attention_mask"))

    def _record(self, batch: Batch) -> dict[nn.Module, tuple]:
        """What every attention module of the teacher was given, and what it returned."""
        calls = {}

        def keep(module, arguments, options, output):
            calls[module] = (arguments, options, output[0])

        hooks = [teacher.register_forward_hook(keep, with_kwargs=True) for teacher, _ in self.modules]
        try:
            with torch.no_grad():
                self.teacher(**batch, **_no_cache(self.teacher))
        finally:
            for hook in hooks:
                hook.remove()
        return calls


class EndToEnd:
    """The output of the whole student is fitted to the teacher's by `loss(student output, teacher output, batch)`."""

    weight_decay = 0.0

    def __init__(self, teacher: nn.Module, student: nn.Module, loss: Callable = embedding_loss):
        self.teacher, self.student, self.loss = teacher, student, loss

    def groups(self) -> list[list[nn.Parameter]]:
        """The parameters that learn, clipped together."""
        return [list(self.student.parameters())]

    def losses(self, batch: Batch) -> Iterator[Tensor]:
        """The one loss of the batch."""
        options = _no_cache(self.teacher)
        with torch.no_grad():
            expected = self.teacher(**batch, **options)
        yield self.loss(self.student(**batch, **options), expected, batch)


def _no_cache(model: nn.Module) -> dict[str, bool]:
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}
