"""How long the contenders take, measured in turn so that a busy machine slows all of them alike."""

import math
import random
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)

LEAST_ROUNDS = 3
# a sample shorter than this repeats the call; clocks and thread pools are noisy below
SAMPLE_SECONDS = 0.02
MOST_REPEATS = 100
# calls before the first sample, if they are short
WARM_UPS = 5


def measure(
    calls: Mapping[Name, Callable[[], None]],
    repeats: Mapping[Name, int],
    *,
    rounds: int,
    budget: float,
    device: str = "cpu",
    on_round: Callable[[int], None] = lambda done: None,
) -> dict[Name, list[float]]:
    """Milliseconds per call, one sample a round, for every call of `calls`, each round going through all of them.

    A sample is the mean of `repeats` calls, as `warm_up` finds them. Stops after `rounds` rounds, or when `budget`
    seconds have passed, but not before three rounds. `on_round` hears how many rounds are done. Every round has its
    own order, so that no call always comes right after one that heats the machine.
    """
    started = time.perf_counter()
    samples: dict[Name, list[float]] = {name: [] for name in calls}
    for done in range(rounds):
        on_round(done)
        if done >= LEAST_ROUNDS and time.perf_counter() - started > budget:
            break
        for name in random.Random(done).sample(list(calls), len(calls)):
            samples[name].append(sample(calls[name], repeats[name], device))
    return samples


def warm_up(call: Callable[[], None], device: str = "cpu") -> int:
    """Calls to fill caches and allocators; returns how many calls should make one sample.

    The first call of a size may compile, and the second note what later ones repeat: the fastest of several says how
    long a call takes. A call that is long, and does not get much faster, is made twice.
    """
    fastest = math.inf
    for _ in range(WARM_UPS):
        before, seconds = fastest, sample(call, 1, device) / 1e3
        fastest = min(before, seconds)
        if fastest >= SAMPLE_SECONDS and seconds > before / 2:
            break
    return min(MOST_REPEATS, max(1, math.ceil(SAMPLE_SECONDS / max(fastest, 1e-9))))


def sample(call: Callable[[], None], repeats: int, device: str = "cpu") -> float:
    """The mean milliseconds of `repeats` calls in a row."""
    if torch.device(device).type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / repeats
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) * 1e3 / repeats
