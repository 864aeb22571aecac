"""Where compiled kernels are kept, and how to be rid of them."""

from pathlib import Path

from .cuda import compile as cuda


def folders() -> list[Path]:
    """The folders in which Numba keeps this package's kernels for the CPU (they may not exist yet)."""
    from .ops.sorted.drive import sort_head
    from .ops.tiled.cpu_sums import sum_heads

    return [Path(kernel.stats.cache_path) for kernel in (sort_head, sum_heads)]


def cuda_folder() -> Path:
    """The folder of the kernels for GPUs (it may not exist yet)."""
    return cuda.folder()


def clear() -> int:
    """Delete the compiled kernels; returns how many files that were. They are made again when next needed."""
    files = [path for folder in folders() for pattern in ("*.nbi", "*.nbc") for path in folder.glob(pattern)]
    files += cuda.files()
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)
