"""Files that are never half written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from pickle import UnpicklingError
from zipfile import BadZipFile, ZipFile

from .errors import CommandError


def check_writable(path: Path) -> None:
    """CommandError if no file can be written there, before the work that would fill it; makes no folder."""
    place = next(folder for folder in path.absolute().parents if folder.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise CommandError(f"{path} cannot be written: expected a folder with leave to write, got {place}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft to write to; when the block ends well it takes the place of `path` in one step, else it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # in the same folder, since a rename is atomic only within a file system
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def remove_drafts(path: Path) -> None:
    """Removes what processes that were killed while they wrote `path` have left; none may be writing it now."""
    for draft in path.parent.glob(f".{escape(path.name)}.*"):
        if draft.name.rpartition(".")[2].isdecimal():
            draft.unlink(missing_ok=True)


def save_state(path: Path, state: object) -> None:
    """Replaces `path` by tensors, numbers and text for `torch.load`; OSError if there is no room for them."""
    import torch

    with replacing(path) as draft, draft.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # so torch ends a file in which a full disk or an interrupt has left a gap
            cause = error.__context__
            if isinstance(cause, KeyboardInterrupt):
                raise cause from None
            reason = str(cause if isinstance(cause, OSError) else error).splitlines()[0]
            raise OSError(f"cannot write {path} ({reason})") from error
        file.flush()
        # the name must not be there before the contents are
        os.fsync(file.fileno())


def load_state(path: Path, device: object = "cpu") -> dict:
    """What `save_state` wrote; no code in it is run. ValueError if it is not that, or not whole."""
    import torch

    try:
        # torch itself would load wrong numbers without a word
        with ZipFile(path) as parts:
            damaged = parts.testzip()
        found = None if damaged else torch.load(path, map_location=device, weights_only=True)
    except (OSError, EOFError, KeyError, TypeError, ValueError, RuntimeError, UnpicklingError, BadZipFile) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"the checksum of {damaged} is wrong" if damaged else f"it holds a {type(found).__name__}")
    return found
