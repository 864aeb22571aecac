"""Large tensors of the CPU take the memory of those that are gone, and of no others."""

import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils import dlpack

from sortattn import kernel_attention
from sortattn.ops.sorted import lent

pytestmark = pytest.mark.usefixtures("cpu_only")

KERNELS = ("add_riesz", "add_laplace", "add_bump")


@pytest.fixture(autouse=True)
def lending(monkeypatch, poisoned_memory):
    """All tensors count as large; torch's deterministic mode, in which none are lent, is off."""
    monkeypatch.setattr(lent, "LARGE", 1)
    monkeypatch.setattr(lent, "_free", {})
    torch.use_deterministic_algorithms(False)


def place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def gradients(kernel: str, seed: int = 0, function=kernel_attention) -> tuple[torch.Tensor, ...]:
    """The attention of some inputs and its gradients."""
    inputs = torch.randn(3, 1, 2, 70, 5, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    out = function(*inputs, kernel, backend="sorted")
    return out, *torch.autograd.grad(out.square().sum(), inputs)


def test_what_is_gone_is_lent_again():
    first = lent.empty((3, 1000), torch.float32)
    before = place(first)
    del first
    again = lent.empty((3000,), torch.int32)
    assert place(again) == before
    assert (again.shape, again.dtype, again.is_contiguous()) == ((3000,), torch.int32, True)


@pytest.mark.parametrize(
    "hold",
    [lambda whole: whole[1:, ::7], torch.Tensor.numpy, torch.Tensor.untyped_storage, dlpack.to_dlpack],
    ids=["view", "array", "storage", "dlpack"],
)
def test_what_somebody_holds_is_not_lent(hold):
    whole = lent.empty((3, 1000), torch.float32)
    before = place(whole)
    held = hold(whole)
    del whole
    gc.collect()
    assert place(lent.empty((3, 1000), torch.float32)) != before
    del held
    assert before in [place(lent.empty((3, 1000), torch.float32)) for _ in range(2)]


def test_a_block_is_not_wasted_on_little():
    size = 8 << 20
    before = place(lent.empty((size,), torch.uint8))
    assert place(lent.empty((size // 2,), torch.uint8)) != before
    assert place(lent.empty((size - 1000,), torch.uint8)) == before
    assert place(lent.empty((size + 1000,), torch.uint8)) != before


def test_no_more_is_kept_than_promised(monkeypatch):
    size = 4 << 20
    monkeypatch.setattr(lent, "KEPT", 3 * size)
    tensors = [lent.empty((size,), torch.uint8) for _ in range(5)]
    places = [place(tensor) for tensor in tensors]
    while tensors:
        del tensors[0]
    # the last to be given back stay
    again = [lent.empty((size,), torch.uint8) for _ in range(3)]
    assert len(lent._free) == 0
    assert {place(tensor) for tensor in again} == set(places[2:])


def test_small_tensors_are_torchs_own(monkeypatch):
    monkeypatch.setattr(lent, "LARGE", 1001)
    lent.empty((250,), torch.float32)
    assert not lent._free
    lent.empty((251,), torch.float32)
    assert len(lent._free) == 1


def test_in_deterministic_mode_uninitialised_memory_is_torchs():
    lent.empty((1000,), torch.float32).zero_()
    torch.use_deterministic_algorithms(True)
    assert lent.empty((1000,), torch.float32).isnan().all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_results_are_the_same_in_used_memory(kernel, monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(lent, "LARGE", 1 << 40)
        expected = gradients(kernel)
    assert not lent._free
    for _ in range(3):
        for block in list(lent._free.values()):
            block.fill_(255)
        found = gradients(kernel)
        assert all(torch.equal(here, there) for here, there in zip(found, expected, strict=True))
        del found
        # a thread lets go of its last task a moment after it has said that it is done
        for _ in range(100):
            gc.collect()
            if lent._free:
                break
            time.sleep(0.01)
        assert lent._free


def test_a_later_call_leaves_results_alone():
    first = gradients("add_laplace")
    copies = [part.clone() for part in first]
    for seed in range(1, 4):
        gradients("add_laplace", seed)
    assert all(torch.equal(here, there) for here, there in zip(first, copies, strict=True))


def test_threads_do_not_share_a_block():
    expected = [gradients("add_riesz", seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = list(pool.map(lambda seed: gradients("add_riesz", seed), range(4)))
            for some, others in zip(found, expected, strict=True):
                assert all(torch.equal(here, there) for here, there in zip(some, others, strict=True))


def test_compiled_calls_know_nothing_of_it():
    compiled = torch.compile(kernel_attention, backend="aot_eager", fullgraph=True)
    found, expected = gradients("add_bump", function=compiled), gradients("add_bump")
    assert all(torch.allclose(here, there) for here, there in zip(found, expected, strict=True))
