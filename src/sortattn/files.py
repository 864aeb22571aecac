"""Files that are never half written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
