"""Constants on the device: a bounded number, apart from what graphs allocate, alive as long as a graph reads them."""

import gc
import importlib.util
import threading
import weakref

import pytest
import torch

import sortattn
from sortattn.cuda import constants
from sortattn.ops import parameters

from .test_parameters import QUERY

HAT = ([-1.0, 0.0, 1.0], [0.0, 1.0, -1.0, 0.0])


@pytest.fixture
def capture(monkeypatch):
    """Has the current stream captured from now on, without a GPU; called with False, not any more."""
    state = {"on": False}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["on"])
    monkeypatch.setattr(constants, "_allow_while_capturing", lambda: None)
    monkeypatch.setattr(constants, "_captured", set())
    return lambda on=True: state.update(on=on)


def alive(reference: weakref.ref) -> bool:
    gc.collect()
    return reference() is not None


def test_the_same_arguments_give_the_same_tensor():
    filled = constants.kept(lambda number: torch.full((3,), number))
    assert filled(0.5) is filled(0.5)
    assert filled(0.5) is not filled(0.25)


def test_a_bounded_number_is_kept():
    filled = constants.kept(lambda number: torch.full((3,), float(number)))
    made = [weakref.ref(filled(number)) for number in range(1000)]
    assert sum(map(alive, made[-5:])) == 5
    assert sum(reference() is not None for reference in made) == 256


def test_what_a_graph_reads_is_never_freed(capture):
    filled = constants.kept(lambda number: torch.full((3,), float(number)))
    unread, read = weakref.ref(filled(0)), weakref.ref(filled(1))
    capture()
    filled(1)
    capture(False)
    for number in range(2, 1000):
        filled(number)
    assert not alive(unread)
    assert alive(read)


def constants_of_backends():
    from sortattn.ops.sorted import cuda_classes, cuda_walk

    here = torch.device("cpu")
    yield lambda number: cuda_walk._table(((number,),), here)
    yield lambda number: cuda_classes._numbers((number,), here)
    if importlib.util.find_spec("triton"):
        from sortattn.ops.grid.gpu import api

        yield lambda number: api._filled((3,), number, here)


def test_constants_of_all_backends_outlive_their_turn_if_a_graph_reads_them(capture):
    for make in constants_of_backends():
        # others may have been asked for in other tests
        unread, read = weakref.ref(make(0.125)), weakref.ref(make(0.375))
        capture()
        make(0.375)
        capture(False)
        for number in range(1000):
            make(number + 0.625)
        assert not alive(unread)
        assert alive(read)


def test_constants_are_made_on_a_thread_without_the_modes_and_memory_of_the_caller(capture):
    threads = []

    def make() -> torch.Tensor:
        threads.append(threading.current_thread())
        return torch.ones(3)

    capture()
    with torch.inference_mode():
        made = constants.kept(make)()
    assert threads != [threading.current_thread()]
    assert not made.is_inference()


def test_at_the_end_of_the_interpreter_constants_are_made_without_a_thread(capture, monkeypatch):
    def none_left(*_):
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(constants.ThreadPoolExecutor, "submit", none_left)
    assert torch.equal(constants.kept(torch.ones)(3), torch.ones(3))


def test_constants_made_in_inference_mode_may_be_saved_for_gradients():
    with torch.inference_mode():
        made = constants.kept(lambda: torch.ones(3))()
    assert not made.is_inference()


def test_an_error_of_the_maker_is_the_callers(capture):
    def make():
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        constants.kept(make)()


def test_the_coefficients_of_a_kernel_outlive_it_if_a_graph_reads_them(capture, monkeypatch):
    monkeypatch.setattr(parameters, "plain", lambda *_: True)
    references = []
    for captured in (False, True):
        capture(captured)
        kernel = sortattn.Spline(*HAT)
        references.append(weakref.ref(parameters.parameters_at(QUERY, kernel)))
        del kernel
    capture(False)
    assert [alive(reference) for reference in references] == [False, True]


def test_coefficients_that_change_while_a_graph_is_captured_have_a_new_place(capture, monkeypatch):
    monkeypatch.setattr(parameters, "plain", lambda *_: True)
    kernel = sortattn.Spline(*HAT)
    first = parameters.parameters_at(QUERY, kernel)
    before = first.clone()
    kernel.slopes.mul_(2.0)
    capture()
    second = parameters.parameters_at(QUERY, kernel)
    # a copy to the old place would be done by the graph, and not now
    assert torch.equal(first, before)
    assert torch.equal(second, kernel.parameters())


def test_the_formula_of_the_grid_outlives_its_kernel_if_a_graph_reads_it(capture):
    pytest.importorskip("triton")
    from sortattn.ops.grid.gpu.formula import known

    numbers = sortattn.Spline(*HAT).parameters()
    kernel, formula = known("spline", numbers)
    references = [weakref.ref(part) for part in (formula.numbers, formula.kinks, kernel.slopes)]
    capture()
    assert known("spline", numbers)[1] is formula
    capture(False)
    # other coefficients have a formula of their own
    numbers.mul_(2.0)
    assert known("spline", numbers)[1] is not formula
    del kernel, formula
    assert all(map(alive, references))


def test_coefficients_that_the_grid_does_not_know_yet_cannot_be_captured(capture):
    pytest.importorskip("triton")
    from sortattn.ops.grid.gpu.formula import known

    capture()
    with pytest.raises(RuntimeError, match="call it once with this kernel before the graph is captured"):
        known("spline", sortattn.Spline(*HAT).parameters())
