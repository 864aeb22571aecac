"""How much memory a call takes beyond its inputs, at its peak; the output (and the gradients) are part of it.

On the CPU the kernel's own count is read, the high-water mark of the resident set, in a process that does nothing
else: `python -m sortattn.bench.memory` reads a case as JSON and prints the bytes.
"""

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ..kernels import KERNELS, SidedKernel
from .cases import Case, Settings, make_call, make_inputs

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def extra_bytes(case: Case, settings: Settings) -> int | None:
    """The peak of a case over its inputs in bytes, or None where the system does not tell (CPU, other than Linux).

    Raises RuntimeError if the process that measures dies, of a lack of memory most often.
    """
    if torch.device(settings.device).type == "cuda":
        return _cuda_peak(case, settings)
    if not CLEAR.exists():
        # other systems cannot reset the mark, and the difference of two marks would be a lower bound only
        return None
    wish = json.dumps([asdict(case), asdict(settings)])
    child = subprocess.run([sys.executable, "-m", __name__], input=wish, capture_output=True, text=True)
    if child.returncode:
        reason = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the process that measures memory ended with status {child.returncode}: {reason}")
    return int(child.stdout)


def _cuda_peak(case: Case, settings: Settings) -> int:
    call = make_call(case, settings, make_inputs(case, settings))
    # the first calls of a kind may compile, or note what later ones repeat, which takes more
    for _ in range(3):
        call()
    torch.cuda.synchronize(settings.device)
    before = torch.cuda.memory_allocated(settings.device)
    torch.cuda.reset_peak_memory_stats(settings.device)
    call()
    torch.cuda.synchronize(settings.device)
    return torch.cuda.max_memory_allocated(settings.device) - before


def _cpu_peak(case: Case, settings: Settings) -> int:
    """What the parent asks its child for."""
    torch.set_num_threads(settings.threads)
    # a few heads compile and load what the call runs through and start its threads; `auto` might choose otherwise for
    # so few, so both backends that it has for additive kernels are called
    few = replace(settings, batch=1, heads=min(settings.threads, settings.heads))
    additive = case.backend == "auto" and isinstance(KERNELS[case.kernel], SidedKernel)
    for backend in ("tiled", "sorted") if additive else (case.backend,):
        make_call(replace(case, backend=backend), few, make_inputs(case, few))()
    return peak_rise(make_call(case, settings, make_inputs(case, settings)))


def peak_rise(call: Callable[[], None]) -> int:
    """By how many bytes the resident set of this process grows during a call, at most; Linux only."""
    _return_free_memory()
    # imports and compilation have raised the mark above what is in use; this lowers it to what is
    CLEAR.write_text("5")
    before = _high_water_mark()
    call()
    return _high_water_mark() - before


def _return_free_memory() -> None:
    """Gives freed pages back to the system, so that the call cannot take them without being seen."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _high_water_mark() -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{STATUS} has no line VmHWM")


if __name__ == "__main__":
    case, settings = json.load(sys.stdin)
    print(_cpu_peak(Case(**case), Settings(**settings)))
