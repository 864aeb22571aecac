"""What the commands share that train a model: their device, alone or under `torchrun`, and how they end."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable

import torch

from ..bench.command import usable_device
from ..distill import parallel
from ..errors import CommandError


def resumable(options: Namespace, work: Callable[[str], None]) -> int:
    """Calls `work(device)`; returns the exit code. An interrupt or a full disk costs what is behind a checkpoint."""
    device = _own(options.device)
    parallel.start(torch.device(device))
    try:
        work(device)
    except KeyboardInterrupt:
        print(f"\nInterrupted. The same command continues from the last checkpoint in {options.out}.", file=sys.stderr)
        return 130
    except OSError as error:
        raise CommandError(
            f"{error}; the last checkpoint in {options.out} is valid, the same command continues"
        ) from error
    finally:
        parallel.stop()
    return 0


def _own(name: str) -> str:
    """The device of this process, of several on one machine."""
    return usable_device(f"cuda:{os.environ['LOCAL_RANK']}" if name == "cuda" and "LOCAL_RANK" in os.environ else name)
