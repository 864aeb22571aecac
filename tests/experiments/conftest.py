"""Fixtures for the experiments."""

import pytest


@pytest.fixture(autouse=True)
def one_thread(threads):
    """A command sets the number of threads, which is global; the fixture `threads` puts it back."""
    threads(1)
