"""`sortattn capacity`: what the paper proves about the capacity of a kernel, checked by numbers.

The capacity of a kernel is the largest N for which queries and keys exist whose attention matrix `A` comes arbitrarily
close to the identity (the paper's section 2). `bounds` reads the paper's statement off the kernel, `loss_bound` gives
the least `|A - Id|_F^2` that it leaves possible, and `CONSTRUCTIONS` holds points `q = k` that reach it.
"""

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import kernel_attention
from ..errors import CommandError
from ..kernels import KERNELS, Kernel
from ..table import render

# how close to its limit a construction has to come, and how far its points may be moved apart for it
CLOSE = 1e-6
LARGEST_SCALE = 2.0**40


@dataclass(frozen=True)
class Construction:
    """Points `q = k` (in units of the bandwidth) that separate as many tokens as is known to be possible.

    `points(count, head_dim, scale)` gives `(count, head_dim)`; as `scale` grows their attention matrix approaches the
    identity. `most(head_dim)` is the largest `count`; tokens beyond share points, and then `|A - Id|_F^2` approaches
    their number. `proof` is where the paper has it, or says that it is ours.
    """

    points: Callable[[int, int, float], Tensor]
    most: Callable[[int], float]
    text: str
    proof: str


def bounds(kernel: Kernel, head_dim: int) -> tuple[float, float]:
    """The paper's statement as `low <= capacity <= high`, from the kernel's column of Table 1.

    >>> bounds(KERNELS["add_riesz"], 64), bounds(KERNELS["tri"], 64)
    ((128.0, inf), (1.0, 128.0))
    """
    if head_dim == 1 and kernel.name in ("riesz", "add_riesz"):
        # Proposition 8: on a line the Riesz kernel separates two tokens and no more
        return 2.0, 2.0
    if head_dim == 1 and kernel.name == "softmax":
        # Proposition 2 needs a sphere of infinitely many points
        return 1.0, math.inf
    sign, _, size = kernel.capacity.partition(" ")
    if sign == "inf":
        return math.inf, math.inf
    if sign == "-":
        return 1.0, math.inf
    number = float(size.removesuffix("D") or 1) * head_dim
    return (number, math.inf) if sign == ">=" else (1.0, number)


def loss_bound(kernel: Kernel, count: int, head_dim: int) -> float:
    """A number that `|A - Id|_F^2` cannot fall below for `count` tokens: `N - dim`, by Eckart and Young (Theorem 3).

    >>> loss_bound(KERNELS["relu"], 100, 64)
    36.0
    """
    if head_dim == 1 and kernel.name in ("riesz", "add_riesz"):
        # every token but the two outermost costs a half (the proof of Proposition 8)
        return max(0.0, (count - 2) / 2)
    return max(0.0, float(count - kernel.dimension * head_dim))


def loss(kernel: Kernel, query: Tensor, key: Tensor) -> float:
    """`|A - Id|_F^2` of the attention matrix `A`, by the dense definition in float64."""
    identity = torch.eye(len(key), dtype=torch.float64)
    matrix = kernel_attention(query.double(), key.double(), identity, kernel, backend="reference")
    return float((matrix - identity).square().sum())


# the constructions


def _lattice(count: int, head_dim: int, scale: float) -> Tensor:
    side = 1
    while side**head_dim < count:
        side += 1
    rest, digits = torch.arange(count), []
    for _ in range(head_dim):
        digits.append(rest % side)
        rest = rest // side
    return scale * torch.stack(digits, 1).double()


def _circle(count: int, head_dim: int, scale: float) -> Tensor:
    angle = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
    points = torch.zeros(count, head_dim, dtype=torch.float64)
    points[:, 0], points[:, 1] = angle.cos(), angle.sin()
    return scale * points


def _repeated(count: int, head_dim: int, scale: float) -> Tensor:
    return scale * torch.arange(count, dtype=torch.float64)[:, None].expand(count, head_dim)


def _axes(count: int, head_dim: int, scale: float) -> Tensor:
    units = torch.eye(head_dim, dtype=torch.float64)
    return scale * torch.cat([units, -units])[:count]


def _half_axes(count: int, head_dim: int, scale: float) -> Tensor:
    return scale * (2 * torch.eye(head_dim, dtype=torch.float64) - 1)[:count]


def _phases(count: int, head_dim: int, scale: float) -> Tensor:
    waves = torch.arange(head_dim, dtype=torch.float64)
    angles = 2 * math.pi / head_dim * torch.outer(waves, waves)
    return torch.cat([angles, angles + math.pi / 2])[:count]


def _unlimited(head_dim: int) -> float:
    return math.inf


_STATIONARY = Construction(_lattice, _unlimited, "q = k = r x, x a lattice", "Theorem 1")
_ADDITIVE = Construction(_repeated, _unlimited, "the points r n of a line in every dimension", "Theorem 9")

CONSTRUCTIONS: dict[str, Construction] = {
    "softmax": Construction(
        _circle, lambda head_dim: math.inf if head_dim > 1 else 0.0, "q = k = r x, |x| = 1", "Proposition 2"
    ),
    "gauss": _STATIONARY,
    "laplace": _STATIONARY,
    "riesz": Construction(_axes, lambda head_dim: 2 if head_dim == 1 else 0, "q = k = +-r", "Proposition 8"),
    "add_riesz": Construction(_axes, lambda head_dim: 2 * head_dim, "q = k = +-r e_d", "Theorem 9"),
    "add_laplace": _ADDITIVE,
    "add_bump": _ADDITIVE,
    # the paper has no points for these; they show that the first three bounds are attained, and what dpfp can do
    "tri": Construction(_phases, lambda head_dim: 2 * head_dim, "waves and the same a quarter later", "ours"),
    "relu": Construction(_axes, lambda head_dim: head_dim, "q = k = r e_d", "ours"),
    "elu": Construction(_half_axes, lambda head_dim: head_dim, "r in one dimension, -r in the others", "ours"),
    "dpfp": Construction(_axes, lambda head_dim: 2 * head_dim, "q = k = +-r e_d", "ours"),
}


@dataclass(frozen=True)
class Check:
    """One line of the table: the bound of the loss, and what the construction's points give."""

    kernel: Kernel
    head_dim: int
    count: int
    bound: float
    limit: float | None = None
    reached: float | None = None
    scale: float | None = None

    @property
    def good(self) -> bool:
        """Whether the points do what the construction claims, and do not undercut the bound."""
        if self.reached is None:
            return True
        return self.bound - CLOSE <= self.reached <= self.limit + CLOSE


def check(kernel: Kernel, count: int, head_dim: int) -> Check:
    """Moves the points of the kernel's construction apart until the loss is close to its limit."""
    bound = loss_bound(kernel, count, head_dim)
    construction = CONSTRUCTIONS[kernel.name]
    most = construction.most(head_dim)
    if not most or (kernel.name in ("riesz", "add_riesz") and count > most):
        # tokens that share a point of these reach no bound of the paper
        return Check(kernel, head_dim, count, bound)
    distinct = min(count, most)
    tau = kernel.default_bandwidth(head_dim)
    scale = 1.0
    while True:
        points = tau * construction.points(distinct, head_dim, scale)[torch.arange(count) % distinct]
        reached = loss(kernel, points, points)
        if reached <= count - distinct + CLOSE or scale >= LARGEST_SCALE:
            return Check(kernel, head_dim, count, bound, float(count - distinct), reached, scale)
        scale *= 2


def capacity(options: Namespace) -> int:
    """Prints statement, bounds and constructions; returns 1 if a construction does not do what it should."""
    for name in options.kernel:
        if name not in KERNELS:
            raise CommandError(f"unknown kernel {name!r}, expected one of {', '.join(KERNELS)}")
    head_dim = options.head_dim
    sizes = options.sizes or [head_dim, 2 * head_dim, 6 * head_dim, 8 * head_dim]
    checks = [check(KERNELS[name], count, head_dim) for name in options.kernel for count in sizes]
    statements = [_statement(KERNELS[name], head_dim) for name in options.kernel]
    print(f"What the paper states, D = {head_dim}\n")
    print(render(STATEMENT_COLUMNS, statements, options.format, left=4))
    print("\nThe least |A - Id|_F^2 for N tokens, and what the construction's points give in float64\n")
    print(render(CHECK_COLUMNS, [_line(one) for one in checks], options.format))
    failed = [one for one in checks if not one.good]
    for one in failed:
        print(f"\n{one.kernel.name}, N = {one.count}: expected {one.limit:g}, got {one.reached:g}")
    return 1 if failed else 0


STATEMENT_COLUMNS = ("kernel", "capacity", "points that separate tokens", "from")
CHECK_COLUMNS = ("kernel", "N", "at least", "reached", "r", "as it should")


def statement(kernel: Kernel, head_dim: int) -> str:
    """The paper's statement for this D in words.

    >>> statement(KERNELS["dpfp"], 64), statement(KERNELS["riesz"], 64)
    ('at most 384', 'no statement')
    """
    low, high = bounds(kernel, head_dim)
    if low == high:
        return "infinite" if math.isinf(low) else f"{low:.0f}"
    if math.isinf(high):
        return "no statement" if low <= 1 else f"at least {low:.0f}"
    return f"at most {high:.0f}"


def _statement(kernel: Kernel, head_dim: int) -> list[str]:
    construction = CONSTRUCTIONS[kernel.name]
    words = (construction.text, construction.proof) if construction.most(head_dim) else ("none known", "")
    return [kernel.name, statement(kernel, head_dim), *words]


def _line(one: Check) -> list[str]:
    cells = [one.kernel.name, f"{one.count:,}", f"{one.bound:g}"]
    if one.reached is None:
        return [*cells, "", "", "no points"]
    return [*cells, f"{one.reached:.6g}", f"{one.scale:g}", "yes" if one.good else "NO"]
