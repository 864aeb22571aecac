"""A small teacher and a small student, each trained once."""

import pytest

from sortattn.cli import main


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """The folder of `vision scratch --smoke`."""
    # not above: without transformers the tests that need it are left out, and the others are not
    pytest.importorskip("transformers")
    out = tmp_path_factory.mktemp("teacher")
    assert main(["vision", "scratch", "--smoke", "--out", str(out)]) == 0
    return out / "scratch-softmax"


@pytest.fixture(scope="session")
def student(teacher, tmp_path_factory):
    """The folder of `vision end-to-end --smoke`, with both stages."""
    out = tmp_path_factory.mktemp("student")
    assert main(["vision", "end-to-end", str(teacher), "--kernel", "elu", "--smoke", "--out", str(out)]) == 0
    return out
