"""A run: every group in turn, its rows stored as soon as they are known."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median, pstdev

import torch

from ..errors import CommandError
from .cases import Case, Group, Settings, input_bytes, make_call, make_inputs
from .machine import now
from .measure import measure, warm_up
from .memory import extra_bytes
from .progress import Advance
from .store import Row, Store

# what torch, Numba and the backends raise when a call is refused or memory runs out
FAILURES = (ValueError, TypeError, RuntimeError, MemoryError, ImportError, NotImplementedError)
PREFLIGHT_SIZE = 32


def preflight(groups: Sequence[Group], settings: Settings) -> None:
    """Calls every contender once at a small size, which compiles it; CommandError if one cannot serve the call."""
    for case in dict.fromkeys(case.at(PREFLIGHT_SIZE) for group in groups for case in group.cases):
        try:
            make_call(case, settings, make_inputs(case, settings))()
        except FAILURES as error:
            raise CommandError(
                f"{case.kernel} with backend {case.backend!r} cannot be measured ({case.passes}, {case.dtype}, "
                f"{settings.device}): {error}"
            ) from error


def run(
    groups: Sequence[Group],
    settings: Settings,
    store: Store,
    *,
    rounds: int,
    budget: float,
    memory: bool,
    advance: Advance,
) -> list[str]:
    """Measures what `store` does not hold yet; returns what went wrong on the way, a line for each case left out.

    A case that fails is not tried at larger sizes. An interrupt loses the group in progress and nothing else.
    """
    failed: dict[Case, str] = {}
    unseen: list[str] = []
    for group in groups:
        wanted = [case for case in group.cases if case not in store and case.at(0) not in failed]
        if not wanted:
            continue
        # softmax takes part in every group, since the others are compared with it in the same rounds
        entrants = [case for case in group.cases if case.is_softmax and case.at(0) not in failed]
        entrants += [case for case in wanted if case not in entrants]
        samples = _samples(group, entrants, settings, rounds, budget, advance, failed)
        softmax = next((median(found) for case, found in samples.items() if case.is_softmax), None)
        for case in wanted:
            if case in samples:
                advance(f"{group.label} {case.kernel} memory" if memory else group.label, 0)
                extra = _memory(case, settings, unseen) if memory else None
                store.add(_row(case, settings, store, samples[case], softmax, extra))
            advance(group.label, 1)
    return [f"{message}; larger sizes were not tried" for message in failed.values()] + unseen


def _samples(
    group: Group,
    entrants: list[Case],
    settings: Settings,
    rounds: int,
    budget: float,
    advance: Advance,
    failed: dict[Case, str],
) -> dict[Case, list[float]]:
    """The samples of those entrants that could be called; the others go to `failed`."""
    inputs = make_inputs(entrants[0], settings)
    calls: dict[Case, Callable[[], None]] = {}
    repeats: dict[Case, int] = {}
    for case in entrants:
        call = make_call(case, settings, inputs)
        advance(f"{group.label} {case.kernel}", 0)
        try:
            repeats[case] = warm_up(call, settings.device)
        except FAILURES as error:
            failed[case.at(0)] = f"{case.kernel} ({case.backend}) failed at {group.label}: {error}"
        else:
            calls[case] = call
    return measure(
        calls,
        repeats,
        rounds=rounds,
        budget=budget,
        device=settings.device,
        on_round=lambda done: advance(f"{group.label} round {done + 1}", 0),
    )


def _memory(case: Case, settings: Settings, unseen: list[str]) -> int | None:
    try:
        return extra_bytes(case, settings)
    except FAILURES as error:
        unseen.append(f"memory of {case.kernel} ({case.backend}) at N={case.n:,}: {error}")
        return None


def _row(
    case: Case, settings: Settings, store: Store, samples: list[float], softmax: float | None, extra: int | None
) -> Row:
    middle = median(samples)
    return Row(
        **asdict(case),
        median_ms=_short(middle),
        min_ms=_short(min(samples)),
        std_ms=_short(pstdev(samples)),
        rounds=len(samples),
        softmax_ms=None if softmax is None else _short(softmax),
        speedup=None if softmax is None else _short(softmax / middle),
        memory_bytes=extra,
        memory_ratio=None if extra is None else _short(extra / input_bytes(case, settings)),
        date=now(),
        **store.common,
    )


def _short(number: float) -> float:
    """Five digits: more would be noise."""
    return float(f"{number:.5g}")


def use_threads(threads: int | None) -> int:
    """Sets the number of threads if one is given; returns the number in use."""
    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()
