from dataclasses import asdict, replace

import pytest

from sortattn.bench.cases import Settings
from sortattn.bench.machine import Machine
from sortattn.bench.store import Row

SETTINGS = Settings(batch=1, heads=2, head_dim=8, value_dim=8, threads=2)
MACHINE = Machine("Linux x86_64, 2 cores, 8 GiB", "Some CPU", "", "3.12.1", "2.13.0", "0.68.1", "0.1.0")
ROW = Row(
    kernel="add_bump",
    backend="auto",
    dtype="float32",
    passes="forward",
    n=512,
    median_ms=2.0,
    min_ms=1.5,
    std_ms=0.25,
    rounds=3,
    softmax_ms=4.0,
    speedup=2.0,
    memory_bytes=1000,
    memory_ratio=0.5,
    date="2026-01-31 12:00",
    **asdict(SETTINGS),
    **asdict(MACHINE),
)


@pytest.fixture
def settings():
    return SETTINGS


@pytest.fixture
def machine():
    return MACHINE


@pytest.fixture
def make_row():
    """A row like any other, but for what is given."""

    def make(**changes) -> Row:
        return replace(ROW, **changes)

    return make


@pytest.fixture
def sweep(make_row):
    """Softmax and two kernels at three sizes: add_bump overtakes at 1,024, add_riesz never does."""
    rows = []
    for n, softmax, bump, riesz in ((512, 1.0, 2.0, 8.0), (2048, 16.0, 8.0, 32.0), (8192, 256.0, 32.0, 512.0)):
        common = {"n": n, "softmax_ms": softmax}
        rows.append(make_row(kernel="softmax", backend="sdpa", median_ms=softmax, speedup=1.0, **common))
        for kernel, spent in (("add_bump", bump), ("add_riesz", riesz)):
            rows.append(make_row(kernel=kernel, median_ms=spent, speedup=softmax / spent, **common))
    return rows
