"""How many nodes a grid has: `"grid"`, `"grid:128"` for 128 of them, `"grid:1e-3"` for a tolerance."""

import math

from ...kernels import Kernel

DEFAULT = 64
FEWEST, MOST = 8, 1024

# relative errors of the output on unit normal queries and keys with random values are below factor / sqrt(D) / G^1.5,
# as `sortattn grid` measures them (benchmarks/results/grid-cpu.csv). Others are taken to be as hard as the hardest
_FACTORS = {"add_riesz": 3.0, "add_laplace": 10.0, "add_bump": 3.5}


def count(setting: str, kernel: Kernel, dims: int) -> int:
    """The number of nodes by dimension that the part behind the colon asks for; "" is the default."""
    if not setting:
        return DEFAULT
    try:
        number = float(setting)
    except ValueError:
        number = math.nan
    if 0 < number < 1:
        nodes = nodes_for(number, kernel, dims)
        if nodes > MOST:
            raise ValueError(
                f"backend 'grid:{setting}' would need {nodes} nodes a dimension, more than {MOST}; ask for a larger "
                "tolerance, or for an exact backend"
            )
        return nodes
    if number.is_integer() and FEWEST <= number <= MOST:
        return int(number)
    raise ValueError(
        f"backend 'grid:{setting}' must name a whole number of nodes from {FEWEST} to {MOST}, as in 'grid:128', or a "
        "tolerance below one, as in 'grid:1e-3'"
    )


def nodes_for(tolerance: float, kernel: Kernel, dims: int) -> int:
    """How many nodes keep unit normal data below a relative error: a multiple of 16, from the kernel alone.

    At its default bandwidth and with some dozens of dimensions; a narrower kernel or a single dimension needs more.

    It looks at no data, as the size of a table cannot wait for them on a GPU; `sortattn.grid_error` does.
    """
    factor = _FACTORS.get(kernel.name, max(_FACTORS.values()))
    wanted = (factor / math.sqrt(dims) / tolerance) ** (2 / 3)
    return max(16, 16 * math.ceil(wanted / 16))
