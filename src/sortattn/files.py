"""Files that are never half written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
