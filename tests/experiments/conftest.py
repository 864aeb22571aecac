"""Interrupting a command as a user does."""

import signal
import subprocess
import sys
import time

import pytest


@pytest.fixture
def interrupt():
    """Runs `sortattn` with the arguments, sends SIGINT once `ready()` says so; returns exit code and standard error."""

    def run(arguments, ready) -> tuple[int, str]:
        # a shell's background job ignores the signal, and its children would too
        process = subprocess.Popen(
            [sys.executable, "-m", "sortattn", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 60
            while not ready() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            assert process.poll() is None, process.stderr.read()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
        return process.returncode, errors

    return run


@pytest.fixture(autouse=True)
def one_thread(threads):
    """A command sets the number of threads, which is global; the fixture `threads` puts it back."""
    threads(1)
