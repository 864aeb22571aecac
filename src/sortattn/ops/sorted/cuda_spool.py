"""Walks around wound lines of 16-bit coordinates, see spool.cu: which lines are wound, what a walk needs and leaves."""

from pathlib import Path

import torch
from torch import Tensor

from ...cuda import launch
from ...cuda.compile import Defines
from ...cuda.constants import kept
from ...kernels import Terms
from . import cuda_coil, room
from .lines import Bandwidth
from .tracks import tracks_of

SOURCE = Path(__file__).with_name("spool.cu")
# keys up to which lines are wound: of longer ones many are alike, and a class takes less time than its keys
LONGEST = {torch.bfloat16: 32_768, torch.float16: 65_536}
# channels of a warp, at most
_WIDEST = 64
# cells of a line, and keys that may be in others
_CELLS, _STRAYS = 6, 24
# of what is in the cells around it, what a query has to see, as in spool.cu
_SEEN = 1 / 128
# coordinates that there can be
MOST = 1 << 16
# blocks of a multiprocessor; bytes of shared memory that are much, and what a block has beside what it asks for
RESIDENT, LARGE, _FIXED = 2, 128 << 10, 6 << 10


def pitch_of(value: Tensor, dtype: torch.dtype, terms: Terms, bandwidth: Bandwidth) -> float:
    """The bandwidths of a cell, or zero if lines of points of that type are not wound."""
    shared = room.device(value.device).shared
    if not isinstance(bandwidth, float) or not terms.compact or value.shape[2] > _WIDEST:
        return 0.0
    if value.shape[1] > LONGEST[dtype] or _warps(shared) * _station(_WIDEST) > shared - _FIXED:
        return 0.0
    return cuda_coil.pitch(tracks_of(terms, False))


class Spool:
    """The lines of some heads, with values of 32 or 64 channels; `half` and `walking` are the macros of other walks."""

    def __init__(
        self, query: Tensor, key: Tensor, values: Tensor, weight: Tensor | None, terms: Terms, tau: float,
        half: Defines, walking: Defines,
    ):  # fmt: skip
        tracks = tracks_of(terms, False)
        self.given = query, key, values, weight, tau
        self.pitch, self.height = cuda_coil.pitch(tracks), cuda_coil.height(tracks)
        self.windings = cuda_coil.wind(tracks, key, query, weight, tau, cells=_CELLS, strays=_STRAYS)
        circle = _circle(query.dtype, self.pitch * tau, query.device)
        # where codes are on the circle, and which of all that there can be
        self.spots, self.turned = circle[: 2 * MOST], circle[2 * MOST :]
        heads, number, dims = query.shape
        # queries that have to be mended, as they see classes that have lost digits
        self.unsure = torch.empty(heads, number, dtype=torch.bool, device=query.device)
        self.enough = _SEEN * key.shape[1] * self.height
        processors, _, shared, *_ = room.device(query.device)
        self._warps, self._blocks = _warps(shared), min(heads * dims, processors * RESIDENT)
        self._kernel = launch.Kernel(SOURCE, "spool", (*half, *defines_of(walking, shared, weight is not None)))

    def walk(self, lines: tuple[Tensor, ...], limits: Tensor, *sums: Tensor | int) -> None:
        """Fill the sums of the lines of a round that are wound."""
        _, _, values, weight, _ = self.given
        self._kernel(
            (self._blocks,), 32 * self._warps, *lines, limits, values, weight, self.windings, self.spots, self.height,
            *sums, shared=self._warps * _station(values.shape[2]),
        )  # fmt: skip

    def mend(self, out: Tensor) -> None:
        """Sum for queries that are unsure key by key."""
        query, key, values, weight, tau = self.given
        cuda_coil.mend(query, key, values, weight, tau, self.pitch, self.height, self.unsure, out)


def defines_of(walking: Defines, shared: int, weighed: bool) -> Defines:
    """The macros of spool.cu."""
    others = (pair for pair in walking if pair[0] not in ("CREW", "RESIDENT"))
    return *others, ("CREW", _warps(shared)), ("RESIDENT", RESIDENT), ("WEIGHED", int(weighed))


def _warps(shared: int) -> int:
    """Of a block."""
    return 8 if shared >= LARGE else 6


def _station(width: int) -> int:
    """The shared memory of a warp: two times thirty-two rows, sixteen sums, points."""
    return -(-(2 * 32 * width * 2 + 16 * (width + 8) * 4 + 9 * 64 + 32 * 6) // 128) * 128


@kept
def _circle(dtype: torch.dtype, period: float, device: torch.device) -> Tensor:
    """All 16-bit numbers in their order around a circle, by part and cell; and where each of their codes is there."""
    codes = torch.arange(MOST)
    bits = torch.where(codes >= MOST // 2, codes - MOST // 2, MOST - 1 - codes)
    numbers = bits.to(torch.uint16).view(dtype).double().nan_to_num(0.0, 0.0, 0.0)
    # rounded as in wind.cu
    places = numbers / torch.tensor(period, dtype=torch.float32).double()
    cells = places.floor()
    # what is too far out to have a part is on no line that is wound
    parts = (places - cells).nan_to_num(0.0).float().clamp(0, 1 - 2**-24)
    cells = cells.nan_to_num(2.0**30).clamp(-(2.0**30), 2.0**30).int()
    order = cells.argsort(stable=True)
    order = order[parts[order].argsort(stable=True)]
    spots = torch.stack([parts.view(torch.int32), cells], 1)[order]
    turned = torch.empty(MOST, dtype=torch.int32).index_copy_(0, order, torch.arange(MOST, dtype=torch.int32))
    return torch.cat([spots.flatten(), turned.to(torch.uint16).view(torch.int32)]).to(device)
