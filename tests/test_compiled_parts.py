"""What compiled loops on the CPU are made of: arrays, exponentials, and functions that are parts of others."""

import math

import numpy as np
import pytest
from numba import njit

from sortattn.cpu.compiled import compiled
from sortattn.cpu.exponential import exp
from sortattn.cpu.memory import empty, seen_as, zeroed
from sortattn.cpu.simd import BATCH, SPARE, load, store, value_of


@njit
def arrays(count, like):
    return zeroed(count, like), zeroed((2, count), np.int32), empty((count, 3), like), empty(0, np.bool_)


@pytest.mark.parametrize("real", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 7, 64])
def test_arrays_have_their_shape_and_type_and_begin_a_cache_line(count, real):
    for _ in range(3):
        flat, two, room, nothing = arrays(count, np.empty(2, real))
        assert [part.shape for part in (flat, two, room, nothing)] == [(count,), (2, count), (count, 3), (0,)]
        assert [part.dtype for part in (flat, two, room, nothing)] == [real, np.int32, real, np.bool_]
        assert not flat.any()
        assert not two.any()
        assert all(part.ctypes.data % 64 == 0 for part in (flat, two, room))
        assert all(part.flags.c_contiguous for part in (flat, two, room))
        # the next ones may lie where these did
        for part in (flat, two, room):
            part[:] = 3


def test_memory_that_is_not_there_is_an_error():
    with pytest.raises(MemoryError, match="no room"):
        arrays(1 << 60, np.empty(0))


def test_bytes_are_seen_as_other_numbers():
    @njit
    def seen(array):
        return seen_as(array, np.uint32)

    numbers = np.array([1.5, -0.0, np.inf])
    assert seen(numbers).tolist() == numbers.view(np.uint32).tolist()
    assert seen(numbers.astype(np.float32)).tolist() == numbers.astype(np.float32).view(np.uint32).tolist()
    # which lives as long as it is seen
    assert seen(np.full(1000, 1.0)).reshape(-1, 2).tolist() == [[0, 0x3FF00000]] * 1000


@njit
def exponentials(points, out):
    for i in range(0, out.shape[0], SPARE):
        store(out, i, exp(load(points, i, BATCH)))


@njit
def exponential(point):
    return exp(point)


def test_exponentials_are_right_to_the_last_place_and_the_same_one_by_one():
    points = np.linspace(-86.9, 86.9, 16 * 4001).astype(np.float32)
    found = np.empty_like(points)
    exponentials(points, found)
    wanted = np.exp(points.astype(np.float64))
    # one unit in the last place is at most 2^-23 of a number
    assert np.abs(found / wanted - 1).max() < 1.1 * 2.0**-23
    assert all(exponential(point) == one for point, one in zip(points[::997], found[::997], strict=True))


def test_exponentials_far_out_are_zero_or_finite_and_those_of_no_number_zero():
    points = np.full(16, -math.inf, np.float32)
    points[:5] = [math.nan, -87.0, -1e30, 88.0, math.inf]
    found = np.empty_like(points)
    exponentials(points, found)
    assert not found[[0, 1, 2, *range(5, 16)]].any()
    assert np.isfinite(found).all()
    assert (found[3:5] > 1e37).all()


def test_exponentials_of_float64_are_those_of_the_library():
    points = np.linspace(-700, 700, 16 * 50)
    found = np.empty_like(points)
    exponentials(points, found)
    assert found.tolist() == [math.exp(point) for point in points]


def test_a_part_is_compiled_into_its_entry_point_and_has_no_code_of_its_own():
    @compiled
    def part(lanes, number):
        if number < 0:
            raise ValueError("a negative number")
        return number * value_of(lanes)

    @njit
    def point(lanes, number):
        return part(lanes, number) + 1

    assert point(BATCH, 2) == 2 * SPARE + 1
    (found,) = part.overloads.values()
    symbol = found.fndesc.mangled_name
    assert found.library.get_pointer_to_function(symbol) == 0
    assert symbol in found.library.get_llvm_str()
    # an error goes through both
    with pytest.raises(ValueError, match="a negative number"):
        point(BATCH, -1)
