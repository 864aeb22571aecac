"""Calls that are played again from addresses alone.

A call of the grid makes a dozen tensors and launches as many kernels, and Python takes longer for that than a GPU for
short sequences. In calls of one kind the launches differ by addresses only. So one of them is recorded: which launches
there were, and of every address in which tensor it lies. Played again, all tensors of the call but its outputs lie in
one piece of memory, those that are not needed at the same time in the same place.
"""

import bisect
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ....cuda import constants

# tensors lie at multiples of so many bytes, as torch's own do
_ALIGN = 512


class _Local(threading.local):
    recorder: "Recorder | None" = None


_local = _Local()


def empty(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device) -> Tensor:
    """As torch's; what is made within a recorded call has to be made by this."""
    made = torch.empty(*shape, dtype=dtype, device=device)
    if _local.recorder is not None:
        _local.recorder.note(made)
    return made


def zeros(number: int, device: torch.device) -> Tensor:
    """Integers that are zero: all that a call needs of them, at once."""
    made = torch.zeros(number, dtype=torch.int32, device=device)
    if _local.recorder is not None:
        _local.recorder.zeros = made
    return made


def launched(compiled, programs: tuple[int, int, int], arguments: tuple) -> None:
    """Notes a launch, if a call is being recorded."""
    if _local.recorder is not None and _local.recorder.complete:
        _local.recorder.launches.append((compiled, programs, arguments))


def missed() -> None:
    """Says that a launch is not noted: a call that is being recorded cannot be played."""
    if _local.recorder is not None:
        _local.recorder.stop()


@dataclass(frozen=True)
class Recorded:
    """A call: `(launch, arguments, addresses)` of each of its kernels, and what it needs beside its inputs.

    Of the `addresses`, `(position, tensor, offset)`, the tensor is one of the inputs, or behind these zeros, memory, or
    one of the outputs. Of an output that is the zeros there is no shape.
    """

    steps: list[tuple[Callable, list, list[tuple[int, int, int]]]]
    zeros: int
    memory: int
    outs: list[tuple[torch.Size, torch.dtype] | None]
    kept: list[constants.Constant]

    def play(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        """The outputs for other inputs of the same kind."""
        device = inputs[0].device
        for constant in self.kept:
            constant.read()
        zeros = torch.zeros(self.zeros, dtype=torch.int32, device=device)
        memory = torch.empty(self.memory, dtype=torch.uint8, device=device)
        outs = tuple(zeros if one is None else torch.empty(one[0], dtype=one[1], device=device) for one in self.outs)
        bases = [part.data_ptr() for part in (*inputs, zeros, memory, *outs)]
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for launch, arguments, addresses in self.steps:
            # another thread may play the same call
            arguments = arguments.copy()
            for position, tensor, offset in addresses:
                arguments[position] = bases[tensor] + offset
            launch(stream, *arguments)
        return outs


class Recorder:
    """Notes the launches of a call, and the tensors that it makes; these live until it is left."""

    def __init__(self):
        self.made: list[Tensor] = []
        self.zeros: Tensor | None = None
        self.launches: list[tuple] = []
        self.complete = True

    def note(self, made: Tensor) -> None:
        """A tensor that the call makes."""
        if self.complete:
            self.made.append(made)

    def stop(self) -> None:
        """Nothing is noted any more, and no tensor held: the call is not one that can be played."""
        self.complete = False
        self.made, self.launches = [], []

    def __enter__(self) -> "Recorder":
        _local.recorder = self
        return self

    def __exit__(self, *error) -> None:
        _local.recorder = None

    def recorded(self, inputs: list[Tensor], outs: tuple[Tensor, ...]) -> Recorded | None:
        """The call; None if it was more than the launches noted, or an address is in none or two known tensors."""
        zeros = self.zeros
        if zeros is None or not self.complete or _Ranges(inputs).overlap():
            return None
        made = [part for part in self.made if all(part is not out for out in outs)]
        fresh = [out for out in outs if out is not zeros]
        known = _Ranges([*inputs, zeros, *made, *fresh])
        first = len(inputs) + 1
        own = range(first, first + len(made))
        spans: dict[int, tuple[int, int]] = {}
        found, kept = [], []
        for turn, (compiled, programs, arguments) in enumerate(self.launches):
            addresses = []
            for position, part in enumerate(arguments):
                if not isinstance(part, Tensor):
                    continue
                place = known.find(part)
                if place is not None:
                    addresses.append((position, *place))
                    spans[place[0]] = (spans.get(place[0], (turn,))[0], turn)
                elif (constant := constants.at(part.data_ptr())) is not None:
                    kept.append(constant)
                else:
                    return None
            arguments = [part.data_ptr() if isinstance(part, Tensor) else part for part in arguments]
            found.append((straight(compiled, programs), arguments, addresses))
        # that the last launch writes the first output says that none was missed behind it
        if not found or all(tensor != own.stop for _, tensor, _ in found[-1][2]):
            return None
        sizes = [(known.tensors[one].nbytes, *spans.get(one, (0, 0))) for one in own]
        offsets, memory = arranged(sizes)
        where = {one: (first, offset) for one, offset in zip(own, offsets, strict=True)}
        # all outputs have a base, that of the zeros too
        places = [first + 1 + at for at, out in enumerate(outs) if out is not zeros]
        where |= {own.stop + at: (place, 0) for at, place in enumerate(places)}
        steps = []
        for launch, arguments, addresses in found:
            moved = []
            for position, tensor, offset in addresses:
                target, start = where.get(tensor, (tensor, 0))
                moved.append((position, target, start + offset))
            steps.append((launch, arguments, moved))
        kinds = [None if out is zeros else (out.shape, out.dtype) for out in outs]
        return Recorded(steps, zeros.numel(), memory, kinds, kept)


class _Ranges:
    """In which of some tensors an address lies."""

    def __init__(self, tensors: list[Tensor]):
        self.tensors = tensors
        self._sorted = sorted((part.data_ptr(), -part.nbytes, at) for at, part in enumerate(tensors) if part.numel())
        self._starts = [start for start, _, _ in self._sorted]

    def overlap(self) -> bool:
        """Whether a tensor begins within another, and not where that does."""
        stop = start = 0
        for first, size, _ in self._sorted:
            if start < first < stop:
                return True
            start, stop = first, max(stop, first - size)
        return False

    def find(self, part: Tensor) -> tuple[int, int] | None:
        """The tensor, as its place in the list, and the offset in bytes."""
        address = part.data_ptr()
        before = bisect.bisect_right(self._starts, address) - 1
        if before < 0:
            return None
        start, size, at = self._sorted[before]
        return (at, address - start) if address < start - size else None


def arranged(parts: list[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Where parts of `(bytes, first turn, last turn)` lie, and how much memory they need: none where another is needed.

    The largest ones are placed first: what is small finds room between them.

    >>> arranged([(512, 0, 1), (1024, 1, 2), (512, 2, 3)])
    ([1024, 0, 1024], 1536)
    """
    offsets = [0] * len(parts)
    placed: list[tuple[int, int, int, int]] = []
    for at in sorted(range(len(parts)), key=lambda at: -parts[at][0]):
        size, first, last = parts[at]
        offset = 0
        for start, stop, *turns in sorted(placed):
            if turns[0] > last or first > turns[1]:
                continue
            if offset + size <= start:
                break
            offset = max(offset, stop)
        offsets[at] = offset
        placed.append((offset, offset + -(-size // _ALIGN) * _ALIGN, first, last))
    return offsets, max((stop for _, stop, *_ in placed), default=0)


def straight(compiled, programs: tuple[int, int, int]) -> Callable:
    """`launch(stream, *arguments)` of a compiled kernel; addresses are integers.

    Of the versions that were looked at it is Triton's function in C, without what Python does before it.
    """
    launcher = compiled.run
    if (
        not triton.__version__.startswith("3.6.")
        or type(launcher).__name__ != "CudaLauncher"
        or launcher.global_scratch_size
        or launcher.profile_scratch_size
    ):
        run = compiled[programs]
        return lambda stream, *arguments: run(*arguments, stream=stream)
    launch, options = launcher.launch, (launcher.launch_cooperative_grid, launcher.launch_pdl)
    # no memory of its own, no hooks
    rest = (compiled.function, *options, None, None, compiled.packed_metadata, None, None, None)
    return lambda stream, *arguments: launch(*programs, stream, *rest, *arguments)
