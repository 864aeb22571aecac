"""Training on GPUs: the gradient by hand, for runs of all lengths at once, by the kernels of `step_kernels`."""

import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ...kernels import RIESZ_EPSILON, Dpfp, ExponentialKernel, FeatureKernel, Kernel, SidedKernel, Softmax
from . import step_kernels
from .adam import Adam
from .training import CLIP, FLOOR, PARAMETERS, RATE, TARGET

# rows of one run in a tile; fewer where a program takes them over the whole width of the Gram matrix, or has much to do
# for each
ROWS, WIDE_ROWS, FEATURE_ROWS = 32, 2, 8
# the side of a tile of the Gram matrix, and warps in a program: from pairs of coordinates, and from inner products
SIDES, SCORE_WARPS = {True: 32, False: 64}, {True: 1, False: 4}
# how many terms an inner product takes at once; how many dimensions, or rows, a sum over pairs does
CHUNK, UNROLL = 32, 8
# rows of a matrix that one program has the gradient of
PIECE = 16
# products of float32 on tensor cores, in three parts that together have all its digits
PRECISION = "tf32x3"


class FusedStep:
    """Takes one step on the state of a batch, in place, as `training.Trainer` does."""

    def __init__(self, kernel: Kernel, lengths: Sequence[int], state: dict[str, Tensor], adam: Adam):
        self.kernel, self.state, self.adam = kernel, state, adam
        self.runs, self.longest, self.head_dim = state["tokens"].shape
        self.width = max(16, triton.next_power_of_2(self.head_dim))
        self.mapped = isinstance(kernel, FeatureKernel)
        self.pairs = not self.mapped and not isinstance(kernel, Softmax)
        # of features, or of coordinates
        self.count = self.head_dim * (int(kernel.dimension) if self.mapped else 1)
        self.tau = kernel.default_bandwidth(self.head_dim)
        self.kind = "dpfp" if isinstance(kernel, Dpfp) else kernel.name
        self.side = SIDES[self.pairs]
        self._place(list(lengths))
        self._reserve()

    def take(self) -> None:
        """One step with the runs that are active."""
        self.measure()
        self._differentiate()
        self._update()

    def _place(self, lengths: list[int]) -> None:
        """The lists of tiles, those of long runs first, since they take longest."""
        order = sorted(range(self.runs), key=lambda run: -lengths[run])
        rows, wide, narrow = (
            [(run, first) for run in order for first in range(0, lengths[run], size)]
            for size in (ROWS, WIDE_ROWS, FEATURE_ROWS)
        )
        squares = [(run, first, second) for run in order for first in range(0, lengths[run], self.side)
                   for second in range(0, lengths[run], self.side)]  # fmt: skip
        device = self.state["tokens"].device
        self.rows, self.wide, self.narrow, self.squares, self.lengths = (
            torch.tensor(part, dtype=torch.int32, device=device) for part in (rows, wide, narrow, squares, lengths)
        )

    def _reserve(self) -> None:
        """What one kernel of a step leaves to the next."""
        tokens = self.state["tokens"]
        # whole tiles of each kind
        self.pitch = triton.cdiv(self.longest, 64) * 64
        shape = (2, self.runs, self.pitch)
        self.points = tokens.new_zeros(*shape, self.head_dim)
        self.columns = tokens.new_zeros(2, self.runs, self.head_dim, self.pitch) if self.pairs else self.points
        self.sizes, self.sums = (tokens.new_zeros(shape) for _ in range(2))
        self.zeros = tokens.new_zeros(self.side, self.side)
        self.features = tokens.new_zeros(*shape, self.count) if self.mapped else self.points
        self.matrix = tokens.new_zeros(self.runs, self.pitch, self.pitch)
        self.distances = torch.zeros_like(self.matrix) if self.kind == "riesz" else self.matrix
        self.row_loss = tokens.new_zeros(self.runs, self.pitch)
        self.deltas = torch.zeros_like(self.points)
        self.slopes = tokens.new_zeros(*shape, self.count) if self.mapped else self.deltas
        self.by_tokens = torch.zeros_like(tokens)
        self.by_maps = tokens.new_zeros(2, self.runs, self.head_dim, self.head_dim)
        # sums of squares of the gradient: of each tile of tokens, then of each piece of the matrices
        self.used, self.pieces = triton.cdiv(self.longest, ROWS), triton.cdiv(self.head_dim, PIECE)
        self.norms = tokens.new_zeros(self.runs, self.used + 2 * self.pieces)
        self.factors = tokens.new_zeros(self.runs, 3)

    def measure(self) -> None:
        """Brings `row_loss`, what each row adds to the loss, up to the state; `matrix` is then the gradient by it."""
        state, active, count = self.state, self.state["active"], len(self.rows)
        shape = {"D": self.head_dim, "WIDTH": self.width, "ROWS": ROWS}
        step_kernels.project[count, 2](
            *(state[name] for name in PARAMETERS), self.points, self.columns, self.sizes, self.rows, self.lengths,
            active, self.runs, self.longest, self.pitch, KIND=self.kind if self.pairs else "features", TAU=self.tau,
            PRECISION=PRECISION, **shape,
        )  # fmt: skip
        if self.mapped:
            step_kernels.features[len(self.narrow), 2](
                self.points, self.features, self.narrow, self.lengths, active, self.runs, self.pitch,
                KIND=self.kind, SHIFT=self._shift, COUNT=self.count, num_warps=2, **shape | {"ROWS": FEATURE_ROWS},
            )  # fmt: skip
        source = self.columns if self.pairs else self.features
        step_kernels.scores[len(self.squares),](
            source[0], source[1], self.sizes, self.zeros, self.matrix, self.distances, self.squares, active,
            self.runs, self.pitch,
            KIND=self.kind, PAIRS=self.pairs, COUNT=self.count, EPSILON=self._epsilon, CHUNK=CHUNK, SIDE=self.side,
            PRECISION=PRECISION, UNROLL=UNROLL, num_warps=SCORE_WARPS[self.pairs],
        )  # fmt: skip
        step_kernels.normalise[len(self.wide),](
            self.matrix, self.distances, self.row_loss, self.wide, self.lengths, active, self.pitch,
            ROOT=self.kind == "riesz", EXPONENTIAL=isinstance(self.kernel, ExponentialKernel), FLOOR=FLOOR,
            ROWS=WIDE_ROWS, WIDTH=triton.next_power_of_2(self.pitch), CHUNK=CHUNK,
        )  # fmt: skip

    def _differentiate(self) -> None:
        """The gradients by tokens and matrices, from that by the Gram matrix."""
        state, active, runs = self.state, self.state["active"], self.runs
        if self.kind in ("riesz", "add_riesz"):
            step_kernels.add_up[len(self.rows), 2](
                self.matrix, self.sums, self.rows, self.lengths, active, runs, self.pitch, ROWS=ROWS, CHUNK=CHUNK
            )
        step_kernels.slopes[len(self.rows), 2, triton.cdiv(self.count, self.width)](
            self.features, self.sizes, self.sums, self.matrix, self.distances, self.slopes, self.rows, self.lengths,
            active, runs, self.pitch, KIND=self.kind, PAIRS=self.pairs, COUNT=self.count, WIDTH=self.width, ROWS=ROWS,
            TAU=self.tau, CHUNK=CHUNK, PRECISION=PRECISION, UNROLL=UNROLL,
        )  # fmt: skip
        shape = {"D": self.head_dim, "WIDTH": self.width}
        if self.mapped:
            step_kernels.undo_features[len(self.narrow), 2](
                self.points, self.features, self.slopes, self.deltas, self.narrow, self.lengths, active, runs,
                self.pitch, KIND=self.kind, SHIFT=self._shift, COUNT=self.count, ROWS=FEATURE_ROWS, num_warps=2,
                **shape,
            )  # fmt: skip
        step_kernels.token_gradient[len(self.rows),](
            self.deltas, state["query_map"], state["key_map"], self.by_tokens, self.norms, self.rows, self.lengths,
            active, runs, self.longest, self.pitch, self.norms.shape[1], PRECISION=PRECISION, ROWS=ROWS, **shape,
        )  # fmt: skip
        step_kernels.map_gradient[runs, 2, self.pieces](
            state["tokens"], self.deltas, self.by_maps, self.norms, self.lengths, active, runs, self.longest,
            self.pitch, self.norms.shape[1], self.used, D=self.head_dim, WIDTH=self.width, PIECE=PIECE, CHUNK=CHUNK,
            PRECISION=PRECISION,
        )  # fmt: skip

    def _update(self) -> None:
        """Notes the losses, ends the runs that are below the target, and takes a step of Adam with the others."""
        state, slots = self.state, self.norms.shape[1]
        step_kernels.note[self.runs,](
            self.row_loss, self.norms, *(state[name] for name in ("time", "loss", "lowest", "active", "steps")),
            self.factors, self.lengths, self.pitch, slots, TARGET=TARGET, CLIP=CLIP, FLOOR=FLOOR,
            LOG_BETA1=_log(self.adam.beta1), LOG_BETA2=_log(self.adam.beta2), WIDTH=triton.next_power_of_2(self.pitch),
            SLOTS=triton.next_power_of_2(slots),
        )  # fmt: skip
        moved = [state[f"{name}{part}"] for name in PARAMETERS for part in ("", "_mean", "_square")]
        step_kernels.adam[len(self.rows) + self.runs * triton.cdiv(self.head_dim, ROWS),](
            *moved, self.by_tokens, self.by_maps, self.factors, state["time"], self.rows, self.lengths,
            state["active"], self.runs, self.longest, len(self.rows), D=self.head_dim, WIDTH=self.width, ROWS=ROWS,
            RATE=RATE, BETA1=self.adam.beta1, BETA2=self.adam.beta2, TOKEN_EPSILON=self.adam.token_epsilon,
            MATRIX_EPSILON=self.adam.matrix_epsilon,
        )  # fmt: skip

    @property
    def _shift(self) -> int:
        return self.kernel.first if isinstance(self.kernel, Dpfp) else 0

    @property
    def _epsilon(self) -> float:
        return RIESZ_EPSILON * (self.head_dim if isinstance(self.kernel, SidedKernel) else 1)


def _log(beta: float) -> float:
    """Of zero: low enough."""
    return math.log(beta) if beta else -1e3
