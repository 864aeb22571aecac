"""Launch a kernel on the device and stream that torch is on."""

import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .compile import Defines, cubin

# a kernel is loaded once per device; loading twice is harmless, so the lock guards the table only
_kernels: dict[tuple, object] = {}
_lock = threading.Lock()
# bytes of shared memory that every kernel may have
_USUAL = 48 << 10


@dataclass(frozen=True)
class Kernel:
    """The function `entry` of a CUDA source, compiled with `defines`."""

    source: Path
    entry: str
    defines: Defines = ()

    def __call__(self, grid: tuple[int, ...], block: int, *arguments: Tensor | int | float | None, shared: int = 0):
        """Launch on the current device and stream.

        A tensor arrives as a pointer, None as a null pointer, an int as `long long`, a float as `double`.
        """
        from cuda.core import LaunchConfig, launch

        if 0 in grid:
            return
        device = torch.cuda.current_device()
        kernel = self._load(device)
        if shared > _USUAL:
            _allow(kernel, device, shared)
        config = LaunchConfig(grid=grid, block=block, shmem_size=shared)
        launch(_Stream(torch.cuda.current_stream(device).cuda_stream), config, kernel, *map(_argument, arguments))

    def _load(self, device: int):
        place = (self, device)
        with _lock:
            found = _kernels.get(place)
        if found is None:
            from cuda.core import Device, ObjectCode

            Device(device).set_current()
            major, minor = torch.cuda.get_device_capability(device)
            code = cubin(self.source, self.defines, f"sm_{major}{minor}")
            found = ObjectCode.from_cubin(code, name=self.source.name).get_kernel(self.entry)
            with _lock:
                _kernels[place] = found
        return found


class _Stream:
    """A raw stream in the form that cuda.core takes."""

    def __init__(self, handle: int):
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _argument(argument: Tensor | int | float | None) -> int | float:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    return 0 if argument is None else argument


def _allow(kernel, device: int, shared: int) -> None:
    """Ask for more shared memory than is usual."""
    from cuda.bindings import driver

    name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (error,) = driver.cuKernelSetAttribute(name, shared, kernel.handle, driver.CUdevice(device))
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"a block of {shared} bytes of shared memory is not to be had on cuda:{device}: {error}")
