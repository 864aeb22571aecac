"""Where compiled kernels are kept, and how to be rid of them."""

from pathlib import Path

from .cuda import compile as cuda


def folder() -> Path:
    """The folder in which Numba keeps this package's kernels for the CPU (it may not exist yet)."""
    from .ops.sorted.drive import sort_head

    return Path(sort_head.stats.cache_path)


def cuda_folder() -> Path:
    """The folder of the kernels for GPUs (it may not exist yet)."""
    return cuda.folder()


def clear() -> int:
    """Delete the compiled kernels; returns how many files that were. They are made again when next needed."""
    files = [path for pattern in ("*.nbi", "*.nbc") for path in folder().glob(pattern)] + cuda.files()
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)
