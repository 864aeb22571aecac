"""A small teacher and a small student, each trained once."""

from contextlib import contextmanager

import pytest
import torch

from sortattn.cli import main


@contextmanager
def one_thread():
    """Runs are compared bit by bit, and tests turn deterministic algorithms on, which fixtures of a session do not.

    With several threads these add up in another order.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """The folder of `vision scratch --smoke`."""
    # not above: without transformers the tests that need it are left out, and the others are not
    pytest.importorskip("transformers")
    out = tmp_path_factory.mktemp("teacher")
    with one_thread():
        assert main(["vision", "scratch", "--smoke", "--out", str(out)]) == 0
    return out / "scratch-softmax"


@pytest.fixture(scope="session")
def student(teacher, tmp_path_factory):
    """The folder of `vision end-to-end --smoke`, with both stages."""
    out = tmp_path_factory.mktemp("student")
    with one_thread():
        assert main(["vision", "end-to-end", str(teacher), "--kernel", "elu", "--smoke", "--out", str(out)]) == 0
    return out
