"""A pool of threads for compiled kernels that release the interpreter lock.

Unlike a parallel region of Numba or OpenMP it may be used by several Python threads at once, and it starts afresh in
a forked child. torch's own loops, in OpenMP, do not: a child that enters one after its parent has waits for ever.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch


class _Pool:
    def __init__(self):
        self.lock = threading.Lock()
        self.executor: ThreadPoolExecutor | None = None
        self.workers = 0

    def submit(self, workers: int, work: Callable[[], None]) -> Future:
        """To a pool of at least so many threads; RuntimeError if there are to be no more, as the interpreter ends."""
        with self.lock:
            if self.executor is None or self.workers < workers:
                # a pool that has become too small is left to finish what it has
                if self.executor is not None:
                    self.executor.shutdown(wait=False)
                self.executor = ThreadPoolExecutor(workers, thread_name_prefix="sortattn")
                self.workers = workers
            return self.executor.submit(work)


_pool = _Pool()
_forked = False


def _forget() -> None:
    global _pool, _forked
    _pool, _forked = _Pool(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def settle() -> None:
    """To be called before any work: a forked child has one thread from now on, as the workers of a `DataLoader` do."""
    global _forked
    # not while a compiler traces, which would stop here
    if torch.compiler.is_compiling() or not _forked:
        return
    _forked = False
    torch.set_num_threads(1)


def run(task: Callable[..., None], arguments: Sequence[tuple]) -> None:
    """Call `task(*arguments[i])` for all i on `torch.get_num_threads()` threads; returns when all are done.

    Arguments are taken in order by whichever thread is free, so tasks must write to places of their own.
    """
    workers = min(torch.get_num_threads(), len(arguments))
    if workers <= 1:
        for each in arguments:
            task(*each)
        return
    pending = iter(list(arguments))
    lock = threading.Lock()

    # a thread's own mode: only within it may the caller's tensors be written to
    inference = torch.is_inference_mode_enabled()

    def work() -> None:
        with torch.inference_mode(inference):
            while True:
                with lock:
                    each = next(pending, None)
                if each is None:
                    return
                task(*each)

    futures: list[Future] = []
    try:
        for _ in range(workers - 1):
            futures.append(_pool.submit(workers - 1, work))
    except RuntimeError:
        # then the caller does it alone
        pass
    try:
        # the caller works too: it never waits for a pool that others keep busy
        work()
    finally:
        for future in futures:
            future.cancel()
        errors = [future.exception() for future in futures if not future.cancelled()]
    for error in errors:
        if error is not None:
            raise error
