"""Steps of the grid in CUDA: keys to nodes on Hopper, samples in order, walks along nodes.

What they compute is compared with Triton's kernels in `interpreted_hopper`, emulated.
"""

import pytest
import torch

import sortattn

from .cases import Shape, draw, relative_error
from .nvrtc import ARCHITECTURES, machine_code

pytest.importorskip("triton")

from sortattn.ops.grid.gpu import decay, hopper, order
from sortattn.ops.grid.gpu.formula import formula
from sortattn.ops.grid.gpu.grid import Grid
from sortattn.ops.grid.gpu.layout import Layout


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("padded", [32, 64])
def test_keys_to_nodes_compile_as_for_a_user(padded, factored, short):
    pytest.importorskip("cuda.core")
    kernel = hopper.kernel_of(padded, factored, short)
    assert kernel.exactly
    assert hopper.shared_of(padded, factored) <= 227 << 10
    assert b"collect" in machine_code(kernel.source, kernel.defines, "sm_90a", entry="collect", optimised=True)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "kernel", [order.kernel_of(9), order.kernel_of(12), decay.kernel_of(16, 5, False)], ids=lambda kernel: kernel.entry
)
def test_other_steps_compile_for_all_architectures(kernel, architecture):
    pytest.importorskip("cuda.core")
    assert kernel.entry.encode() in machine_code(kernel.source, kernel.defines, architecture, optimised=True)


def served(
    monkeypatch, dtype=torch.float16, keys=64, channels=64, count=32, dims=64, heads=16, name="add_riesz", **rest
):
    monkeypatch.setattr(hopper, "here", lambda device: True)
    monkeypatch.setattr(hopper, "processors", lambda device: 132)
    kernel = formula(sortattn.kernels.resolve(name), torch.device("cpu"))
    nodes = torch.zeros(heads, dims, Layout(count, dtype).padded)
    grid = Grid(nodes, nodes, torch.ones(1), Layout(count, dtype), kernel, chunked=rest.pop("chunked", False))
    key, rows = (torch.zeros(heads, keys, columns, dtype=dtype) for columns in (dims, channels))
    return hopper.collects(grid, **({"key": key, "rows": rows, "weight": None} | rest))


def test_keys_to_nodes_serve_calls_of_their_kind_alone(monkeypatch):
    for name in ("add_riesz", "add_laplace", "add_bump"):
        assert served(monkeypatch, name=name)
        assert served(monkeypatch, name=name, count=64, dtype=torch.bfloat16, keys=7)
    unaligned = torch.zeros(1 + 16 * 64 * 64, dtype=torch.float16)[1:].view(16, 64, 64)
    others = (
        {"dtype": torch.float32},
        {"rows": torch.zeros(16, 64, 64, dtype=torch.bfloat16)},
        {"keys": 0},
        {"channels": 32},
        {"count": 12},
        {"count": 72},
        {"dims": 68},
        {"heads": 2},
        {"heads": 18},
        {"chunked": True},
        {"weight": torch.ones(16, 64)},
        {"key": unaligned},
        {"rows": unaligned},
    )
    assert not any(served(monkeypatch, **other) for other in others)


@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [32, 64])
def test_calls_on_hopper_are_near_those_of_triton_and_have_the_same_bits(count, dtype, name, device, monkeypatch):
    if device == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    called, run = [], hopper.collect
    monkeypatch.setattr(hopper, "collect", lambda *what: called.append(0) or run(*what))
    # as many blocks as multiprocessors, but for a few
    heads = torch.cuda.get_device_properties(device).multi_processor_count // 8
    points = [part.to(device) for part in draw(Shape((heads,), 300, 4500, 64, 64), dtype)]
    # in some dimensions bins have two nodes
    points[1][:, 7, :40] = 1000

    def outputs():
        return [sortattn.kernel_attention(*points, name, backend=f"grid:{count}") for _ in range(5)]

    own = outputs()
    assert called
    assert all(torch.equal(output, own[0]) for output in own)
    monkeypatch.setattr(hopper, "collects", lambda *what: False)
    monkeypatch.setattr(decay, "serves", lambda grid: False)
    monkeypatch.setattr(order, "compiles", lambda device: False)
    # with another number of heads launches are not those that are known
    points = [part[1:] for part in points]
    # one rounding of the output, or another bit of codes
    assert relative_error(own[0][1:], outputs()[0].double()) < (2e-3 if dtype == torch.bfloat16 else 2e-4)
