"""Which backend serves a call: by name, or by the measured cost model of `auto`."""

import importlib
from dataclasses import dataclass
from types import ModuleType

from .kernels import FeatureKernel, Gauss, Kernel, SidedKernel, Softmax
from .validation import Problem

_MODULES = {
    "reference": ".ops.reference",
    "tiled": ".ops.tiled",
    "sorted": ".ops.sorted.backend",
    "linear": ".ops.linear",
    "keops": ".ops.keops",
}
NAMES = ("auto", *_MODULES, "grid")


@dataclass(frozen=True)
class Cost:
    """Nanoseconds of a forward pass: `call + P * (pair * M N D + product * M N C + point * (M + N) D (C + 16) + ...)`.

    Only the ratios of the coefficients matter, as `auto` compares backends on the same machine.
    """

    call: float
    pair: float = 0.0
    product: float = 0.0
    point: float = 0.0
    feature: float = 0.0

    def estimate(self, problems: int, rows: int, columns: int, dims: int, channels: int, features: int) -> float:
        """The estimated nanoseconds."""
        pairs = self.pair * rows * columns * dims + self.product * rows * columns * channels
        points = self.point * (rows + columns) * dims * (channels + 16)
        return self.call + problems * (pairs + points + self.feature * (rows + columns) * features * (channels + 1))


# measured on an x86-64 server core (AVX-512), float32; see docs/performance.md
_COSTS: dict[tuple[str, str], Cost] = {
    ("reference", "sided"): Cost(call=4e5, pair=1.2, product=0.05),
    ("tiled", "sided"): Cost(call=6e5, pair=1.0, product=0.05),
    ("sorted", "sided"): Cost(call=5e5, point=0.3),
    ("reference", "dense"): Cost(call=3e5, pair=0.6, product=0.05),
    ("tiled", "dense"): Cost(call=6e5, pair=0.5, product=0.05),
    ("reference", "sdpa"): Cost(call=2e5, pair=0.1, product=0.1),
    ("tiled", "sdpa"): Cost(call=1e5, pair=0.016, product=0.016),
    ("reference", "features"): Cost(call=1e5, pair=0.05, product=0.02),
    ("linear", "features"): Cost(call=1e5, feature=0.02),
}


def _family(kernel: Kernel) -> str:
    if isinstance(kernel, SidedKernel):
        return "sided"
    if isinstance(kernel, FeatureKernel):
        return "features"
    return "sdpa" if isinstance(kernel, (Softmax, Gauss)) else "dense"


def backend(name: str, problem: Problem, kernel: Kernel, normalised: bool) -> ModuleType:
    """The module that serves this call; raises if a backend asked for by name cannot."""
    if name == "auto":
        name = cheapest(problem, kernel, normalised)
    if name == "grid":
        raise RuntimeError("backend 'grid' is not there yet; use 'auto', which is exact")
    if name not in _MODULES:
        raise ValueError(f"unknown backend {name!r}, expected one of {', '.join(NAMES)}")
    module = _load(name)
    reason = module.why_not(problem, kernel, normalised)
    if reason:
        raise RuntimeError(f"backend {name!r} cannot serve this call: {reason}")
    return module


def _load(name: str) -> ModuleType:
    return importlib.import_module(_MODULES[name], __package__)


def cheapest(problem: Problem, kernel: Kernel, normalised: bool) -> str:
    """The backend that `auto` takes: of those that can serve the call, the one with the lowest estimate."""
    family = _family(kernel)
    rows, dims = problem.query.shape[1:]
    columns, channels = problem.value.shape[1:]
    features = int(kernel.dimension * dims) if isinstance(kernel, FeatureKernel) else 0
    sizes = (problem.query.shape[0], rows, columns, dims, channels, features)
    able = [
        name for name, kind in _COSTS if kind == family and _load(name).why_not(problem, kernel, normalised) is None
    ]
    return min(able, key=lambda name: _COSTS[name, family].estimate(*sizes))


def cost_table() -> str:
    """The cost model of `auto` as text: nanoseconds by backend and kind of kernel."""
    kinds = {
        "sided": "add_riesz, add_laplace, add_bump, splines, polynomial exponentials",
        "dense": "laplace, riesz",
        "sdpa": "softmax, gauss",
        "features": "tri, relu, elu, dpfp",
    }
    lines = [
        "auto takes the backend with the lowest estimate, in ns, for P heads, M queries, N keys, D, C, F features:"
    ]
    for kind, members in kinds.items():
        lines.append(f"{members}:")
        for (name, family), cost in _COSTS.items():
            if family == kind:
                terms = [
                    f"{cost.call:.0f}",
                    *(f"{cost.pair:g} P M N D" for _ in [0] if cost.pair),
                    *(f"{cost.product:g} P M N C" for _ in [0] if cost.product),
                    *(f"{cost.point:g} P (M+N) D (C+16)" for _ in [0] if cost.point),
                    *(f"{cost.feature:g} P (M+N) F (C+1)" for _ in [0] if cost.feature),
                ]
                lines.append(f"  {name:<10} {' + '.join(terms)}")
    return "\n".join(lines)
