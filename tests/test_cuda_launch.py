"""What a launch hands to the driver, in place of which there is a function that reads it."""

import ctypes
import struct
import threading
from pathlib import Path

import pytest
import torch

from sortattn.cuda import boxes, launch
from sortattn.cuda.boxes import Boxes
from sortattn.cuda.launch import Kernel, stream_on

pytest.importorskip("cuda.bindings")

HANDLE, STREAM = 1234, 99
# as the driver has them
CONFIG = struct.Struct("7I4xQQI4x")
NO_CONTEXT, NO_RESOURCES = 201, 701


class Driver:
    """Launches it has seen, and the errors it returns for the next ones."""

    def __init__(self):
        self.seen, self.errors = [], []

    def __call__(self, form, handle, places, extra):
        if self.errors:
            return self.errors.pop(0)
        *shape, shared, stream, attributes, count = CONFIG.unpack(ctypes.string_at(form, CONFIG.size))
        words = [
            ctypes.c_int64.from_address(place).value
            for place in (ctypes.c_void_p * self.arguments).from_address(places)
        ]
        attribute = struct.unpack("II", ctypes.string_at(attributes, 4) + ctypes.string_at(attributes + 8, 4))
        self.seen.append((handle, tuple(shape), shared, stream, attribute if count else None, words))
        return 0


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(launch, "_launcher", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + device, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return driver


@pytest.fixture
def kernel():
    kernel = Kernel(Path("some.cu"), "some")
    kernel._own[0] = HANDLE
    return kernel


def test_a_launch_has_its_shape_stream_and_arguments(driver, kernel):
    driver.arguments = 4
    tensor = torch.ones(3)
    kernel((5, 6), 128, tensor, None, -7, 0.5, shared=1 << 16)
    number = struct.unpack("q", struct.pack("d", 0.5))[0]
    words = [tensor.data_ptr(), 0, -7, number]
    assert driver.seen == [(HANDLE, (5, 6, 1, 128, 1, 1), 1 << 16, STREAM, None, words)]


def test_a_launch_that_is_early_does_not_make_the_next_one_so(driver, kernel):
    driver.arguments = 1
    kernel((2,), 32, 1, early=True)
    kernel((2,), 32, 1)
    # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, which is to be one
    assert [seen[4] for seen in driver.seen] == [(6, 1), None]


def test_a_grid_without_blocks_is_not_launched(driver, kernel):
    kernel((0,), 32, 1)
    assert not driver.seen


def test_a_prepared_launch_has_other_pointers_each_time_and_the_same_numbers(driver, kernel):
    driver.arguments = 4
    prepared = kernel.prepared((5,), 64, 2, 3, 4, shared=8, early=True)
    # between its calls others use the room that launches share
    prepared(7, 10, 11)
    kernel((1,), 32, 20, 21, 22, 23)
    prepared(8, 12, 13)
    first, _, second = driver.seen
    assert first == (HANDLE, (5, 1, 1, 64, 1, 1), 8, 7, (6, 1), [10, 11, 3, 4])
    assert second == (HANDLE, (5, 1, 1, 64, 1, 1), 8, 8, (6, 1), [12, 13, 3, 4])


def test_prepared_launches_of_the_same_kernel_have_room_of_their_own(driver, kernel):
    driver.arguments = 2
    one, other = kernel.prepared((1,), 32, 1, 5), kernel.prepared((2,), 32, 1, 6)
    one(0, 10)
    other(0, 11)
    one(0, 12)
    assert [(seen[1][0], seen[5]) for seen in driver.seen] == [(1, [10, 5]), (2, [11, 6]), (1, [12, 5])]


def test_threads_have_room_of_their_own(driver, kernel):
    driver.arguments = 1
    places = set()

    def work():
        kernel((1,), 32, 1)
        places.add(launch._room.places)

    # all alive at once, or one might have the room of another that has ended
    gate = threading.Barrier(3)
    threads = [threading.Thread(target=lambda: (work(), gate.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(places) == 3


@pytest.fixture
def encoder(monkeypatch):
    """In place of the driver's function: it notes what it is given, and writes the address of the tensor."""
    given, errors = [], []

    def encode(to, numbers, rank, address, sizes, strides, box, steps, *how):
        given.append((to % 64, numbers, rank, *map(list, (sizes, strides, box, steps)), how))
        ctypes.c_int64.from_address(to).value = address
        return errors.pop(0) if errors else 0

    monkeypatch.setattr(boxes, "_encoder", lambda: encode)
    return given, errors


def test_boxes_of_a_tensor_arrive_in_its_place(driver, kernel, encoder):
    driver.arguments = 3
    kernel((1,), 32, 5, 1 << 20, 7, boxes=Boxes(3, 100, 16))
    kernel((1,), 32, 5, 6, 7)
    # UINT16, three dimensions, 128 bytes a row, turned by 128 bytes, zeros behind the last row of a head
    wanted = (0, 1, 3, [64, 100, 3], [128, 12_800], [64, 16, 1], [1, 1, 1], (0, 3, 2, 0))
    assert encoder[0] == [wanted]
    assert [seen[5] for seen in driver.seen] == [[5, 1 << 20, 7], [5, 6, 7]]


def test_what_the_copy_engine_cannot_bring_is_a_clear_error(driver, kernel, encoder):
    encoder[1].append(1)
    with pytest.raises(RuntimeError, match=r"Boxes\(heads=1, length=2, rows=16\) at 0x8 cannot be brought"):
        kernel((1,), 32, 5, 8, boxes=Boxes(1, 2, 16))
    assert not driver.seen


def test_a_failed_launch_says_which_and_where(driver, kernel):
    driver.arguments = 1
    for call in (lambda: kernel((1,), 32, 1), lambda: kernel.prepared((1,), 32, 1)(0, 1)):
        driver.errors = [NO_RESOURCES]
        with pytest.raises(RuntimeError, match=r"some of some\.cu cannot be launched on cuda:0: .*OUT_OF_RESOURCES"):
            call()


def test_a_thread_that_has_not_met_the_device_tries_again(driver, kernel, monkeypatch):
    core = pytest.importorskip("cuda.core")
    met = []

    class Device:
        def __init__(self, number):
            self.number = number

        def set_current(self):
            met.append(self.number)

    monkeypatch.setattr(core, "Device", Device)
    driver.arguments = 1
    driver.errors = [NO_CONTEXT]
    kernel.prepared((1,), 32, 1)(0, 1)
    assert met == [0]
    assert len(driver.seen) == 1


def test_a_stream_is_that_of_the_current_device_alone(driver):
    assert stream_on(0) == STREAM
    assert stream_on(1) is None


def test_a_kernel_of_one_architecture_alone_is_compiled_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    found = [Kernel(Path("some.cu"), "some", (), exactly)._program(0).arch for exactly in (False, True)]
    assert found == ["sm_90", "sm_90a"]
