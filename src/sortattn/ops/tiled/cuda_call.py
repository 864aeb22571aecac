"""What launches for the same tensors have in common: sizes, the shapes of blocks, and the look through the inputs."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...cuda.launch import Kernel
from ...kernels import AddBump, AddLaplace, AddRiesz, Laplace, PolynomialExponential, Spline
from . import cuda_kernels
from .inputs import TENSORS, Inputs

# of the forward pass in float32, where blocks of half the rows fill multiprocessors better
_FEWER_ROWS = 32
# numbers of a chunk, dimensions of keys that are one number each and of which it has those of as many rows as a block
# has, chunks of their values, the fewest dimensions that are such numbers, and the most bytes of all chunks
_CHUNK_SIZE, _CHUNK_DIMS, _VALUE_CHUNKS, _FEWEST_DIMS, _CHUNK_ROOM = 2048, 32, 2, 32, 512 << 20
# heads that every block of the forward pass looks through by itself
_SHORT = 160
# blocks that look through the inputs, and numbers that one of them takes at least
_LOOKING, _LOOK, SURVEY_THREADS = 1024, 4096, 256


class Call:
    """What every launch for the same tensors has in common; `each` is how many queries a head has.

    Any number of leading dimensions, of all tensors the same, are the problems.
    """

    def __init__(self, inputs: Inputs, each: int | None = None):
        self.inputs, self.kernel, self.dtype = inputs, inputs.kernel, inputs.query.dtype
        *leading, self.rows, self.dims = inputs.query.shape
        *_, self.columns, self.channels = inputs.value.shape
        self.problems = math.prod(leading)
        self.wide = max(self.dims, self.channels) > cuda_kernels.CHUNK
        self.each = each or max(self.rows // inputs.group, 1)
        table, self.count = _table(self.kernel, inputs.parameters, self.dtype)
        # kept, as the launches take nothing but addresses
        self.tensors = [part if part is None else part.contiguous() for part in (*inputs[: TENSORS - 1], table)]
        self.causal, self.tau = int(inputs.causal), float(inputs.tau)
        self.sizes = (self.rows, self.columns, self.dims, self.channels, self.each, self.causal, self.count)

    def blocks(self, rows: int, each: int | None = None) -> int:
        """How many tiles, of `each` rows, the rows of a problem make."""
        return -(-rows // (each or cuda_kernels.ROWS[self.dtype]))

    def launch(self, entry: str, rows: int, *arguments, passes: int = 1) -> None:
        """Launch a block for every tile of `rows` rows of every problem, `passes` times."""
        kernel, grid, block, options = self.form(entry, rows, passes)
        kernel(grid, block, *arguments, **options)

    def form(self, entry: str, rows: int, passes: int = 1) -> tuple[Kernel, tuple[int, int], int, dict[str, int]]:
        """A kernel with its grid, the threads of a block, and what else its launch takes."""
        kernel, each, groups, shared = self.kernel_for(entry, rows)
        grid = (self.problems * self.blocks(rows, each), passes)
        # behind `survey.cu`
        early = entry == "forward" and self.dtype == torch.float32 and not self.looks()
        early = early and cuda_kernels.begins_early(self.inputs.query.device)
        return kernel, grid, cuda_kernels.THREADS * groups, {"shared": shared, "early": early}

    def kernel_for(self, entry: str, rows: int) -> tuple[Kernel, int, int, int]:
        """What such a launch takes, the rows and groups of warps of a block, and its shared memory."""
        coarse, roomy = self.inputs.coarse, cuda_kernels.is_roomy(self.inputs.query.device)
        each, groups = self.shape(entry, rows)
        taus = self.inputs.bandwidth is not None
        early = entry == "forward" and cuda_kernels.begins_early(self.inputs.query.device)
        stream = entry == "forward" and self.streams()
        shared = cuda_kernels.shared_of(entry, self.kernel, self.dtype, coarse, groups, roomy, stream)
        kernel = cuda_kernels.kernel_of(
            entry, self.kernel, self.dtype, self.wide, coarse, groups, roomy, each, taus, early, stream, self.count
        )
        return kernel, each, groups, shared

    def shape(self, entry: str, rows: int) -> tuple[int, int]:
        """Rows of a block, and groups of warps that share them: two, if all multiprocessors have at most one block.

        Of `add_laplace` also if they have two blocks and then one more, for which one group would be alone. Others have
        blocks of half the rows, of which a multiprocessor has three, where some have two blocks and some have one.
        """
        each, device = cuda_kernels.ROWS[self.dtype], self.inputs.query.device
        if entry not in ("forward", "forward_values") or self.dtype != torch.float32 or self.wide:
            return each, 1
        if entry == "forward" and self.streams():
            return each, 1
        blocks, processors = self.problems * self.blocks(rows), cuda_kernels.processors_of(device)
        laplace = self.kernel == AddLaplace.name
        if blocks <= processors or (laplace and 2 * processors < blocks <= 3 * processors):
            return each, 2 if cuda_kernels.room_of(device) >= cuda_kernels.FACTORS[2] else 1
        halved = self.problems * self.blocks(rows, _FEWER_ROWS)
        if self.kernel in (AddRiesz.name, AddBump.name) and halved <= 3 * processors:
            return _FEWER_ROWS, 1
        return each, 1

    def looks(self) -> bool:
        """Whether blocks look through the inputs by themselves."""
        return self.inputs.group == 1 and self.dtype == torch.float32 and max(self.rows, self.columns) <= _SHORT

    def by_steps(self) -> bool:
        """Whether `slopes.cu` makes the gradients, for which small GPUs do not have the shared memory."""
        able = self.dtype == torch.float32 and not self.wide and self.kernel in cuda_kernels.STEPS
        room = cuda_kernels.room_of(self.inputs.query.device)
        return able and cuda_kernels.shared_of("slopes", self.kernel, self.dtype, self.inputs.coarse) <= room

    def streams(self) -> bool:
        """Whether `chunks.cu` makes keys and values ready, once for all blocks: where multiprocessors have three.

        Not for a single block, which would read them twice.
        """
        if self.kernel not in cuda_kernels.STREAMED or self.dtype != torch.float32 or self.wide or self.looks():
            return False
        if self.kernel == AddBump.name and self.dims < _FEWEST_DIMS:
            return False
        device = self.inputs.query.device
        blocks = self.blocks(self.rows)
        few = blocks < 2 or self.problems * blocks <= 2 * cuda_kernels.processors_of(device)
        return not few and cuda_kernels.walks(device) and 4 * self.chunks() <= _CHUNK_ROOM

    def chunks(self) -> int:
        """The numbers of all chunks."""
        each = -(-self.dims * (2 if self.kernel == AddLaplace.name else 1) // _CHUNK_DIMS) + _VALUE_CHUNKS
        return self.problems * self.blocks(self.columns) * each * _CHUNK_SIZE

    def survey(self) -> "Surveyed":
        """What the kernel before a forward pass finds in the inputs, and makes of them."""
        look, room, places = self.looker(), None, (None, None)
        if look is not None:
            room = self.tensors[0].new_empty(self.room())
            places = self.places(room.data_ptr())
            given = (self.tensors[4], *places) if look.makes else places[:1]
            look.kernel((look.blocks,), SURVEY_THREADS, *self.tensors[:3], *given, *look.numbers)
        return Surveyed(*places, self.slices(), room)

    def looker(self) -> "Looker | None":
        """The kernel of `survey`, and how it is launched; None if blocks look for themselves."""
        if self.looks():
            return None
        group, slices, early = self.inputs.group, self.slices(), cuda_kernels.begins_early(self.inputs.query.device)
        blocks = self.problems * (group + 2) * slices
        numbers = (self.rows // group, self.columns, self.dims, self.channels, group, slices)
        if self.streams():
            return Looker(cuda_kernels.chunks_of(self.kernel, early), blocks, (*numbers, self.tau), True)
        centred = int(self.kernel in (AddLaplace.name, Laplace.name))
        return Looker(cuda_kernels.survey_of(self.dtype, early), blocks, (*numbers, centred), False)

    def slices(self) -> int:
        """In how many slices `survey.cu` has the inputs; none if blocks look for themselves."""
        if self.looks():
            return 0
        parts = self.problems * (self.inputs.group + 2)
        each = self.rows // self.inputs.group
        numbers = max(each * self.dims, self.columns * self.dims, self.columns * self.channels)
        return max(1, min(-(-_LOOKING // max(parts, 1)), numbers // _LOOK))

    def room(self) -> int:
        """Numbers that `survey` takes: chunks, which so lie at whole lines of memory, and what it finds."""
        found = self.problems * (self.inputs.group + 2) * self.slices() * 16 // self.inputs.query.itemsize
        return found + (self.chunks() if self.streams() else 0)

    def places(self, room: int) -> tuple[int, int | None]:
        """Where in that room is what was found, and the chunks."""
        return (room + 4 * self.chunks(), room) if self.streams() else (room, None)


class Looker(NamedTuple):
    """The kernel before a forward pass, its blocks and numbers, and whether it makes chunks."""

    kernel: Kernel
    blocks: int
    numbers: tuple[int | float, ...]
    makes: bool


class Surveyed(NamedTuple):
    """Where the kernel before a forward pass left what, in how many slices, and the tensor that has it."""

    found: int | None
    chunks: int | None
    slices: int
    room: Tensor | None


def _table(kernel: str, parameters: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, int]:
    """The numbers of a kernel as `kinds.cu` reads them, and how many nodes or coefficients there are."""
    if kernel == Spline.name:
        nodes, anchors, heights, slopes = Spline.pieces(parameters)
        before = heights[:-1] + slopes[:-1] * (nodes - anchors[:-1])
        pieces = torch.stack([anchors, heights, slopes, torch.zeros_like(slopes)], 1)
        between = torch.stack([nodes, (before + heights[1:]) / 2, (slopes[:-1] + slopes[1:]) / 2, nodes], 1)
        lines = torch.stack([pieces[:-1], between], 1).flatten()
        return torch.cat([lines, pieces[-1], nodes]).to(dtype), len(nodes)
    if kernel == PolynomialExponential.name:
        return parameters.to(dtype), len(parameters)
    return None, 0
