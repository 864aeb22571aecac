"""What a run keeps on disk: a checkpoint, the losses, models. What is there is replaced when the new is complete."""

import csv
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch

from ..errors import CommandError
from ..files import load_state, remove_drafts, save_state

CHECKPOINT = "checkpoint.pt"
LOSSES = "losses.csv"


@dataclass(frozen=True)
class Row:
    """One step: the mean loss, and what it was made with."""

    stage: str
    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    seconds: float


COLUMNS = tuple(field.name for field in fields(Row))


def replace(path: Path, write: Callable[[Path], None]) -> None:
    """Has `write` make a file or a folder beside `path`, then puts it there: an interrupt leaves the old one valid."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(draft)
        if path.is_dir():
            # a folder cannot be replaced in one step; the old one is moved away first
            old = path.with_name(f".{path.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            os.replace(path, old)
            os.replace(draft, path)
            shutil.rmtree(old)
        else:
            os.replace(draft, path)
    finally:
        if draft.is_dir():
            shutil.rmtree(draft)
        draft.unlink(missing_ok=True)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keeps other processes out of the folder of a run; CommandError if one is there. A lock dies with its process."""
    try:
        import fcntl
    except ImportError:
        # Windows has no such locks
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(place)
        raise CommandError(f"another process trains in {folder}; wait for it, or choose another folder") from error
    except OSError:
        # some file systems cannot lock
        pass
    try:
        yield
    finally:
        os.close(place)


def save_checkpoint(folder: Path, state: dict) -> None:
    """Writes the checkpoint: tensors, numbers and text, nothing else."""
    save_state(folder / CHECKPOINT, state)


def load_checkpoint(folder: Path, device: torch.device | str = "cpu") -> dict | None:
    """The checkpoint, None if there is none; no code in it is run."""
    path = folder / CHECKPOINT
    remove_drafts(path)
    if not path.exists():
        return None
    try:
        state = load_state(path, device)
    except ValueError as error:
        raise CommandError(
            f"{path} is no checkpoint of this program, or damaged ({error}); move it away, or choose another folder"
        ) from error
    if "stage" not in state:
        raise CommandError(f"{path} is no checkpoint of this program; move it away, or choose another folder")
    return state


class Losses:
    """The table of losses; rows that a checkpoint does not know yet are forgotten when a run continues."""

    def __init__(self, folder: Path, known: Callable[[str, int], bool]):
        self.path = folder / LOSSES
        rows = read_losses(folder) if self.path.exists() else []
        self.rows = [row for row in rows if known(row.stage, row.step)]

        def write(path: Path) -> None:
            with path.open("w", newline="") as file:
                table = csv.writer(file, lineterminator="\n")
                table.writerow(COLUMNS)
                table.writerows(astuple(row) for row in self.rows)

        replace(self.path, write)

    def add(self, rows: list[Row]) -> None:
        """Appends rows."""
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(astuple(row) for row in rows)
        self.rows.extend(rows)


def read_losses(folder: Path) -> list[Row]:
    """The rows of a run; a last line that was cut off by an interrupt does not count."""
    lines = list(csv.reader((folder / LOSSES).read_text().splitlines()))
    kinds = [field.type for field in fields(Row)]
    rows = []
    for line in lines[1:]:
        try:
            rows.append(Row(*(kind(text) for kind, text in zip(kinds, line, strict=True))))
        except ValueError:
            break
    return rows
