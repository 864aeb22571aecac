"""The columns of the paper's speed tables: kernels through a backend, and softmax through each of torch's."""

from dataclasses import dataclass

import torch

from ..cases import BOTH, FORWARD, Case, Settings, make_call, make_inputs
from ..run import FAILURES, PREFLIGHT_SIZE

# Table 2 and Table 5
PASSES = (FORWARD, BOTH)
PAPER_SIZES = tuple(2**power for power in range(7, 18))
# beyond, one call of softmax with the paper's 48 heads takes many seconds on a CPU
CPU_SIZES = PAPER_SIZES[:6]


@dataclass(frozen=True)
class Method:
    """One column of a table."""

    kernel: str
    name: str
    backend: str
    dtype: str = "float32"

    def case(self, passes: str, n: int) -> Case:
        """The case of the benchmark that fills the cell of this column with `n` tokens."""
        return Case(self.kernel, self.backend, self.dtype, passes, n)


KERNEL_METHODS = (
    Method("add_laplace", "SORTED", "sorted"),
    Method("add_laplace", "TILED", "tiled"),
    Method("add_bump", "SORTED", "sorted"),
    Method("add_bump", "TILED", "tiled"),
    Method("add_riesz", "SORTED", "sorted"),
    Method("add_riesz", "TILED", "tiled"),
    Method("add_riesz", "KEOPS", "keops"),
)
# what only some devices have
GRID_METHODS = {
    "cpu": (),
    "cuda": tuple(Method(kernel, "GRID16", "grid", "float16") for kernel in ("add_laplace", "add_bump", "add_riesz")),
}
SOFTMAX_METHODS = {
    "cpu": (Method("softmax", "SDPA32", "sdpa"),),
    "cuda": (
        Method("softmax", "MEM_EFF32", "mem_eff"),
        Method("softmax", "MEM_EFF16", "mem_eff", "float16"),
        Method("softmax", "FLASH16", "flash", "float16"),
        Method("softmax", "CUDNN16", "cudnn", "float16"),
    ),
}


def usable_methods(settings: Settings, quick: bool = False) -> tuple[list[Method], list[str]]:
    """The methods that this machine has, each called once at a small size, and why the others are left out.

    With `quick` so is what compiles for minutes.
    """
    found, reasons = [], []
    kind = torch.device(settings.device).type
    for method in (*KERNEL_METHODS, *GRID_METHODS[kind], *SOFTMAX_METHODS[kind]):
        if quick and method.backend == "keops":
            continue
        trouble = next((text for text in (_trouble(method, one, settings) for one in PASSES) if text), None)
        if trouble is None:
            found.append(method)
        else:
            reasons.append(f"{method.kernel} {method.name} is left out: {trouble}")
    return found, reasons


def _trouble(method: Method, passes: str, settings: Settings) -> str | None:
    case = method.case(passes, PREFLIGHT_SIZE)
    try:
        make_call(case, settings, make_inputs(case, settings))()
    except FAILURES as error:
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None
