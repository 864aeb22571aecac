"""Kernels compiled ahead and side by side: NVRTC lets go of Python's lock, and takes a second or two for one.

Threads take them in the order in which they are named. Whoever needs one that none has begun with compiles it himself.
A process that ends waits for what is being compiled, and begins nothing more.
"""

import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from . import compile
from .compile import Defines


class Program(NamedTuple):
    """What `compile.cubin` takes."""

    source: Path
    entry: str
    defines: Defines
    arch: str


class _Works:
    """What is to be compiled, what has been begun, and how many threads are at it."""

    def __init__(self):
        self.lock = threading.Lock()
        self.waiting: deque[Program] = deque()
        self.begun: dict[Program, Future[bytes]] = {}
        self.workers = 0

    def start(self, programs: Iterable[Program]) -> None:
        with self.lock:
            for program in programs:
                if program not in self.begun:
                    self.begun[program] = Future()
                    self.waiting.append(program)
            missing = min(len(self.waiting), _cores()) - self.workers
            for _ in range(missing):
                try:
                    threading.Thread(target=self._work, name="sortattn-compile").start()
                except RuntimeError:
                    # no more threads: whoever needs a program compiles it
                    return
                self.workers += 1

    def code(self, program: Program) -> bytes:
        future = self.begun.get(program)
        if future is None or future.cancel():
            return compile.cubin(*program)
        try:
            return future.result()
        except Exception:
            # the next one to ask tries again
            self.begun.pop(program, None)
            raise

    def _work(self) -> None:
        while True:
            with self.lock:
                if not self.waiting or not threading.main_thread().is_alive():
                    self.workers -= 1
                    return
                program = self.waiting.popleft()
            future = self.begun[program]
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(compile.cubin(*program))
                except Exception as error:
                    # for whoever asks
                    future.set_exception(error)


def start(programs: Iterable[Program]) -> None:
    """Compile them on other threads, if that has not been begun."""
    _works.start(programs)


def code(program: Program) -> bytes:
    """Its machine code, now."""
    return _works.code(program)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _forget() -> None:
    global _works
    _works = _Works()


_works = _Works()
# a forked child has no threads but its own
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
