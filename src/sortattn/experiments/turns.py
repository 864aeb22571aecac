"""Trainings that pause whenever the device has something to do, one after the other or all at once."""

from collections.abc import Iterator, Sequence

import torch


def take_turns(trainings: Sequence[Iterator[None]], device: str) -> None:
    """Runs all to their ends: in turn on a GPU, which one alone leaves idle for half of the time, else in order."""
    together = torch.device(device).type == "cuda"
    for group in [list(trainings)] if together else [[training] for training in trainings]:
        while group:
            group = [training for training in group if next(training, "over") != "over"]
