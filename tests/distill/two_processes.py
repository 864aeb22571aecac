"""A run of two processes, started by torchrun from the tests."""

import sys
from pathlib import Path

import torch

from sortattn import distill as d
from sortattn.distill import parallel


def main(folder: Path) -> None:
    """Both stages, in the folder."""
    from tests.distill import test_distill as tests

    parallel.start(torch.device("cpu"))
    teacher, student = tests.make()
    d.distill(student, tests.stages(teacher, student), tests.batches, folder)
    parallel.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
