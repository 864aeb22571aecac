"""Which backend serves a call: by name, or by the measured cost model of `auto`."""

import math
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from .cuda.support import architecture
from .kernels import FeatureKernel, Gauss, Kernel, SidedKernel, Softmax
from .ops import causal, keops, linear, reference, tiled
from .ops.grid import Grid, gpu
from .ops.grid.checked import Checked
from .ops.grid.options import MOST, nodes_for
from .ops.sorted import backend as sorted_
from .ops.sorted import classes
from .ops.tiled import sdpa
from .precision import get_precision
from .validation import Problem

# what each of them needs beside torch it imports on first use; the modules stand here, as the compiler cannot look into
# an import
_MODULES: dict[str, ModuleType | Grid] = {
    "reference": reference,
    "tiled": tiled,
    "sorted": sorted_,
    "linear": linear,
    "keops": keops,
    "grid": Grid(),
}
NAMES = ("auto", *_MODULES)
EXACT = tuple(name for name in _MODULES if name != "grid")


@dataclass(frozen=True)
class Cost:
    """Nanoseconds of a forward pass, see `estimate`.

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


# on a GPU two calls in 16 bits with 64 nodes: the estimate of the error, that a decision waits for, was another call.
# Now it takes some queries, and has not been timed
_GRID = Cost(call=3e6, point=7e-4)
_GRID_GRADIENTS = Cost(call=5e6, point=2e-3)
# of causal calls, N = 512 ... 4096, twice, and with 192 nodes, which float16 asks for: by torch operations it is never
# faster than sorting
_GRID_CPU = Cost(call=2e7, point=28.0)
# The architecture of GPUs whose own is not in the table.
_DEFAULT = "sm_90"
# For the CPU and by architecture of GPUs, and for causal calls or with gradients where these were measured; by kernel,
# or else by kind of kernel. Float32, D = C = 64. The CPU's were measured on two cores of an x86-64 server (AVX-512) for
# N = 64 ... 1024, causal 64 ... 4096, those of sm_90 on an NVIDIA H200 for N = 512 ... 16,384, of kernels made by the
# user 512 ... 4096; see docs/performance.md. Causal calls by sorting are many launches there, which is their `call`
_COSTS: dict[str, dict[str, dict[str, Cost]]] = {
    "cpu": {
        "sided": {
            "reference": Cost(call=4.3e6, pair=3.5),
            "tiled": Cost(call=1.7e5, pair=0.22),
            "sorted": Cost(call=8.9e5, point=0.14),
            "grid": _GRID_CPU,
        },
        "add_riesz": {
            "tiled": Cost(call=1.7e5, pair=0.0141, product=0.0094),
            "sorted": Cost(call=1.16e6, point=0.149),
            "grid": _GRID_CPU,
        },
        "add_laplace": {
            "tiled": Cost(call=2e5, pair=0.0154, product=0.0103),
            "sorted": Cost(call=8.5e5, point=0.147),
            "grid": _GRID_CPU,
        },
        "add_bump": {
            "tiled": Cost(call=1.6e5, pair=0.0175, product=0.0117),
            "sorted": Cost(call=8.6e5, point=0.192),
            "grid": _GRID_CPU,
        },
        "dense": {
            "reference": Cost(call=4.2e5, pair=1.1),
            "tiled": Cost(call=1.9e5, pair=0.0175, product=0.0117),
        },
        "gauss": {
            "reference": Cost(call=4.2e5, pair=1.1),
            "tiled": Cost(call=1.9e5, pair=0.0155, product=0.0105),
        },
        "sdpa": {
            "reference": Cost(call=1.7e5, pair=0.04, product=0.04),
            "tiled": Cost(call=1.6e5, pair=0.016, product=0.016),
        },
        "features": {
            "reference": Cost(call=2.0e5, pair=0.1, product=0.03),
            "linear": Cost(call=2.1e5, feature=0.11),
        },
    },
    "cpu with gradients": {
        "add_riesz": {
            "tiled": Cost(call=5e5, pair=0.041, product=0.027),
            "sorted": Cost(call=2e6, point=0.465),
            "grid": _GRID_CPU,
        },
        "add_laplace": {
            "tiled": Cost(call=5e5, pair=0.051, product=0.034),
            "sorted": Cost(call=2e6, point=0.477),
            "grid": _GRID_CPU,
        },
        "add_bump": {
            "tiled": Cost(call=5e5, pair=0.058, product=0.038),
            "sorted": Cost(call=2e6, point=0.607),
            "grid": _GRID_CPU,
        },
    },
    "cpu causal": {
        "sided": {
            "reference": Cost(call=2.9e6, pair=2.9),
            "tiled": Cost(call=1.7e5, pair=0.12),
            "sorted": Cost(call=2e5, point=0.54),
            "grid": _GRID_CPU,
        },
        "add_riesz": {
            "tiled": Cost(call=1.9e5, pair=0.0055, product=0.0037),
            "sorted": Cost(call=4.5e5, point=0.175),
            "grid": _GRID_CPU,
        },
        "add_laplace": {
            "tiled": Cost(call=2e5, pair=0.007, product=0.0046),
            "sorted": Cost(call=4.7e5, point=0.2),
            "grid": _GRID_CPU,
        },
        "add_bump": {
            "tiled": Cost(call=1.7e5, pair=0.0074, product=0.005),
            "sorted": Cost(call=4.5e5, point=0.222),
            "grid": _GRID_CPU,
        },
    },
    "sm_90": {
        "sided": {
            "tiled": Cost(call=1e5, pair=5e-4),
            "sorted": Cost(call=6e5, point=1.5e-3),
            "grid": _GRID,
        },
        "add_riesz": {
            "tiled": Cost(call=5.2e4, pair=1.01e-4),
            "sorted": Cost(call=2.6e5, point=8e-4),
            "grid": _GRID,
        },
        "add_laplace": {
            "tiled": Cost(call=6e4, pair=1.82e-4),
            "sorted": Cost(call=2.6e5, point=9.45e-4),
            "grid": _GRID,
        },
        "add_bump": {
            "tiled": Cost(call=5.1e4, pair=1.36e-4),
            "sorted": Cost(call=1.3e5, point=1.62e-3),
            "grid": _GRID,
        },
        "dense": {"tiled": Cost(call=1e5, pair=1.7e-4)},
        "sdpa": {"tiled": Cost(call=2e5, pair=2e-5, product=2e-5)},
        "features": {"linear": Cost(call=3e5, feature=1e-4)},
    },
    "sm_90 with gradients": {
        "sided": {
            "tiled": Cost(call=5e5, pair=4e-3),
            "sorted": Cost(call=1.9e6, point=1.7e-3),
            "grid": _GRID_GRADIENTS,
        },
        "add_riesz": {
            "tiled": Cost(call=3.5e5, pair=4.98e-4),
            "sorted": Cost(call=1.75e6, point=2e-3),
            "grid": _GRID_GRADIENTS,
        },
        "add_laplace": {
            "tiled": Cost(call=4.2e5, pair=1.18e-3),
            "sorted": Cost(call=1.6e6, point=2.5e-3),
            "grid": _GRID_GRADIENTS,
        },
        "add_bump": {
            "tiled": Cost(call=3.7e5, pair=9.6e-4),
            "sorted": Cost(call=1.25e6, point=4.4e-3),
            "grid": _GRID_GRADIENTS,
        },
    },
    "sm_90 causal": {
        "sided": {
            "tiled": Cost(call=1e5, pair=3e-4),
            "sorted": Cost(call=1.2e6, point=2.6e-3),
            "grid": _GRID,
        },
        "add_riesz": {
            "tiled": Cost(call=5.2e4, pair=4.9e-5),
            "sorted": Cost(call=8e5, point=1.6e-3),
            "grid": _GRID,
        },
        "add_laplace": {
            "tiled": Cost(call=6e4, pair=8.8e-5),
            "sorted": Cost(call=8e5, point=1.85e-3),
            "grid": _GRID,
        },
        "add_bump": {
            "tiled": Cost(call=5.1e4, pair=6.6e-5),
            "sorted": Cost(call=8e5, point=2.2e-3),
            "grid": _GRID,
        },
    },
    "sm_90 causal with gradients": {
        "sided": {
            "tiled": Cost(call=5e5, pair=2.2e-3),
            "sorted": Cost(call=2e6, point=1e-2),
            "grid": _GRID_GRADIENTS,
        },
        "add_riesz": {
            "tiled": Cost(call=3.5e5, pair=2.45e-4),
            "sorted": Cost(call=1.5e6, point=4.4e-3),
            "grid": _GRID_GRADIENTS,
        },
        "add_laplace": {
            "tiled": Cost(call=4.2e5, pair=5.8e-4),
            "sorted": Cost(call=1.5e6, point=6e-3),
            "grid": _GRID_GRADIENTS,
        },
        "add_bump": {
            "tiled": Cost(call=3.7e5, pair=4.7e-4),
            "sorted": Cost(call=1.5e6, point=5.2e-3),
            "grid": _GRID_GRADIENTS,
        },
    },
}


def _family(kernel: Kernel) -> str:
    if isinstance(kernel, SidedKernel):
        return "sided"
    if isinstance(kernel, FeatureKernel):
        return "features"
    return "sdpa" if isinstance(kernel, (Softmax, Gauss)) else "dense"


def backend(name: str, problem: Problem, kernel: Kernel, normalised: bool) -> ModuleType | Grid | Checked:
    """What serves this call; raises if a backend asked for by name cannot."""
    module = named(cheapest(problem, kernel, normalised) if name == "auto" else name)
    if module is sorted_ and problem.causal:
        module = causal
    reason = module.why_not(problem, kernel, normalised)
    if reason:
        raise RuntimeError(f"backend {name!r} cannot serve this call: {reason}")
    return _checked(problem, kernel, normalised, module) if name == "auto" else module


def takes_16_bits(name: str, query: object, kernel: Kernel | None = None, bandwidth: object = None) -> bool:
    """Whether the backend of that name works on 16-bit tensors as they are: on a GPU.

    The grid does; and where the result is divided by the sum of weights of this kernel, torch's own attention, and
    `sorted`.
    """
    if not isinstance(name, str) or not isinstance(query, Tensor):
        return False
    if name in ("auto", "tiled"):
        return kernel is not None and sdpa.takes_16_bits(kernel, query, bandwidth)
    if name == "sorted":
        return kernel is not None and classes.here(query, query.dtype)
    return name.partition(":")[0] == "grid" and gpu.here(query)


def named(name: str) -> ModuleType | Grid:
    """The backend of that name; only the grid takes a setting, as in `"grid:128"`."""
    plain, colon, setting = name.partition(":") if isinstance(name, str) else ("", "", "")
    if plain not in _MODULES or (colon and (plain != "grid" or not setting)):
        raise ValueError(f"unknown backend {name!r}, expected one of {', '.join(NAMES)} or grid:NODES")
    return Grid(setting) if setting else _MODULES[plain]


def is_tiled(name: str, problem: Problem, kernel: Kernel) -> bool:
    """Whether `tiled` serves this attention; no answer, and so False, after `set_precision("rounding")`."""
    if name != "auto":
        return name == "tiled"
    return get_precision() == "exact" and cheapest(problem, kernel, normalised=True) == "tiled"


def cheapest(problem: Problem, kernel: Kernel, normalised: bool, backends: tuple[str, ...] = EXACT) -> str:
    """The backend that `auto` takes: of those that can serve the call, the one with the lowest estimate."""
    *leading, rows, dims = problem.query.shape
    columns, channels = problem.value.shape[-2:]
    features = int(kernel.dimension * dims) if isinstance(kernel, FeatureKernel) else 0
    sizes = (math.prod(leading), rows, columns, dims, channels, features)
    table = _costs(problem, kernel)
    able = [name for name in table if name in backends and _MODULES[name].why_not(problem, kernel, normalised) is None]
    costs = [table[name].estimate(*sizes) for name in able]
    # not min with a key, which the compiler cannot follow; a kernel that nobody else knows is left to its definition
    return able[costs.index(min(costs))] if able else "reference"


def _costs(problem: Problem, kernel: Kernel) -> dict[str, Cost]:
    """Those of such calls, by the table that fits best of the ones that have this kernel or its kind."""
    device, family = _kind_of(problem.query.device), _family(kernel)
    inputs = problem.query, problem.key, problem.value
    differentiated = torch.is_grad_enabled() and any(part.requires_grad for part in inputs)
    for order in (" causal", "") if problem.causal and family == "sided" else ("",):
        for passes in (" with gradients", "") if differentiated else ("",):
            table = _COSTS.get(f"{device}{order}{passes}", {})
            costs = table.get(kernel.name) or table.get(family)
            if costs is not None:
                return costs
    raise LookupError(f"there are no costs of {kernel.name} on {device}")


def _kind_of(device: torch.device) -> str:
    """Which part of the table is for this device."""
    if device.type != "cuda":
        return "cpu"
    # on AMD's GPUs too, whose architectures have other names
    found = architecture(device.index or 0)
    return found if found in _COSTS else _DEFAULT


def _checked(problem: Problem, kernel: Kernel, normalised: bool, exact: ModuleType) -> ModuleType | Checked:
    """The exact backend, or a grid before it if `set_precision("rounding")` allows that and it is worth it."""
    if get_precision() == "exact" or problem.dtype not in (torch.float16, torch.bfloat16):
        return exact
    if cheapest(problem, kernel, normalised, (*EXACT, "grid")) != "grid" or not _readable(problem.query):
        return exact
    roundoff = torch.finfo(problem.dtype).eps / 2
    nodes = nodes_for(roundoff, kernel, problem.query.shape[2])
    return exact if nodes > MOST else Checked(Grid(str(nodes)), exact, roundoff)


def _readable(tensor: Tensor) -> bool:
    """Whether a number that depends on this tensor may be looked at now."""
    if torch.compiler.is_compiling() or tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    if isinstance(tensor, torch._subclasses.FakeTensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


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
    for device, table in _COSTS.items():
        others = " and GPUs that are not in this table" if device.startswith(_DEFAULT) else ""
        for kind, costs in table.items():
            members = kinds.get(kind, kind)
            # those with an estimate of their own
            members = ", ".join(name for name in members.split(", ") if name == kind or name not in table)
            lines.append(f"{device}{others}: {members}")
            lines.extend(f"  {name:<10} {_formula(cost)}" for name, cost in costs.items())
    return "\n".join(lines)


def _formula(cost: Cost) -> str:
    parts = (
        (cost.pair, "P M N D"),
        (cost.product, "P M N C"),
        (cost.point, "P (M+N) D (C+16)"),
        (cost.feature, "P (M+N) F (C+1)"),
    )
    return " + ".join([f"{cost.call:.0f}", *(f"{factor:g} {term}" for factor, term in parts if factor)])
