"""Kernels of a call are compiled side by side, those of its backward pass with them; no device is needed for that."""

import subprocess
import sys
import threading

import pytest
import torch

import sortattn
from sortattn.cuda import ahead, compile, launch
from sortattn.ops.sorted import api, cuda_classes, room
from sortattn.ops.tiled import cuda as tiled
from sortattn.ops.tiled import cuda_kernels
from sortattn.ops.tiled.inputs import Inputs

from .cases import CASES

NAMED = ("add_riesz", "add_laplace", "add_bump")


@pytest.fixture
def works(monkeypatch):
    fresh = ahead._Works()
    monkeypatch.setattr(ahead, "_works", fresh)
    return fresh


@pytest.fixture
def _large_gpu(monkeypatch):
    monkeypatch.setattr(room, "device", lambda device: room.Device(132, 50 << 20, 227 << 10))
    monkeypatch.setattr(cuda_kernels, "room_of", lambda device: 227 << 10)
    monkeypatch.setattr(cuda_kernels, "processors_of", lambda device: 132)
    monkeypatch.setattr(cuda_kernels, "begins_early", lambda device: True)


def program(name: str) -> ahead.Program:
    return ahead.Program(name, "entry", (), "sm_90")


def test_programs_are_compiled_at_the_same_time(works, monkeypatch):
    together = threading.Barrier(2, timeout=30)

    def cubin(source, *_):
        together.wait()
        return source.encode()

    monkeypatch.setattr(compile, "cubin", cubin)
    monkeypatch.setattr(ahead, "_cores", lambda: 2)
    ahead.start([program("a"), program("b")])
    assert [ahead.code(program(name)) for name in "ab"] == [b"a", b"b"]


def test_without_a_thread_whoever_needs_a_program_compiles_it(works, monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(compile, "cubin", lambda source, *_: source.encode())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        ahead.start([program("a"), program("b")])
    assert works.workers == 0
    assert [ahead.code(program(name)) for name in "ab"] == [b"a", b"b"]


def test_what_has_failed_once_is_tried_again(works, monkeypatch):
    begun, calls = threading.Event(), []

    def cubin(source, *_):
        calls.append(source)
        begun.set()
        if len(calls) == 1:
            raise OSError("too many open files")
        return source.encode()

    monkeypatch.setattr(compile, "cubin", cubin)
    ahead.start([program("a")])
    assert begun.wait(30)
    with pytest.raises(OSError, match="too many"):
        ahead.code(program("a"))
    assert ahead.code(program("a")) == b"a"


def test_what_no_thread_has_begun_is_compiled_by_whoever_needs_it(works, monkeypatch):
    go_on, begun, calls = threading.Event(), threading.Event(), []

    def cubin(source, *_):
        calls.append((source, threading.current_thread()))
        if source == "slow":
            begun.set()
            go_on.wait(30)
        return source.encode()

    monkeypatch.setattr(compile, "cubin", cubin)
    monkeypatch.setattr(ahead, "_cores", lambda: 1)
    ahead.start([program("slow"), program("next")])
    assert begun.wait(30)
    # which would wait for the only thread otherwise
    assert ahead.code(program("next")) == b"next"
    go_on.set()
    assert ahead.code(program("slow")) == b"slow"
    assert [source for source, _ in calls] == ["slow", "next"]
    assert calls[1][1] is threading.current_thread()


def test_an_error_is_for_whoever_asks(works, monkeypatch):
    def cubin(*_):
        raise compile.CompileError("no such thing")

    monkeypatch.setattr(compile, "cubin", cubin)
    ahead.start([program("a")])
    with pytest.raises(compile.CompileError, match="no such thing"):
        ahead.code(program("a"))


def test_nothing_is_compiled_twice(works, monkeypatch):
    calls = []
    monkeypatch.setattr(compile, "cubin", lambda source, *_: calls.append(source) or b"code")
    for _ in range(3):
        ahead.start([program("a"), program("b")])
    assert ahead.code(program("a")) == ahead.code(program("b")) == b"code"
    assert sorted(calls) == ["a", "b"]


def test_a_launch_has_all_that_is_expected_compiled_once(works, monkeypatch):
    started = []
    monkeypatch.setattr(ahead, "start", lambda programs: started.append([each.entry for each in programs]))
    monkeypatch.setattr(ahead, "code", lambda each: (_ for _ in ()).throw(compile.CompileError(each.entry)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    first, second = (launch.Kernel(None, entry) for entry in ("first", "second"))
    with launch.Expecting(lambda: [second]):
        for kernel in (first, second):
            with pytest.raises(compile.CompileError):
                kernel._load(0)
    assert started == [["first", "second"]]


def bare(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


@pytest.mark.usefixtures("_large_gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", [*NAMED, "spline", "matern52"])
def test_a_rehearsal_of_the_sorted_backend_meets_all_that_a_call_launches(name, dtype):
    kernel = sortattn.KERNELS.get(name) or CASES[name].kernel
    terms, points = kernel.terms(), [bare(48, 16_384, 64, dtype=dtype) for _ in range(3)]
    middle = (None, None, terms.nodes, terms.below, terms.above)
    constants = (1.5, terms.rate, terms.compact, terms.folded, terms.constant)
    foreseen = launch.listed(lambda: api._rehearse(*points, *middle, *constants))
    grad, grad_extra = bare(48, 16_384, 64, dtype=dtype), bare(48, 16_384, dtype=dtype)
    orders = [bare(48, 64, 0)] * 2
    forward = launch.listed(lambda: api._sums(*points, *middle, *constants))
    asked = (True, False, True, False)
    backward = launch.listed(lambda: api._gradients(grad, grad_extra, *points, *middle, *orders, *constants, *asked))
    assert {*forward, *backward} <= {*foreseen}
    assert {each.entry for each in foreseen} >= {"look", "divide", "divide_backward"}
    # without gradients nothing of the backward pass
    alone = launch.listed(lambda: api._rehearse(*points, *middle, *constants, False))
    assert {*forward} <= {*alone}
    assert not ({*backward} - {*forward}) & {*alone}


@pytest.mark.usefixtures("_large_gpu")
@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", cuda_kernels.NAMES)
def test_all_that_the_tiled_backend_launches_is_foreseen(name, dtype, length):
    numbers = {"spline": CASES["spline"].kernel.parameters(), "polynomial_exponential": torch.ones(2)}.get(name)
    numbers = None if numbers is None else numbers.to("meta")
    points = [bare(4, 12, length, 64, dtype=dtype) for _ in range(3)]
    inputs = Inputs(*points, None, None, numbers, 1.0, name, False, 1, True, False)

    def both():
        rows, total, shift, copy = tiled.forward(inputs, True, True)
        tiled.backward(rows, copy, total, shift, inputs)

    forward = launch.listed(lambda: tiled.forward(inputs, False, False))
    assert [*forward] == tiled._kernels(inputs, False, False)
    assert {*launch.listed(both)} == {*tiled._kernels(inputs, True, True)}


def test_a_rehearsal_imports_nothing_of_the_compiler_of_torch():
    code = f"""
import sys, torch
from tests.test_cuda_ahead import *
room.device = lambda device: room.Device(132, 50 << 20, 227 << 10)
for name in {NAMED}:
    for dtype in (torch.float32, torch.float64):
        terms, points = sortattn.KERNELS[name].terms(), [bare(48, 16_384, n, dtype=dtype) for n in (64, 64, 40)]
        constants = (1.5, terms.rate, terms.compact, terms.folded, terms.constant)
        launch.listed(lambda: api._rehearse(*points, None, None, terms.nodes, terms.below, terms.above, *constants))
print(*{{"torch._dynamo", "torch._inductor", "sympy"}} & {{*sys.modules}})
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not child.stdout.split()


@pytest.mark.usefixtures("_large_gpu")
def test_a_rehearsal_of_classes_meets_their_kernels():
    points = [torch.empty(48, 16_384, 64, dtype=torch.bfloat16, device="meta")] * 3
    terms = sortattn.KERNELS["add_bump"].terms()
    met = launch.listed(lambda: cuda_classes.attention(*points, None, terms, 1.0, 1, 0.0))
    assert {"spread", "rank_classes", "arrange", "ascend", "gather"} <= {each.entry for each in met}


def test_launches_of_a_graph_are_early_only_where_torch_knows_such_edges(monkeypatch):
    for version, capturing, early in (("13.0", True, True), ("12.8", True, False), ("12.8", False, True)):
        monkeypatch.setattr(torch.version, "cuda", version)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        assert launch._early_here() == early
