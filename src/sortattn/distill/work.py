"""The paper's three stages: copy, layer by layer, end to end."""

import copy
from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor, nn

from ..integrations.bandwidths import PREFIX, attention_modules
from ..integrations.convert import Bandwidth, convert
from .objectives import embedding_loss, rows_loss
from .replay import Batch

# the entry of a batch that holds what the teacher has answered to it before
EXPECTED = "expected"


class Work(Protocol):
    """What a stage does with a batch, and the decay of the matrices that learn from it.

    Students of one teacher learn `together` if what it says to a batch is the same for all of them, and costly.
    """

    weight_decay: float
    together: bool
    # what the teacher says to a batch, called without gradients; None if there is no teacher
    teach: Callable[[Batch], object] | None

    def groups(self) -> list[list[nn.Parameter]]:
        """The parameters that learn, clipped group by group."""

    def losses(self, batch: Batch, lesson: object) -> Iterator[Tensor]:
        """The losses whose gradients are added, given what the teacher says."""


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
    together = True

    def __init__(self, teacher: nn.Module, student: nn.Module):
        self.teacher = teacher
        self.modules = list(zip(attention_modules(teacher), attention_modules(student), strict=True))

    def groups(self) -> list[list[nn.Parameter]]:
        """The parameters that learn, clipped group by group."""
        return [list(student.parameters()) for _, student in self.modules]

    def losses(self, batch: Batch, lesson: dict[nn.Module, tuple]) -> Iterator[Tensor]:
        """The losses of the layers, one after another: no more than the graph of one layer is kept."""
        for teacher, student in self.modules:
            arguments, options, expected = lesson[teacher]
            yield rows_loss(student(*arguments, **options)[0], expected, batch.get("attention_mask"))

    def teach(self, batch: Batch) -> dict[nn.Module, tuple]:
        """What every attention module of the teacher was given, and what it returned."""
        calls = {}

        def keep(module, arguments, options, output):
            calls[module] = (arguments, options, output[0])

        hooks = [teacher.register_forward_hook(keep, with_kwargs=True) for teacher, _ in self.modules]
        try:
            self.teacher(**batch, **_no_cache(self.teacher))
        finally:
            for hook in hooks:
                hook.remove()
        return calls


class EndToEnd:
    """The output of the whole student is fitted to the teacher's by `loss(student output, teacher output, batch)`.

    What the teacher has said before may come with the batch, under `EXPECTED`, as far as the loss can use it.
    """

    weight_decay = 0.0
    together = False

    def __init__(self, teacher: nn.Module, student: nn.Module, loss: Callable = embedding_loss):
        self.teacher, self.student, self.loss = teacher, student, loss

    def groups(self) -> list[list[nn.Parameter]]:
        """The parameters that learn, clipped together."""
        return [list(self.student.parameters())]

    def teach(self, batch: Batch) -> object:
        """The teacher's output."""
        return self.teacher(**batch, **_no_cache(self.teacher))

    def losses(self, batch: Batch, lesson: object) -> Iterator[Tensor]:
        """The one loss of the batch."""
        given = {name: tensor for name, tensor in batch.items() if name != EXPECTED}
        yield self.loss(self.student(**given, **_no_cache(self.student)), lesson, batch)


def _no_cache(model: nn.Module) -> dict[str, bool]:
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}
