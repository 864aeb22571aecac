"""Where and when a measurement was made."""

import os
import platform
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from .._version import __version__


@dataclass(frozen=True)
class Machine:
    """The machine and the versions, as they stand in every row."""

    machine: str
    cpu: str
    accelerator: str
    python: str
    torch: str
    numba: str
    sortattn: str


@dataclass(frozen=True)
class Measured(Machine):
    """What every row ends with: the machine, the versions, and when it was measured."""

    date: str


def this_machine(device: str = "cpu") -> Machine:
    """The facts about this machine, with the name of the GPU if `device` is one."""
    on_gpu = torch.device(device).type == "cuda"
    return Machine(
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores{_memory()}",
        cpu=cpu_model(),
        accelerator=torch.cuda.get_device_name(device) if on_gpu else "",
        python=platform.python_version(),
        torch=str(torch.__version__),
        numba=version("numba") or "",
        sortattn=__version__,
    )


def version(package: str) -> str | None:
    """The installed version of a package, without importing it; None if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def now() -> str:
    """The date and time in UTC, to the minute."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")


def cpu_model() -> str:
    """The name of the processor, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    try:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return ""
    return f", {pages / 2**30:.0f} GiB"
