"""The CUDA kernels of this backend, which are compiled at first use: sources, macros, shared memory, and which devices
have room for them."""

from functools import lru_cache
from pathlib import Path

import torch

from ...cuda.launch import Kernel
from ...kernels import (
    RIESZ_EPSILON,
    AddBump,
    AddLaplace,
    AddRiesz,
    Laplace,
    PolynomialExponential,
    Riesz,
    Spline,
)

_FORWARD, _SURVEY, _CHUNKS, _PREPARE, _SLOPES = (
    Path(__file__).with_name(f"{name}.cu") for name in ("forward", "survey", "chunks", "prepare", "slopes")
)
# of float64, and of the backward pass of wide heads and of kernels whose slopes are not steps
_TILED = {
    "forward": "tiled",
    "backward_quotient": "backward_quotient",
    "backward_query": "backward",
    "backward_key": "backward",
    "backward_table": "backward_table",
}
NAMES = tuple(kind.name for kind in (AddRiesz, AddLaplace, AddBump, Spline, PolynomialExponential, Laplace, Riesz))
# whose slopes are steps, which `slopes.cu` sums
STEPS = (AddRiesz.name, AddLaplace.name, AddBump.name)
# whose keys and values `chunks.cu` makes ready
STREAMED = (AddLaplace.name, AddBump.name)
# rows of a block; float64 has half the registers
ROWS = {torch.float32: 64, torch.float64: 32}
_TYPES = {torch.float32: "float", torch.float64: "double"}
THREADS = 128
# three blocks of this size fit into a multiprocessor of Hopper, two into one of Ampere, one into smaller ones
_SHARED = 72 << 10
# of the forward pass in float32, by the groups of warps of a block: factors of e^-|s - t| take twice the room, and
# where there is less of it not all dimensions have them
_TILES, FACTORS, _FEWER_FACTORS = {1: 73 << 10, 2: 125 << 10}, {1: 105 << 10, 2: 174 << 10}, 98 << 10
# of a walk over what `chunks.cu` has made ready: three blocks of this size fit into a multiprocessor of Hopper
_WALK = 75 << 10
# of slopes with one step, with three, and with factors
_PLACES = {AddRiesz.name: 88 << 10, AddBump.name: 106 << 10, AddLaplace.name: 79 << 10}
SLOPE_THREADS = 256
# rows that a block prepares for the slopes
SLICE = 32
# nodes or coefficients of a kernel made by the user for which there are registers
KEPT = 8
# columns that are summed at a time, and the most of them
CHUNK, WIDEST = 64, 256


@lru_cache
def kernel_of(
    entry: str, kernel: str, dtype: torch.dtype, wide: bool, coarse: bool = False, groups: int = 1, roomy: bool = True,
    rows: int = ROWS[torch.float32], taus: bool = True, early: bool = False, stream: bool = False, count: int = 0,
) -> Kernel:  # fmt: skip
    """The function `entry` for a kernel and a type; `wide` for more than 64 dimensions or channels.

    `coarse` makes products of numbers with eleven digits. In the forward pass of float32 `groups` of warps share the
    `rows` of a block; `roomy` see `is_roomy`; without `taus` all problems have one bandwidth, which makes a difference
    to `add_bump`; `early` see `begins_early`, `stream` see `Call.streams`. A kernel made by the user has `count` nodes
    or coefficients.
    """
    defines = (
        ("NUMBER", _TYPES[dtype]),
        ("KERNEL", kernel.upper()),
        ("CHUNKS", WIDEST // CHUNK if wide else 1),
        ("EPSILON", repr(RIESZ_EPSILON)),
    )
    if 0 < count <= KEPT and entry != "backward_quotient":
        defines += (("LISTED", count),)
    room = ("SHARED", shared_of(entry, kernel, dtype, coarse, groups, roomy, stream))
    coarse = ("COARSE", int(coarse))
    if entry in ("forward", "forward_values") and dtype == torch.float32:
        # those that hold more, of factors or of sums in integers beside others, have twice the registers
        blocks = 2 if wide or (kernel in (AddLaplace.name, Laplace.name) and not stream) else 3
        return Kernel(
            _FORWARD, "forward",
            (
                *defines, ("BLOCKS", blocks if groups == 1 else 1), room, coarse,
                ("REVERSED", int(entry == "forward_values")), ("GROUPS", groups), ("ROOMY", int(roomy)), ("OWN", rows),
                ("TAUS", int(taus or kernel != AddBump.name)), ("EARLY", int(early)), ("STREAM", int(stream)),
            ),
        )  # fmt: skip
    if entry == "prepare":
        return Kernel(_PREPARE, entry, (*defines, ("SLICE", SLICE)))
    if entry == "slopes":
        return Kernel(_SLOPES, entry, (*defines, ("BLOCKS", 2), room, coarse))
    defines += (("OWN", ROWS[dtype]), ("SHARED", _SHARED), ("BLOCKS", 3 if dtype == torch.float32 else 1))
    return Kernel(Path(__file__).with_name(f"{_TILED[entry]}.cu"), entry, defines)


@lru_cache
def survey_of(dtype: torch.dtype, early: bool = False) -> Kernel:
    """The kernel that looks through the inputs; `early` if the next one begins before it ends."""
    return Kernel(_SURVEY, "survey", (("NUMBER", _TYPES[dtype]), ("EARLY", int(early))))


@lru_cache
def chunks_of(kernel: str, early: bool = False) -> Kernel:
    """The kernel that makes keys and values ready for all blocks; `early` as above."""
    defines = (("NUMBER", "float"), ("KERNEL", kernel.upper()), ("EPSILON", repr(RIESZ_EPSILON)))
    return Kernel(_CHUNKS, "chunks", (*defines, ("EARLY", int(early))))


@lru_cache
def room_of(device: torch.device) -> int:
    """Bytes of shared memory that a block may have: 227 KB on Hopper, 163 on an A100, 99 on GPUs for desks."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@lru_cache
def processors_of(device: torch.device) -> int:
    """How many multiprocessors there are."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def begins_early(device: torch.device) -> bool:
    """Whether a launch may begin before the one before it ends, and wait for it where it needs it."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


def walks(device: torch.device) -> bool:
    """Whether one instruction brings a chunk to shared memory, and three blocks have room for them: on Hopper."""
    return begins_early(device) and room_of(device) >= 3 * _WALK


def is_roomy(device: torch.device) -> bool:
    """Whether a block may have the shared memory for the factors of all dimensions."""
    return room_of(device) >= FACTORS[1]


def shared_of(
    entry: str, kernel: str, dtype: torch.dtype, coarse: bool, groups: int = 1, roomy: bool = True, stream: bool = False
) -> int:  # fmt: skip
    """Bytes of shared memory of a block."""
    if stream:
        return _WALK
    if entry in ("prepare", "slopes"):
        return _PLACES[AddBump.name if coarse and kernel == AddLaplace.name else kernel]
    if entry in ("forward", "forward_values") and dtype == torch.float32:
        if kernel != AddLaplace.name:
            return _TILES[groups]
        return FACTORS[groups] if roomy else _FEWER_FACTORS
    return 0 if entry == "backward_quotient" else _SHARED
