"""The state of a training on disk, so that an interrupt costs seconds and changes nothing."""

import time
from collections.abc import Mapping
from pathlib import Path

from ..errors import CommandError
from ..files import load_state, remove_drafts, save_state


class Checkpoint:
    """A file with the state of the training that `plan` describes; there is at most one, and it is never half written.

    Plan and state hold tensors, numbers, strings, lists and dictionaries: what torch loads without running code.
    """

    def __init__(self, path: Path, plan: Mapping[str, object], *, every: float):
        self.path, self.plan, self.every = path, dict(plan), every
        self._saved = time.monotonic()

    def load(self) -> dict | None:
        """The state that was saved, None if there is none; CommandError if it is damaged or of another training."""
        remove_drafts(self.path)
        if not self.path.exists():
            return None
        try:
            found = load_state(self.path)
            plan, state = dict(found["plan"]), dict(found["state"])
        except (KeyError, TypeError, ValueError) as error:
            raise CommandError(f"{self.path} is no checkpoint ({error}); remove it, or use --fresh") from error
        for name, here in self.plan.items():
            if plan.get(name) != here:
                raise CommandError(
                    f"{self.path} was left by a run with {name}={plan.get(name)!r}, this one has {name}={here!r}; "
                    "finish that one first, choose another --name, or use --fresh"
                )
        return state

    def offer(self, state: Mapping[str, object]) -> None:
        """Saves the state if the last time is long enough ago."""
        if time.monotonic() - self._saved >= self.every:
            self.save(state)

    def save(self, state: Mapping[str, object]) -> None:
        """Replaces the file by this state in one step."""
        save_state(self.path, {"plan": self.plan, "state": dict(state)})
        self._saved = time.monotonic()

    def remove(self) -> None:
        """The training is over."""
        self.path.unlink(missing_ok=True)
