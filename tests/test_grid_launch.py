"""Launches of the grid's kernels that are not looked at again: the same program, with the constants of the first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")


class Program:
    """Stands in for a compiled kernel: notes what it is launched with."""

    def __init__(self, notes):
        self.notes = notes

    def __getitem__(self, programs):
        return lambda *arguments: self.notes.append((programs, arguments))


class Kernel:
    """Stands in for a kernel of Triton's: compiles at every launch of its own."""

    __name__ = "some_kernel"
    arg_names = ("points", "length", "ROWS", "EVEN")

    def __init__(self):
        self.notes, self.compiled = [], 0

    def __getitem__(self, programs):
        def launch(*arguments, **constants):
            self.compiled += 1
            return Program(self.notes)

        return launch


@pytest.fixture
def launch(monkeypatch):
    from sortattn.ops.grid.gpu import launch

    monkeypatch.setattr(launch, "JITFunction", Kernel)
    monkeypatch.setattr(launch, "CompiledKernel", Program)
    return launch


def test_a_second_launch_of_its_kind_runs_what_the_first_has_compiled(launch):
    kernel, points = Kernel(), torch.zeros(3, 5)
    for _ in range(3):
        known = launch.launches(points, "second", 7)
        launch.quick(kernel, known)[(4, 2)](points, 5, EVEN=True, ROWS=64, num_warps=8)
    assert kernel.compiled == 1
    assert [note[0] for note in kernel.notes] == [(4, 2, 1)] * 2
    # constants in the order of the kernel's arguments, without what is none of them
    assert all(note[1][1:] == (5, 64, True) for note in kernel.notes)


def test_other_shapes_types_addresses_and_names_are_other_kinds(launch):
    memory = torch.zeros(100)
    points = memory[:15].view(3, 5)
    assert points.data_ptr() % 16 == 0
    others = (points.view(5, 3), points.double(), memory[1:16].view(3, 5))
    known = launch.launches(points, 7)
    assert all(launch.launches(other, 7) is not known for other in others)
    assert launch.launches(points, 8) is not known
    kernel = Kernel()
    launch.quick(kernel, known, "queries")[(1,)](points, 5, ROWS=1, EVEN=True)
    launch.quick(kernel, known, "keys")[(1,)](points, 5, ROWS=1, EVEN=True)
    assert kernel.compiled == 2


def _record(monkeypatch, call, inputs):
    """What `call(record, *inputs)` does, recorded, and the notes of what is launched later."""
    from sortattn.ops.grid.gpu import record

    notes = []
    monkeypatch.setattr(record, "straight", lambda compiled, programs: lambda *given: notes.append((compiled, given)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    with record.Recorder() as recorder:
        out = call(record, *inputs)
        return recorder.recorded(inputs, (out,)), notes


def test_a_recorded_call_is_launched_with_the_addresses_of_other_inputs(monkeypatch):
    from sortattn.cuda.constants import kept

    ones = kept(torch.ones)
    constant = ones(3)
    here = torch.device("cpu")

    def call(record, points, rows):
        flags, largest = record.zeros(5, here).split([2, 3])
        first, second = (record.empty(4, 2, device=here) for _ in range(2))
        record.launched("one", (1, 1, 1), (points, rows[1:], flags, first, 7))
        record.launched("two", (1, 1, 1), (first, constant, second[1:], largest))
        out = record.empty(6, device=here)
        record.launched("three", (1, 1, 1), (second, out, 0.5))
        return out

    recorded, notes = _record(monkeypatch, call, [torch.zeros(3), torch.zeros(3)])
    points, rows = torch.zeros(3), torch.zeros(3)
    (out,) = recorded.play([points, rows])
    assert [compiled for compiled, _ in notes] == ["one", "two", "three"]
    one, two, three = (given for _, given in notes)
    assert one[:3] == ("stream", points.data_ptr(), rows.data_ptr() + 4)
    assert one[5] == 7
    assert two[2] == constant.data_ptr()
    # behind the flags, and behind the first row
    assert (two[4] - one[3], two[3] - three[1]) == (8, 8)
    assert two[1] == one[4]
    assert abs(three[1] - two[1]) >= 32
    assert three[2:] == (out.data_ptr(), 0.5)
    assert out.shape == (6,)


def test_constants_of_a_call_that_is_played_in_a_graph_are_not_freed(monkeypatch):
    from sortattn.cuda import constants

    monkeypatch.setattr(constants, "_captured", set())
    here, ones = torch.device("cpu"), constants.kept(torch.ones)

    def call(record, points):
        record.zeros(1, here)
        out = record.empty(4, device=here)
        record.launched("one", (1, 1, 1), (points, ones(3), out))
        return out

    recorded, _ = _record(monkeypatch, call, [torch.zeros(3)])
    recorded.play([torch.zeros(3)])
    assert not constants._captured
    monkeypatch.setattr(constants, "capturing", lambda: True)
    recorded.play([torch.zeros(3)])
    assert [constant.read() is ones(3) for constant in constants._captured] == [True]


def test_a_call_that_is_more_than_launches_is_not_recorded(monkeypatch):
    here = torch.device("cpu")

    def call(record, points, summed, ends):
        record.zeros(1, here)
        made, out = record.empty(4, device=here), record.empty(4, device=here)
        record.launched("one", (1, 1, 1), (points, made))
        # a tensor of torch's own between two launches, or something else behind the last one
        made = made + 1 if summed else made
        record.launched("two", (1, 1, 1), (made, out if ends else made))
        return out

    for summed, ends in ((False, True), (True, True), (False, False)):
        recorded, _ = _record(monkeypatch, lambda *given, how=(summed, ends): call(*given, *how), [torch.zeros(3)])
        assert (recorded is not None) == (not summed and ends)


def test_some_of_the_heads_are_launched_as_triton_does():
    from sortattn.kernels import resolve
    from sortattn.ops.grid.gpu.formula import formula
    from sortattn.ops.grid.gpu.grid import Grid
    from sortattn.ops.grid.gpu.layout import Layout

    numbers = formula(resolve("add_riesz"), torch.device("cpu"))
    grid = Grid(torch.zeros(4, 2, 16), torch.zeros(4, 2, 3, 16), torch.ones(4), Layout(16, torch.float16), numbers, {})
    assert grid.some(slice(0, 4)).launches is not None
    assert grid.some(slice(0, 3)).launches is None


def test_queries_and_keys_at_other_addresses_are_located_by_programs_of_their_own(monkeypatch):
    from sortattn.kernels import resolve
    from sortattn.ops.grid.gpu import locate
    from sortattn.ops.grid.gpu.formula import formula
    from sortattn.ops.grid.gpu.grid import Grid
    from sortattn.ops.grid.gpu.layout import Layout

    asked = []

    class Silent:
        def __getitem__(self, programs):
            return lambda *arguments, **constants: None

    monkeypatch.setattr(locate, "quick", lambda kernel, known, *which: asked.append(which) or Silent())
    numbers = formula(resolve("add_riesz"), torch.device("cpu"))
    grid = Grid(torch.zeros(1, 3, 16), torch.zeros(1, 3, 3, 16), torch.ones(1), Layout(16, torch.float16), numbers, {})
    memory = torch.zeros(100, dtype=torch.float16)
    keys, queries = memory[:15].view(1, 5, 3), memory[1:16].view(1, 5, 3)
    for points in (keys, queries, keys):
        locate.locate(grid, points)
    assert asked[0] == asked[2] != asked[1]


@pytest.mark.parametrize("name", ["api", "causal_api"])
def test_kernels_are_launched_on_the_device_of_their_inputs(name, monkeypatch):
    import contextlib
    import importlib

    module = importlib.import_module(f"sortattn.ops.grid.gpu.{name}")
    entered = []

    @contextlib.contextmanager
    def on(device):
        entered.append(device)
        yield
        entered.pop()

    class LaunchedError(Exception):
        pass

    def forward(*arguments):
        raise LaunchedError(entered[-1])

    monkeypatch.setattr(module, "on", on)
    monkeypatch.setattr(module, "forward", forward)
    points, options = torch.zeros(1, 4, 3), ("add_riesz", False, 16, 1, False, True)
    with pytest.raises(LaunchedError, match="cpu"):
        module._forward(points, points, points, torch.zeros(1, 1), torch.ones(1), torch.empty(0), *options)


def test_another_device_than_the_current_one_is_entered(monkeypatch):
    from sortattn.cuda import launch

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: ("entered", device))
    other = torch.device("cuda", 1)
    assert launch.on(other) == ("entered", other)
    for here in (torch.device("cuda", 0), torch.device("cpu")):
        with launch.on(here):
            pass


def test_numbers_made_in_inference_mode_may_be_saved_for_gradients():
    from sortattn.kernels import KERNELS
    from sortattn.ops.grid.gpu.formula import formula

    with torch.inference_mode():
        found = formula(KERNELS["add_laplace"], torch.device("cpu"))
    assert not found.numbers.is_inference()
    assert not found.kinks.is_inference()


def test_instructions_of_two_integers_are_for_gpus_that_have_them(monkeypatch):
    from sortattn.ops.grid.gpu import layout

    monkeypatch.setattr(layout, "INTERPRETED", False)
    for capabilities, fast in (((), True), (((9, 0),), True), (((8, 6),), False), (((12, 0), (8, 0)), False)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda some=capabilities: bool(some))
        monkeypatch.setattr(torch.cuda, "device_count", lambda some=capabilities: len(some))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, some=capabilities: some[device])
        assert layout._fast() == fast


def test_a_program_has_no_more_points_than_its_integers_can_count():
    from sortattn.ops.grid.gpu import layout

    span, splits = layout.split_length(10_000_000, 1000, 256)
    assert span * 512 < 1 << 31
    assert span * (splits - 1) < 10_000_000 <= span * splits


@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.integers(0, 6), st.integers(0, 6)).map(
            lambda part: (part[0], min(part[1:]), max(part[1:]))
        ),
        max_size=9,
    )
)
def test_what_is_needed_at_the_same_time_lies_apart(parts):
    from sortattn.ops.grid.gpu.record import arranged

    offsets, memory = arranged(parts)
    for at, (size, first, last) in enumerate(parts):
        assert offsets[at] % 512 == 0
        assert offsets[at] + size <= memory
        for other in range(at):
            wide, begin, end = parts[other]
            apart = offsets[at] + size <= offsets[other] or offsets[other] + wide <= offsets[at]
            assert apart or last < begin or end < first


def test_small_parts_lie_where_a_large_one_was():
    from sortattn.ops.grid.gpu.record import arranged

    # a table is gone before places are made
    assert arranged([(1 << 10, 0, 1), (4 << 10, 0, 1), (1 << 10, 1, 3), (16 << 10, 2, 3)])[1] == 17 << 10
