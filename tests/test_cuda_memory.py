"""How much memory the sorted backend takes on a GPU, counted without one: tensors that have sizes and nothing else."""

import contextlib
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import sortattn
from sortattn.cuda import launch
from sortattn.ops.sorted import api, cuda, cuda_relay, room

MAIN = ("add_riesz", "add_laplace", "add_bump")


class Meter(TorchDispatchMode):
    """Counts the bytes of all storages that are made and still alive, and the most that there were."""

    def __init__(self, *known: torch.Tensor):
        super().__init__()
        self.now = self.most = 0
        self._users: dict[int, int] = {part.untyped_storage()._cdata: 1 for part in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for part in tree_iter(results):
            if isinstance(part, torch.Tensor):
                self._meet(part)
        return results

    def _meet(self, part: torch.Tensor) -> None:
        storage = part.untyped_storage()
        place, size = storage._cdata, storage.nbytes()
        if place not in self._users:
            self._users[place] = 0
            self.now += size
            self.most = max(self.most, self.now)
        self._users[place] += 1
        weakref.finalize(part, self._leave, place, size)

    def _leave(self, place: int, size: int) -> None:
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self.now -= size


@pytest.fixture(autouse=True)
def _large_gpu(monkeypatch):
    """The host's code as for an H200, with kernels that do nothing."""
    monkeypatch.setattr(launch, "Kernel", lambda *_: lambda *arguments, **options: None)
    monkeypatch.setattr(room, "device", lambda device: room.Device(132, 50 << 20, 227 << 10))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(api, "walker", lambda device: cuda)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)


def inputs_and_constants(name: str, problems: int, length: int, dims: int, channels: int, dtype=torch.float32):
    terms = sortattn.KERNELS[name].terms()
    points = [torch.empty(problems, length, n, dtype=dtype, device="meta") for n in (dims, dims, channels)]
    constants = (1.5, terms.rate, terms.compact, terms.folded, terms.constant)
    return points, (None, None, terms.nodes, terms.below, terms.above), constants


def room_for(points: list[torch.Tensor]) -> int:
    """As large as the inputs, or what is always to be had."""
    return max(size_of(*points), room.WORKSPACE)


def size_of(*parts: torch.Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in parts)


SHAPES = {
    "N16384": (48, 16_384, 64, 64),
    "N131072": (48, 131_072, 64, 64),
    "C80": (48, 16_384, 64, 80),
    "D128-C128": (24, 16_384, 128, 128),
    "few_heads": (4, 131_072, 64, 64),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not_kept"])
def test_a_forward_pass_takes_no_more_than_its_inputs_beside_them_and_the_output(name, shape, kept):
    points, middle, constants = inputs_and_constants(name, *shape)
    with Meter(*points) as meter:
        sums, total, *orders = api._forward(*points, *middle, *constants, kept)
    assert sums.shape == (*points[0].shape[:2], shape[3])
    assert meter.now == size_of(sums, total, *orders) == size_of(sums, total)
    # the output is a quotient of the sums: there are both for a moment, or it takes their place
    assert meter.most - (0 if kept else size_of(sums)) <= room_for(points)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("name", MAIN)
def test_a_backward_pass_takes_no_more_than_the_inputs_beside_them_and_the_gradients(name, shape):
    points, middle, constants = inputs_and_constants(name, *shape)
    grad, grad_extra = torch.empty_like(points[2]), points[2].new_empty(points[2].shape[:2])
    orders = [torch.empty(shape[0], shape[2], 0, dtype=torch.int32, device="meta")] * 2
    backward = api.sided_sum_backward._init_fn
    wants = (True, False, True, False)
    with Meter(*points, grad, grad_extra, *orders) as meter:
        gradients = backward(grad, grad_extra, *points, *middle, *orders, *constants, *wants)
    assert [part.shape for part in gradients[:3]] == [part.shape for part in points]
    # the gradient of the sums is beside the inputs too
    assert meter.most + size_of(grad, grad_extra) - size_of(*gradients) <= room_for(points)


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("length", [16_384, 131_072])
def test_groups_of_heads_fill_the_gpu(name, length):
    (query, key, value), _, _ = inputs_and_constants(name, 48, length, 64, 64)
    terms = sortattn.KERNELS[name].terms()
    for backward in (False, True):
        groups = cuda.groups(query, key, value, terms, backward=backward)
        assert [some.start for some in groups[1:]] == [some.stop for some in groups[:-1]]
        assert (groups[0].start, groups[-1].stop) == (0, 48)
        # a line is sorted by a block, of which a multiprocessor has one: several rounds, and no small one at the end
        assert all((some.stop - some.start) * 64 >= 3 * 132 for some in groups)


@pytest.mark.parametrize(
    ("problems", "rows", "columns", "dims", "channels"),
    [(768, 4096, 77, 64, 64), (2048, 4096, 64, 16, 64), (40_000, 64, 8, 8, 64)],
    ids=["few_keys", "few_dimensions", "many_heads"],
)
def test_many_queries_of_few_keys_are_not_walked_head_by_head(problems, rows, columns, dims, channels):
    query, key, value = (
        torch.empty(problems, n, width, device="meta")
        for n, width in ((rows, dims), (columns, dims), (columns, channels))
    )
    for name in MAIN:
        for backward in (False, True):
            groups = cuda.groups(query, key, value, sortattn.KERNELS[name].terms(), backward=backward)
            assert all((some.stop - some.start) * dims >= 3 * 132 for some in groups)


def test_short_lines_are_walked_all_at_once():
    (query, key, value), _, _ = inputs_and_constants("add_bump", 48, 4096, 64, 64)
    terms = sortattn.KERNELS["add_bump"].terms()
    for backward in (False, True):
        assert cuda.groups(query, key, value, terms, backward=backward) == [slice(0, 48)]


@pytest.mark.parametrize(("heads", "length", "size"), [(4096, 128, 64), (1024, 512, 128), (2048, 512, 64)])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_sums_on_either_side_of_zero_are_counted_for_short_heads(heads, length, size, backward, monkeypatch):
    """Which many short heads have more of than of anything else."""
    monkeypatch.setattr(room, "device", lambda device: room.Device(132, 60 << 20, 227 << 10))
    points = torch.empty(1, 1, 1, device="meta").expand(heads, length, size)
    terms = sortattn.KERNELS["add_riesz"].terms()
    largest = max(some.stop - some.start for some in cuda.groups(points, points, points, terms, backward=backward))
    each = cuda_relay.totals_of(length, size, size, size) * 4 * (1 + backward) + 2 * length * size * 8
    sums = heads * length * (size + 1) * 4
    assert largest * each + sums <= max(room.WORKSPACE, 3 * heads * length * size * 4) + room.WORKSPACE // 4
