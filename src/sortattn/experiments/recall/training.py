"""The training of the paper's section 4.1: tokens, `W_Q` and `W_K` are learned until `A` is the identity.

All runs of a batch (several seeds, and on GPUs all lengths) are trained side by side, as one tensor with a leading
dimension P; shorter ones are padded. A run that has reached the target stands still. The state is a dictionary of
tensors that is changed in place: a checkpoint can hold it. `Trainer` is the definition; `gpu` has one for GPUs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...errors import CommandError
from ...kernels import KERNELS, Dpfp, ExponentialKernel, Kernel
from .adam import OWN, Adam, adam_for

RATE = 0.03
TARGET = 1e-4
CLIP = 2.0
# queries without any weight have no gradient; tri, which can be negative, has the same floor
FLOOR = 1e-6
PARAMETERS = ("tokens", "query_map", "key_map")


class RolledDpfp(Dpfp):
    """`dpfp` without the squares: products with the first, second and third neighbour, as its inventors have it."""

    name = "dpfp_123"
    first = 1


TRAINED: dict[str, Kernel] = {**KERNELS, RolledDpfp.name: RolledDpfp()}
"""What can be trained: the paper's kernels, and `dpfp` as Schlag et al. wrote it."""


@dataclass(frozen=True)
class Batch:
    """What is trained together: `seeds` runs for every length of `sizes`, of one kernel."""

    kernel: str
    sizes: tuple[int, ...]
    seeds: int
    head_dim: int
    device: str
    adam: str = OWN

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The pairs (length, seed), in the order of the leading dimension."""
        return [(size, seed) for size in self.sizes for seed in range(self.seeds)]

    @property
    def counts(self) -> Tensor | None:
        """The lengths `(P,)`; None where all are the same and nothing is padded."""
        if len(self.sizes) == 1:
            return None
        return torch.tensor([size for size, _ in self.runs], device=self.device)


def start(batch: Batch) -> dict[str, Tensor]:
    """The state before the first step: standard normal tokens, the same for every kernel, and `W_Q = W_K = Id`."""
    longest, runs = max(batch.sizes), len(batch.runs)
    tokens = torch.zeros(runs, longest, batch.head_dim)
    for index, (size, seed) in enumerate(batch.runs):
        tokens[index, :size] = torch.randn(size, batch.head_dim, generator=torch.Generator().manual_seed(seed))
    identity = torch.eye(batch.head_dim).expand(runs, -1, -1)
    state = {"tokens": tokens, "query_map": identity.clone(), "key_map": identity.clone()}
    for name in PARAMETERS:
        state[f"{name}_mean"], state[f"{name}_square"] = (torch.zeros_like(state[name]) for _ in range(2))
    state["time"] = torch.zeros((), dtype=torch.float64)
    state["steps"] = torch.zeros(runs, dtype=torch.int64)
    state["active"] = torch.ones(runs, dtype=torch.bool)
    state["loss"], state["lowest"] = (torch.full((runs,), torch.inf) for _ in range(2))
    return {name: part.to(batch.device) for name, part in state.items()}


def losses(kernel: Kernel, tokens: Tensor, query_map: Tensor, key_map: Tensor, counts: Tensor | None = None) -> Tensor:
    """`|A - Id|_F^2` of every run, `(P,)`, with `q_n = W_Q u_n` and `k_n = W_K u_n`, by the dense definition."""
    query, key = (tokens @ matrix.transpose(-1, -2) for matrix in (query_map, key_map))
    place = torch.arange(tokens.shape[1], device=tokens.device)
    seen = None if counts is None else place < counts[:, None]
    attention = _attention(kernel, query, key, seen)
    error = (attention - (place == place[:, None]).to(tokens.dtype)).square().sum(-1)
    return (error if seen is None else torch.where(seen, error, 0.0)).sum(-1)


def _attention(kernel: Kernel, query: Tensor, key: Tensor, seen: Tensor | None) -> Tensor:
    """The attention matrices `(P, N, N)`."""
    bandwidth = kernel.default_bandwidth(query.shape[-1])
    exponential = isinstance(kernel, ExponentialKernel)
    scores = (kernel.log_gram if exponential else kernel.gram)(query, key, bandwidth)
    if seen is not None:
        scores = torch.where(seen[:, None], scores, -torch.inf if exponential else 0.0)
    return scores.softmax(-1) if exponential else scores / scores.sum(-1, keepdim=True).clamp(min=FLOOR)


class Trainer:
    """Takes steps on the state of a batch, in place, with gradients by autograd."""

    def __init__(self, batch: Batch, state: dict[str, Tensor]):
        self.state = state
        self._losses: Callable[..., Tensor] = partial(losses, TRAINED[batch.kernel], counts=batch.counts)
        self._adam = adam_for(batch.kernel, batch.adam)
        self._lengths = torch.tensor([size for size, _ in batch.runs], device=batch.device)

    def advance(self, steps: int) -> None:
        """Takes so many steps with the runs that are active."""
        for _ in range(steps):
            self._step()

    def wait(self) -> None:
        """Returns when the steps have been taken: here at once."""

    def finish(self) -> None:
        """Brings `loss` and `lowest` up to the last step."""
        with torch.no_grad():
            note(self.state, self._losses(*(self.state[name] for name in PARAMETERS)))

    def _step(self) -> None:
        parameters = [self.state[name].detach().requires_grad_() for name in PARAMETERS]
        found = self._losses(*parameters)
        gradients = torch.autograd.grad((found / self._lengths).sum(), parameters)
        with torch.no_grad():
            note(self.state, found.detach())
            update(self.state, gradients, self._adam)


def note(state: dict[str, Tensor], found: Tensor) -> None:
    """Notes the losses of the active runs; those below the target end."""
    state["loss"].copy_(torch.where(state["active"], found, state["loss"]))
    # not `minimum`, which a NaN would win
    state["lowest"].copy_(torch.where(state["loss"] < state["lowest"], state["loss"], state["lowest"]))
    state["active"].logical_and_(~(state["loss"] < TARGET))


def update(state: dict[str, Tensor], gradients: tuple[Tensor, ...], adam: Adam) -> None:
    """One step of Adam with clipped gradients for the runs that are active."""
    state["time"].add_(1.0)
    state["steps"].add_(state["active"])
    norm = sum(part.square().sum((1, 2)) for part in gradients).sqrt()
    scale = (CLIP / (norm + FLOOR)).clamp(max=1.0)[:, None, None]
    active = state["active"][:, None, None]
    shrink1, shrink2 = (1 - torch.pow(beta, state["time"]) for beta in (adam.beta1, adam.beta2))
    for name, gradient in zip(PARAMETERS, gradients, strict=True):
        mean, square = state[f"{name}_mean"], state[f"{name}_square"]
        mean.lerp_(scale * gradient, 1 - adam.beta1)
        square.lerp_((scale * gradient).square(), 1 - adam.beta2)
        epsilon = adam.token_epsilon if name == "tokens" else adam.matrix_epsilon
        move = RATE * (mean / shrink1) / ((square / shrink2).sqrt() + epsilon)
        state[name].sub_(torch.where(active, move, 0.0))


def make_trainer(batch: Batch, state: dict[str, Tensor]) -> Trainer:
    """The trainer for the batch's device; CommandError where a GPU cannot be used."""
    if torch.device(batch.device).type != "cuda":
        return Trainer(batch, state)
    try:
        from .gpu import GpuTrainer
    except ImportError as error:
        raise CommandError("recall on a GPU needs triton, which torch for CUDA comes with on Linux") from error
    return GpuTrainer(batch, state)
