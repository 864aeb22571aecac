"""The nodes of a call, and how points work with them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .formula import Formula
from .launch import Known
from .layout import FAST, Layout, shifts, whole


def has_factors(layout: Layout, dims: int) -> bool:
    """Whether points of exponentials have factors in calls that are not causal: where others have ramps of codes."""
    return layout.narrow and layout.padded <= 64 and dims >= 16


@dataclass(frozen=True)
class Grid:
    """The nodes of a call, `(P, D, GP)`, what is known of their cells `(P, D, STATS, GP)`, and the bandwidth `(P,)`."""

    nodes: Tensor
    stats: Tensor
    bandwidth: Tensor
    layout: Layout
    formula: Formula
    # those of all heads in calls of this kind, see `launch`
    launches: Known | None = None
    # a causal call
    chunked: bool = False

    @property
    def hats(self) -> bool:
        """Whether weights are made as such: those of exponentials do not sum to one, see `factored`.

        And over a few dimensions what ramps leave of a large table would show where a query is far from all keys.
        """
        return (self.formula.exponential and not self.factored) or self.dims < 16

    @property
    def factored(self) -> bool:
        """Whether the weights of exponentials are ramps times a factor of the point: their sum in its cell."""
        return self.formula.exponential and not self.chunked and has_factors(self.layout, self.dims)

    @property
    def halves(self) -> bool:
        """Whether the terms of pairs, in causal calls, are in float16, see `pairs`."""
        known = self.formula.kind in ("riesz", "bump", "laplace")
        return FAST and self.layout.narrow and known and self.dims % 16 == 0 and self.dims <= 128

    @property
    def whole(self) -> bool:
        """Whether they are made from the points themselves: those of add_riesz are divided by the bandwidth later."""
        return self.halves and self.formula.riesz and self.layout.dtype == torch.float16

    @property
    def line_type(self) -> torch.dtype | None:
        """In which points are kept for pairs, divided by the bandwidth, if they are."""
        return None if self.whole else torch.float16 if self.halves else torch.float32

    @property
    def looks_up(self) -> bool:
        """Whether points look their two nodes up: that takes as long for any number of nodes, products do not."""
        return self.layout.padded > 64

    @property
    def two_counts(self) -> bool:
        """Whether sums of weights are differences of two sums of ramps, of both places of the points."""
        return self.formula.exponential and not self.factored

    @property
    def place_type(self) -> torch.dtype:
        """In which the places of a sum are: codes, unless their nine bits are too few or nodes too many for them.

        Hats of exponentials are differences of two ramps, which take as many instructions either way.
        """
        codes = self.layout.narrow and not self.looks_up and not self.formula.exponential
        return torch.int32 if self.factored else torch.int16 if codes else torch.float32

    @property
    def changes(self) -> bool:
        """Whether points read the changes from node to node: by products of ramps."""
        return not self.hats and not self.looks_up

    @property
    def problems(self) -> int:
        return self.nodes.shape[0]

    @property
    def dims(self) -> int:
        return self.nodes.shape[1]

    def some(self, heads: slice, alike: bool = False) -> "Grid":
        """The grid of some of the heads; `alike`: all rounds of the call have as many of them, as aligned."""
        if whole(self.nodes, heads):
            return self
        parts = {name: getattr(self, name)[heads] for name in ("nodes", "stats", "bandwidth")}
        return replace(self, **parts, launches=self.launches if alike else None)

    def bits(self, rows: Tensor) -> int:
        """How many bits behind the point codes have where they multiply rows of this type, see `coarse_ramp`.

        As measured on one H200: with 64 nodes 0.61 instead of 0.71 ms, with 32 nodes 0.41 instead of 0.38. With
        a factor there is a product anyway.
        """
        coarse = rows.dtype == torch.bfloat16 and self.place_type != torch.float32
        return 8 if coarse and not self.hats and (self.factored or self.layout.padded == 64) else 9

    def shifts(self, places: Tensor, bits: int = 9) -> Tensor:
        """What `ramp` adds to these places."""
        return shifts(self.layout.padded, places.device, places.dtype, bits)
