"""Large tensors in huge pages."""

import re
import sys
from pathlib import Path

import pytest
import torch

from sortattn.ops.sorted.pages import in_huge_pages

pytestmark = pytest.mark.usefixtures("cpu_only")

MAPS = Path("/proc/self/smaps")


def flags(address: int) -> list[str]:
    """Those of the part of memory that the address is in, see `man proc_pid_smaps`."""
    inside = False
    for line in MAPS.read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no such address")


@pytest.mark.skipif(sys.platform != "linux" or not MAPS.exists(), reason="asks Linux for the flags of its memory")
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no huge pages")
def test_large_tensors_ask_for_huge_pages():
    tensor = torch.empty(64 << 20, dtype=torch.uint8)
    assert in_huge_pages(tensor) is tensor
    assert "hg" in flags(tensor.data_ptr() + tensor.nbytes // 2)


@pytest.mark.parametrize("count", [0, 1, 4 << 20])
def test_tensors_of_any_size_keep_what_is_written(count):
    assert torch.equal(in_huge_pages(torch.empty(count)).fill_(7.0), torch.full((count,), 7.0))
