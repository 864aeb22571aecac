"""Kernels for classes of equal 16-bit coordinates compile, and take no more memory than there is room for."""

import contextlib

import pytest
import torch

import sortattn
from sortattn.cuda import launch
from sortattn.ops.sorted import classes, cuda_classes, cuda_coil, cuda_spool, room
from sortattn.ops.sorted.lines import narrow

from .cases import CASES
from .nvrtc import ARCHITECTURES, machine_code
from .test_classes_emulated import check, points
from .test_cuda_memory import Meter, size_of

pytest.importorskip("cuda.core")

KERNELS = {name: sortattn.KERNELS[name] for name in ("add_riesz", "add_laplace", "add_bump")}
KERNELS["matern52"] = CASES["matern52"].kernel


def half(dtype=torch.float16, long=0):
    return ("BFLOAT", int(dtype == torch.bfloat16)), ("LONG", long)


def compile_walk(name, architecture, width=64, parts=1, shared=227 << 10, **options) -> None:
    terms = KERNELS[name].terms()
    source, entry = cuda_classes.walk_of(terms) if terms.rate else (cuda_classes.ASCEND, "ascend")
    defines = (*half(), *cuda_classes.walking(terms, width, parts, shared), ("TURNED", 0), ("WEIGHED", 1))
    assert entry.encode() in machine_code(source, defines, architecture, **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", KERNELS)
def test_walks_compile(name, architecture):
    compile_walk(name, architecture)


@pytest.mark.parametrize("name", KERNELS)
def test_walks_compile_as_for_a_user(name):
    compile_walk(name, "sm_90", optimised=True)


@pytest.mark.parametrize(
    ("name", "width", "parts"),
    [("add_laplace", 32, 1), ("add_laplace", 64, 2), ("add_bump", 32, 1), ("add_bump", 128, 2)],
)
def test_walks_of_few_and_many_channels_compile(name, width, parts):
    compile_walk(name, "sm_90", width, parts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_walks_around_wound_lines_compile(architecture, dtype):
    for width, shared, weighed in ((64, 227 << 10, False), (32, 99 << 10, True)):
        walking = cuda_classes.walking(KERNELS["add_bump"].terms(), width, 1, shared)
        defines = (*half(dtype), *cuda_spool.defines_of(walking, shared, weighed))
        assert b"spool" in machine_code(cuda_spool.SOURCE, defines, architecture, entry="spool")
    winding = ("CELLS", 6), ("STRAYS", 24), *narrow(dtype)
    assert b"wind" in machine_code(cuda_coil.WINDING, winding, architecture)
    assert b"mend" in machine_code(cuda_coil.MEND, cuda_coil.defines_of_means(64, dtype), architecture)


@pytest.mark.parametrize("long", [0, 1], ids=["short", "long"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_counts_and_gathers_compiles(architecture, dtype, long):
    defines = half(dtype, long)
    code = machine_code(cuda_classes.CLASSES, (*defines, ("THREADS", 512)), architecture)
    for entry in (b"spread", b"look", b"rank_classes", b"arrange", b"divide_rounds"):
        assert entry in code
    for width in (32, 64, 128):
        gathering = cuda_classes.gathering(width, 1, turned=True, marked=True)
        assert b"gather" in machine_code(cuda_classes.GATHER, (*defines, *gathering), architecture)


@pytest.mark.parametrize(
    "shape", [(48, 16_384, 64, 64), (48, 131_072, 64, 64), (96, 16_384, 128, 128)], ids=["N16384", "N131072", "D128"]
)
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
def test_a_call_takes_no_more_room_than_it_has(name, shape, monkeypatch):
    monkeypatch.setattr(launch, "Kernel", lambda *_: lambda *arguments, **options: None)
    monkeypatch.setattr(room, "device", lambda device: room.Device(132, 50 << 20, 227 << 10))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    problems, length, dims, channels = shape
    points = [torch.empty(problems, length, n, dtype=torch.float16, device="meta") for n in (dims, dims, channels)]
    with Meter(*points) as meter:
        out = cuda_classes.attention(*points, None, KERNELS[name].terms(), 1.0, 1, 0.0)
    # twice as much as the inputs would take in float32
    assert meter.most - size_of(out) <= 2 * max(room.WORKSPACE, 2 * size_of(*points))


def test_a_walk_that_shared_memory_has_no_room_for_goes_another_way(monkeypatch):
    query, value = (torch.empty(8, 16_384, n, dtype=torch.float16, device="meta") for n in (32, 128))
    for name, least in (("add_bump", 99), ("add_laplace", 72)):
        for shared, served in ((least - 19 << 10, False), (least << 10, True)):
            monkeypatch.setattr(room, "device", lambda device, shared=shared: room.Device(132, 50 << 20, shared))
            assert (cuda_classes.plan(query, value, KERNELS[name].terms()) is not None) == served


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("kind", ["normal", "ties", "shifted", "far", "one sided", "apart", "equal"])
@pytest.mark.parametrize("name", KERNELS)
def test_calls_by_classes_match_the_definition(name, kind, masked, dtype, device, monkeypatch):
    if device != "cuda":
        pytest.skip("needs a GPU; tests/test_classes_emulated.py has these calls without one")
    monkeypatch.setattr(classes, "LEAST", dict.fromkeys(classes.LEAST, (1, 1)))
    for rows, columns, dims, channels in ((300, 2000, 3, 64), (1500, 700, 5, 20), (40, 33, 70, 70)):
        given = [part.to(device) for part in points(kind, 2, rows, columns, dims, channels, dtype)]
        options = {"key_mask": torch.arange(columns, device=device)[None] % 7 > 0} if masked else {}
        check(KERNELS[name], given, **options)
