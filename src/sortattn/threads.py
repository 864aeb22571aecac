"""A pool of threads for compiled kernels that release the interpreter lock.

Unlike a parallel region of Numba or OpenMP it may be used by several Python threads at once, and it starts afresh in
a forked child.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


class _Pool:
    def __init__(self):
        self.lock = threading.Lock()
        self.executor: ThreadPoolExecutor | None = None
        self.workers = 0

    def get(self, workers: int) -> ThreadPoolExecutor:
        with self.lock:
            if self.executor is None or self.workers < workers:
                # a pool that has become too small is left to finish what it has
                if self.executor is not None:
                    self.executor.shutdown(wait=False)
                self.executor = ThreadPoolExecutor(workers, thread_name_prefix="sortattn")
                self.workers = workers
            return self.executor


_pool = _Pool()


def _forget() -> None:
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


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

    futures = [_pool.get(workers - 1).submit(work) for _ in range(workers - 1)]
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


def apart(function: Callable[[], Result]) -> Result:
    """Call `function` on a thread of its own and return what it returns.

    Inside an operator torch records no operations for autograd, whatever the grad mode; a new thread starts clean.
    """
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work, name="sortattn-apart")
    thread.start()
    thread.join()
    return future.result()
