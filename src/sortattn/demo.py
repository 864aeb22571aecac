"""`sortattn demo`: the output equals the dense definition, and from some N on it comes sooner than softmax."""

from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from .attention import gram, kernel_attention
from .bench.cases import Settings, make_groups
from .bench.command import measure_all, show
from .bench.machine import this_machine
from .bench.store import Store
from .table import render

KERNELS = ("add_riesz", "add_laplace", "add_bump")
# what the library promises: the largest relative Frobenius error of the output and of the gradients
PROMISES = {torch.float64: (1e-12, 1e-10), torch.float32: (2e-6, 1e-5)}
# rounds and seconds for each N, so that the whole takes about two minutes on two cores
ROUNDS, BUDGET = 7, 8.0


def demo(out: Path, sizes: list[int]) -> int:
    """Runs the demonstration and writes `time.csv` and `time.png` to `out`; returns 1 if a promise was broken."""
    print("1. Exact. The sorted sums against the dense definition in float64, relative Frobenius errors.")
    print("   (The first call compiles the kernels, once; later runs find them on disk.)\n", flush=True)
    kept = show_exactness()
    print("\n2. Fast. Time against N, softmax (SDPA) and the kernels in turn, forward.\n", flush=True)
    settings = Settings(threads=torch.get_num_threads())
    groups = make_groups(list(KERNELS), ["auto"], ["float32"], sizes)
    store = Store(out / "time.csv", settings, this_machine(), fresh=True)
    problems = measure_all(groups, settings, store, rounds=ROUNDS, budget=BUDGET, memory=False)
    show(store.rows, store.path, [case for group in groups for case in group.cases])
    for problem in problems:
        print(problem)
    if not kept:
        print("\nAn error above is larger than promised. Please report it with the output of `sortattn doctor`.")
    return 0 if kept and not problems else 1


def show_exactness() -> bool:
    """Prints the errors of the output and the gradients; returns whether all are as small as promised."""
    lines, kept = [], True
    first, second = PROMISES
    # compiling keeps one core busy: a process beside this one does it for the second type, and leaves it on disk
    beside = get_context("spawn").Process(target=compile_kernels, args=(second,), daemon=True)
    beside.start()
    for dtype, (output_bound, gradient_bound) in PROMISES.items():
        if dtype != first:
            beside.join()
        for kernel in KERNELS:
            for masked in (False, True):
                errors = relative_errors(kernel, dtype, masked)
                good = errors[0] <= output_bound and max(errors[1:]) <= gradient_bound
                kept = kept and good
                name = f"{kernel}, keys masked" if masked else kernel
                lines.append([name, str(dtype).removeprefix("torch."), *(f"{error:.1e}" for error in errors)])
                lines[-1].append("yes" if good else "NO")
    columns = ["kernel", "type", "output", "d query", "d key", "d value", "as promised"]
    print(render(columns, lines, left=2))
    return kept


def compile_kernels(dtype: torch.dtype) -> None:
    """Has all kernels of a type compiled, where they are not on disk."""
    for kernel in KERNELS:
        relative_errors(kernel, dtype, False)


def relative_errors(kernel: str, dtype: torch.dtype, masked: bool) -> list[float]:
    """The relative errors of the output and of the three gradients, `sorted` against `dense_attention`."""
    generator = torch.Generator().manual_seed(0)
    # as many channels as where time is measured: the same compiled code
    shapes = ((2, 4, 300, 32), (2, 4, 400, 32), (2, 4, 400, Settings.value_dim))
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    mask = torch.rand(2, 400, generator=generator) < 0.7 if masked else None

    def outcome(attention, dtype: torch.dtype) -> list[Tensor]:
        leaves = [part.to(dtype).requires_grad_() for part in inputs]
        output = attention(*leaves)
        cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        return [output.detach(), *torch.autograd.grad(output, leaves, cotangent)]

    found = outcome(lambda *qkv: kernel_attention(*qkv, kernel, key_mask=mask, backend="sorted"), dtype)
    truth = outcome(lambda *qkv: dense_attention(*qkv, kernel, mask), torch.float64)
    return [float((one.double() - two).norm() / two.norm()) for one, two in zip(found, truth, strict=True)]


def dense_attention(query: Tensor, key: Tensor, value: Tensor, kernel: str, mask: Tensor | None = None) -> Tensor:
    """The definition: `sum_n Phi(q_m, k_n) v_n / sum_n Phi(q_m, k_n)` with the whole matrix, masked keys left out."""
    weights = gram(query, key, kernel)
    if mask is not None:
        weights = weights * mask[:, None, None, :]
    return (weights / weights.sum(-1, keepdim=True)) @ value
