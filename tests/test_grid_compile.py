"""The grid's Triton kernels compile for an NVIDIA GPU, which takes no GPU.

The interpreter accepts what a compiler does not.
"""

import importlib
import os
import pkgutil

import pytest
import torch

from sortattn.kernels import resolve

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there")

_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Compiler:
    """Stands in for a kernel: compiles what is launched, once for all arguments of the same kind, and runs nothing."""

    def __init__(self, kernel, seen, capability):
        self.kernel, self.seen = kernel, seen
        self.target = triton.backends.compiler.GPUTarget("cuda", capability, 32)

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *arguments, num_warps=4, num_stages=3, maxnreg=None, **constants):
        names = self.kernel.arg_names
        values = dict(zip(names, arguments, strict=False))
        kinds = {name: _kind(values[name]) if name in values else "constexpr" for name in names}
        key = (self.kernel.__name__, *kinds.values(), *map(str, constants.values()))
        if key in self.seen:
            return
        self.seen.add(key)
        source = triton.compiler.ASTSource(
            fn=self.kernel,
            signature=kinds,
            constexprs={(names.index(name),): value for name, value in constants.items()},
        )
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
        triton.compile(source, target=self.target, options=options)


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """Kernels are compiled and not launched: the function takes a capability and gives the set of what was."""

    def start(capability):
        from sortattn.ops.grid import gpu

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        seen = set()
        for part in pkgutil.iter_modules(gpu.__path__):
            step = importlib.import_module(f"{gpu.__name__}.{part.name}")
            for kernel in [part for part in dir(step) if part.endswith("_kernel")]:
                monkeypatch.setattr(step, kernel, Compiler(getattr(step, kernel), seen, capability))
            if hasattr(step, "FAST"):
                monkeypatch.setattr(step, "FAST", capability >= 90)
        return seen

    return start


def _kind(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    return "i32" if isinstance(value, int) else "fp32"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "masked", "count", "capability"),
    [
        # as many nodes as a call has by default
        ("add_riesz", torch.bfloat16, False, 64, 90),
        ("add_laplace", torch.float16, True, 16, 90),
        ("add_laplace", torch.bfloat16, False, 64, 90),
        ("add_laplace", torch.float32, False, 16, 90),
        # points look their rows up
        ("add_bump", torch.float16, False, 72, 90),
        # without instructions for two integers of 16 bits
        ("add_riesz", torch.bfloat16, False, 32, 80),
    ],
)
def test_all_kernels_compile(name, dtype, masked, count, capability, seen):
    from sortattn.ops.grid.gpu import causal
    from sortattn.ops.grid.gpu.backward import backward
    from sortattn.ops.grid.gpu.formula import formula
    from sortattn.ops.grid.gpu.forward import forward

    seen = seen(capability)
    query, key, value = (torch.zeros(2, 64, 16, dtype=dtype) for _ in range(3))
    weight = torch.ones(2, 64) if masked else None
    kernel = resolve(name)
    found = forward(query, key, value, weight, torch.ones(2), formula(kernel, query.device), count, 1, True)
    # nothing has run: whatever is in memory must do for what comes between kernels
    found.grid.nodes.copy_(torch.arange(float(found.grid.layout.padded)))
    state = (found.out, found.totals, found.grid, found.tables, found.flags)
    for wants_numbers in (True, False):
        backward(value, query, key, value, weight, *state, kernel, torch.empty(0), True, wants_numbers)
    causal.forward(query, key, value, weight, torch.ones(2), formula(kernel, query.device), count, 1, True)
    assert {key[0] for key in seen} >= {
        "nodes_kernel",
        "collect_kernel",
        "lookup_kernel" if count > 64 else "read_kernel",
        *(["slopes_kernel"] if name == "add_laplace" else []),
        *([] if name == "add_laplace" and dtype == torch.float32 else ["steep_kernel", "tilt_kernel"]),
        "pairs_kernel" if dtype != torch.float32 and capability >= 90 else "near_kernel",
        "walk_kernel",
    }


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("add_riesz", torch.float16),
        ("add_riesz", torch.bfloat16),
        ("add_laplace", torch.float16),
        ("add_bump", torch.bfloat16),
    ],
)
def test_kernels_of_calls_that_march_compile(dtype, name, seen, monkeypatch):
    from sortattn.ops.grid.gpu import causal, finish, march
    from sortattn.ops.grid.gpu.formula import formula

    seen, launched = seen(90), []
    monkeypatch.setattr(march, "here", lambda device: True)
    monkeypatch.setattr(march, "processors", lambda device: 9)
    for step in (march, finish):
        monkeypatch.setattr(
            step, "direct", lambda kernel, known: lambda grid, block, *rest, shared: launched.append((grid, block))
        )
    query, key, value = (torch.zeros(3, 256, 64, dtype=dtype) for _ in range(3))
    causal.forward(query, key, value, None, torch.ones(3), formula(resolve(name), query.device), 32, 1, True)
    assert {key[0] for key in seen} == {
        "survey_kernel",
        "nodes_kernel",
        "locate_kernel",
        "starts_kernel",
        *(["power_kernel"] if dtype == torch.bfloat16 else []),
    }
    # of twelve blocks eight are a wave, and the others are cut in two
    chunk = march.CHUNKS[name.removeprefix("add_")]
    chunks = 256 // chunk
    assert launched == [((4, 2), 512), ((chunks, 2), chunk), ((8, 1), 384), ((chunks, 1), chunk)]
