"""Launch a kernel on the device and stream that torch is on."""

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from . import ahead
from .boxes import Boxes, Room, driver_library
from .compile import Defines, importing

# handles by kernel and device; loading twice is harmless, so the lock guards the table only
_handles: dict[tuple["Kernel", int], int] = {}
# what the handles belong to, which must live as long as they
_modules: list[object] = []
_lock = threading.Lock()
# arguments of a launch
_MOST = 64


@dataclass(frozen=True)
class Kernel:
    """The function `entry` of a CUDA source, compiled with `defines`.

    `exactly` says that it has instructions of one architecture alone, such as those of sm_90a.
    """

    source: Path
    entry: str
    defines: Defines = ()
    exactly: bool = False
    # handles by device, as in the table, which takes longer to look into
    _own: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    def __call__(
        self, grid: tuple[int, ...], block: int, *arguments: Tensor | int | float | None, shared: int = 0,
        early: bool = False, boxes: Boxes | None = None,
    ):  # fmt: skip
        """Launch on the current device and stream; an `early` one may begin before the one before it ends.

        A tensor arrives as a pointer, None as a null pointer, an int as `long long`, a float as `double`; with `boxes`
        the second tensor arrives as these.
        """
        if 0 in grid:
            return
        room = _room
        if room.listed is not None:
            room.listed[self] = None
            return
        # not torch.cuda's, which looks every time whether there is CUDA at all
        device = torch._C._cuda_getDevice()
        handle = self.handle(device)
        words = [
            part if (kind := type(part)) is int else part.data_ptr() if kind is Tensor else _word(part)
            for part in arguments
        ]
        room.words[: len(words)] = words
        places = room.places if boxes is None else room.with_boxes(boxes, words[1])
        room.form.set(grid, block, shared, early and _early_here())
        room.form.stream = torch._C._cuda_getCurrentRawStream(device)
        error = _launcher()(room.form.place, handle, places, None)
        if error:
            self._again((room.form.place, handle, places, None), device, error)

    def handle(self, device: int) -> int:
        """What the driver knows it by on that device, which must be the current one; compiled and loaded if need be."""
        handle = self._own.get(device)
        if handle is None:
            handle = self._own[device] = _handles.get((self, device)) or self._load(device)
        return handle

    def prepared(
        self, grid: tuple[int, ...], block: int, pointers: int, *numbers: int | float, shared: int = 0,
        early: bool = False,
    ) -> "Prepared":  # fmt: skip
        """A launch with so many `pointers` before its numbers, for the current device and this thread."""
        return Prepared(self, grid, block, pointers, numbers, shared, early)

    def _again(self, launch: tuple[int | None, ...], device: int, error: int) -> None:
        """What to do about a launch that failed."""
        names = _driver().CUresult
        if error == names.CUDA_ERROR_INVALID_CONTEXT:
            # of a thread that has not met the device yet
            from cuda.core import Device

            Device(device).set_current()
            error = _launcher()(*launch)
        if error:
            error = names(error)
            raise RuntimeError(f"{self.entry} of {self.source.name} cannot be launched on cuda:{device}: {error}")

    def _load(self, device: int) -> int:
        if _room.expected is not None:
            expected, _room.expected = _room.expected, None
            others = [kernel for kernel in expected() if (kernel, device) not in _handles]
            ahead.start(kernel._program(device) for kernel in (self, *others))
        code = ahead.code(self._program(device))
        with importing:
            from cuda.core import Device, ObjectCode
        Device(device).set_current()
        kernel = ObjectCode.from_cubin(code, name=self.source.name).get_kernel(self.entry)
        _allow(kernel, device)
        with _lock:
            _modules.append(kernel)
            _handles[self, device] = int(kernel.handle)
        return _handles[self, device]

    def _program(self, device: int) -> ahead.Program:
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}{'a' if self.exactly else ''}"
        return ahead.Program(self.source, self.entry, self.defines, arch)


class _Attribute(ctypes.Structure):
    """The driver's `CUlaunchAttribute`, for one that is a number."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint64), ("_", ctypes.c_uint64 * 7))


# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_EARLY = _Attribute(id=6, value=1)


def _early_here() -> bool:
    """Whether a launch may be early: in a graph that is being captured only if torch, which may look into it, is that
    of CUDA 13: older ones do not know such an edge."""
    return int((torch.version.cuda or "0").split(".")[0]) >= 13 or not torch.cuda.is_current_stream_capturing()


class _Form(ctypes.Structure):
    """The driver's `CUlaunchConfig`: all about a launch but its kernel and arguments."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("width", "height", "depth", "block", "_1", "_2", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
    )

    def __init__(self):
        super().__init__(_1=1, _2=1)
        self.attributes, self.place = ctypes.addressof(_EARLY), ctypes.addressof(self)

    def set(self, grid: tuple[int, ...], block: int, shared: int, early: bool) -> None:
        """A launch of that shape; `early` see `Kernel`."""
        self.width, self.height, self.depth = (*grid, 1, 1)[:3]
        self.block, self.shared, self.count = block, shared, early


class _Arguments:
    """Room for the arguments of a launch, 64 bits each, which the driver copies, and the pointers to them."""

    def __init__(self, count: int):
        self.words = (ctypes.c_int64 * count)()
        first = ctypes.addressof(self.words)
        self._pointers = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        self.places = ctypes.addressof(self._pointers)

    def with_second(self, place: int) -> ctypes.Array:
        """Other pointers, to the same arguments but for the second one."""
        pointers = type(self._pointers)(*self._pointers)
        pointers[1] = place
        return pointers


class Prepared:
    """A launch that takes place again and again, with other pointers each time, which come first among its arguments.

    It belongs to one thread, as the driver reads the pointers after Python's lock is let go.
    """

    def __init__(
        self, kernel: Kernel, grid: tuple[int, ...], block: int, pointers: int, numbers: tuple, shared: int,
        early: bool,
    ):  # fmt: skip
        self._kernel, self._device = kernel, torch._C._cuda_getDevice()
        self._handle, self._launch = kernel.handle(self._device), _launcher()
        self._form, self._arguments = _Form(), _Arguments(pointers + len(numbers))
        self._form.set(grid, block, shared, early)
        self._early = early
        self._arguments.words[pointers:] = [_word(part) for part in numbers]
        self._words, self._pointers = self._arguments.words, pointers
        self._all = self._form.place, self._handle, self._arguments.places, None

    def __call__(self, stream: int, *pointers: int) -> None:
        """On that stream of the device, which must be the current one."""
        self._words[: self._pointers] = pointers
        self._form.stream = stream
        if self._early:
            self._form.count = _early_here()
        error = self._launch(*self._all)
        if error:
            self._kernel._again(self._all, self._device, error)


class _Room(threading.local):
    """Where a thread leaves what a launch takes, and what it expects to launch."""

    def __init__(self):
        # kernels of `Expecting`, and those that `listed` has met so far
        self.expected: Callable[[], Iterable[Kernel]] | None = None
        self.listed: dict[Kernel, None] | None = None
        self._arguments, self.form = _Arguments(_MOST), _Form()
        self.words, self.places = self._arguments.words, self._arguments.places
        self._map, self._others = Room(), None

    def with_boxes(self, boxes: Boxes, address: int) -> int:
        """The pointers to arguments, of which the second one are boxes of the tensor at that address."""
        boxes.encode(self._map, address)
        if self._others is None:
            self._others = self._arguments.with_second(self._map.address)
        return ctypes.addressof(self._others)


_room = _Room()


class Expecting:
    """A context in which all that `kernels()` names is compiled side by side, once a kernel is launched for the first
    time."""

    def __init__(self, kernels: Callable[[], Iterable[Kernel]]):
        self._kernels = kernels

    def __enter__(self):
        self._before, _room.expected = _room.expected, self._kernels

    def __exit__(self, *_):
        _room.expected = self._before


def listed(call: Callable[[], object]) -> Iterable[Kernel]:
    """The kernels that a call would launch, in their order; its tensors had better be `bare`."""
    before, _room.listed = _room.listed, {}
    try:
        call()
        return _room.listed
    finally:
        _room.listed = before


def bare(part: object) -> object:
    """In place of a tensor on a GPU, one of the same size with nothing in it; all else as it is."""
    on_gpu = isinstance(part, Tensor) and part.is_cuda
    return torch.empty(part.shape, dtype=part.dtype, device="meta") if on_gpu else part


def foreseen(call: Callable, kernels: Callable[..., Iterable[Kernel]] | None = None) -> Callable:
    """`call`, all of whose kernels are compiled side by side once one of them is launched for the first time.

    They are what `kernels` returns for the same arguments, or those that it launches with bare tensors. With these it
    should do no more than make others: for many operations torch would import half of its compiler.
    """

    def expected(arguments: tuple) -> Iterable[Kernel]:
        try:
            return kernels(*arguments) if kernels else listed(lambda: call(*map(bare, arguments)))
        except Exception:
            # what cannot be foreseen is compiled when its turn comes
            return ()

    @functools.wraps(call)
    def calling(*arguments, **options):
        with Expecting(lambda: () if options else expected(arguments)):
            return call(*arguments, **options)

    return calling


def place_of(device: torch.device) -> torch.device:
    """The GPU that kernels for such tensors are launched on: the current one, if they are bare."""
    return device if device.type == "cuda" else torch.device("cuda", torch._C._cuda_getDevice())


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """A context with that device as the current one, if it is a GPU; entering torch's takes longer than a launch."""
    here = device.type != "cuda" or device.index == torch._C._cuda_getDevice()
    return _here if here else torch.cuda.device(device)


_here = contextlib.nullcontext()


def stream_on(device: int) -> int | None:
    """The current stream of that GPU, if it is the current one."""
    return torch._C._cuda_getCurrentRawStream(device) if torch._C._cuda_getDevice() == device else None


@functools.cache
def _driver():
    from cuda.bindings import driver

    return driver


@functools.cache
def _launcher() -> Callable[..., int]:
    """The driver's `cuLaunchKernelEx`: that of cuda.bindings takes longer, as it makes objects of its arguments."""
    launch = driver_library().cuLaunchKernelEx
    launch.argtypes, launch.restype = (ctypes.c_void_p,) * 4, ctypes.c_int
    return launch


def _word(argument: Tensor | int | float | None) -> int:
    """The argument as 64 bits."""
    if argument is None:
        return 0
    if isinstance(argument, float):
        return _WORD.unpack(_NUMBER.pack(argument))[0]
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


_WORD, _NUMBER = struct.Struct("q"), struct.Struct("d")


def _allow(kernel, device: int) -> None:
    """Let blocks have as much shared memory as the device has for one."""
    driver = _driver()
    place = driver.CUdevice(device)
    most = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    names = driver.CUfunction_attribute
    dynamic, static = names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    error, room = driver.cuDeviceGetAttribute(most, place)
    if error == driver.CUresult.CUDA_SUCCESS:
        error, taken = driver.cuKernelGetAttribute(static, kernel.handle, place)
    if error == driver.CUresult.CUDA_SUCCESS:
        (error,) = driver.cuKernelSetAttribute(dynamic, room - taken, kernel.handle, place)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"a kernel cannot have the shared memory of a block on cuda:{device}: {error}")
