"""`sortattn grid`: the error of the grid beside that of rounding to 16 bits, on synthetic data or in a model."""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from .. import records
from ..attention import grid_error, kernel_attention
from ..choose import Grid
from ..errors import CommandError
from ..kernels import KERNELS
from ..table import render
from ..validation import make_problem
from .command import usable_device
from .machine import Measured, now, this_machine

Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Row(Measured):
    """Relative Frobenius errors of the output against float64 on the same float32 inputs.

    `error` is the grid's, `estimate` what `grid_error` says of it; `bfloat16` and `float16` are those of an exact
    computation with inputs and output rounded to these types.
    """

    data: str
    kernel: str
    nodes: int
    error: float
    estimate: float
    bfloat16: float
    float16: float
    n: int
    heads: int
    head_dim: int
    value_dim: int


# synthetic data, by how queries and keys are drawn; values are unit normal


def normal(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*size, generator=generator)


def heavy_tails(generator: torch.Generator, *size: int) -> Tensor:
    """Student's t with two degrees of freedom, which has no variance."""
    # the square root of an exponential variable is that of half a chi square with two degrees of freedom
    halves = -torch.rand(*size, generator=generator).clamp(min=1e-6).log()
    return normal(generator, *size) / halves.sqrt()


def clusters(generator: torch.Generator, *size: int) -> Tensor:
    """Four of them, a hundred times as far apart as they are wide."""
    return 10.0 * torch.randint(0, 4, size, generator=generator) + 0.1 * normal(generator, *size)


def outlier(generator: torch.Generator, *size: int) -> Tensor:
    """Unit normal, but for one point of 1,000 in every head."""
    points = normal(generator, *size)
    points[..., size[-2] // 3, :] = 1000.0
    return points


def constant(generator: torch.Generator, *size: int) -> Tensor:
    """Every other dimension has one value only."""
    points = normal(generator, *size)
    points[..., ::2] = 0.7
    return points


def ties(generator: torch.Generator, *size: int) -> Tensor:
    """Unit normal, rounded to multiples of 0.2."""
    return (5 * normal(generator, *size)).round() / 5


DATA: dict[str, Callable[..., Tensor]] = {
    "normal": normal,
    "heavy_tails": heavy_tails,
    "clusters": clusters,
    "outlier": outlier,
    "constant": constant,
    "ties": ties,
}


def synthetic(heads: int, length: int, dims: int) -> Iterator[tuple[str, Inputs]]:
    """Query, key and value `(heads, length, dims)` of every kind of data."""
    for name, draw in DATA.items():
        generator = torch.Generator().manual_seed(0)
        query, key = (draw(generator, heads, length, dims) for _ in range(2))
        yield name, (query, key, normal(generator, heads, length, dims))


def activations(folder: Path) -> Iterator[tuple[str, Inputs]]:
    """What the files `*.pt` of a folder hold: dicts of `query`, `key` and `value`, `(heads, N, D)` each."""
    paths = sorted(folder.glob("*.pt"))
    if not paths:
        raise CommandError(f"expected files NAME.pt with query, key and value in {folder}, found none")
    for path in paths:
        try:
            parts = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
            raise CommandError(f"{path} cannot be read as tensors saved by torch.save: {error}") from error
        if not isinstance(parts, dict) or not {"query", "key", "value"} <= set(parts):
            raise CommandError(f"{path} must hold a dict with query, key and value")
        yield path.stem, tuple(parts[name].float() for name in ("query", "key", "value"))


# measuring


def errors(name: str, inputs: Inputs, kernel: str, nodes: list[int]) -> list[dict[str, object]]:
    """The measured columns of the rows of one kernel on these data."""
    exact = _exact(inputs, kernel)
    rounding = {kind: _rounding(inputs, kernel, exact, getattr(torch, kind)) for kind in ("bfloat16", "float16")}
    heads, length, dims = inputs[0].shape
    rows = []
    for count in nodes:
        backend = f"grid:{count}"
        output = kernel_attention(*inputs, kernel, backend=backend)
        estimate = grid_error(*inputs[:2], kernel, value=inputs[2], backend=backend).item()
        numbers = {"error": _relative(output, exact), "estimate": estimate, **rounding}
        sizes = {"n": length, "heads": heads, "head_dim": dims, "value_dim": inputs[2].shape[2]}
        shown = {key: float(f"{number:.3g}") for key, number in numbers.items()}
        rows.append({"data": name, "kernel": kernel, "nodes": count, **shown, **sizes})
    return rows


def _exact(inputs: Inputs, kernel: str) -> Tensor:
    return kernel_attention(*(part.double() for part in inputs), kernel)


def _rounding(inputs: Inputs, kernel: str, exact: Tensor, dtype: torch.dtype) -> float:
    rounded = tuple(part.to(dtype).float() for part in inputs)
    return _relative(_exact(rounded, kernel).to(dtype), exact)


def _relative(output: Tensor, exact: Tensor) -> float:
    return ((output.double() - exact).norm() / exact.norm()).item()


def tabulate(options: Namespace) -> int:
    """Measures what the options ask for, writes the CSV and prints the table; returns the exit code."""
    _check(options)
    source = _source(options)
    common = asdict(this_machine(options.device))
    path = options.out / f"{options.name}.csv"
    rows: list[Row] = []
    for name, inputs in source:
        for kernel in options.kernel:
            print(f"{name} {kernel}", file=sys.stderr)
            measured = errors(name, [part.to(options.device) for part in inputs], kernel, options.nodes)
            rows += [Row(**columns, date=now(), **common) for columns in measured]
            records.write(path, Row, rows)
    print(table(rows))
    print(f"\nRows: {path}")
    return 0


def _source(options: Namespace) -> Iterator[tuple[str, Inputs]]:
    if options.activations:
        return activations(options.activations)
    if options.model:
        from .layers import layers

        return layers(options.model, options.text, options.tokens, options.device)
    return synthetic(options.heads, options.length, options.head_dim)


def _check(options: Namespace) -> None:
    """CommandError for a kernel or a number of nodes that the grid refuses, and for options that do not fit."""
    if (options.model is None) != (options.text is None):
        raise CommandError("--model and --text need each other")
    usable_device(options.device)
    if options.model and options.activations:
        raise CommandError("expected --model or --activations, got both")
    example = torch.zeros(1, 1, 1)
    for name in options.kernel:
        if name not in KERNELS:
            raise CommandError(f"unknown kernel {name!r}, expected one of {', '.join(KERNELS)}")
        reason = Grid().why_not(make_problem(example, example, example, KERNELS[name]), KERNELS[name], True)
        if reason:
            raise CommandError(reason)
    for count in options.nodes:
        try:
            kernel_attention(example, example, example, options.kernel[0], backend=f"grid:{count}")
        except ValueError as error:
            raise CommandError(str(error)) from error


def table(rows: list[Row], style: str = "text") -> str:
    """A line for each kind of data and kernel: the error by the number of nodes, then that of rounding."""
    nodes = sorted({row.nodes for row in rows})
    lines: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        lines.setdefault((row.data, row.kernel), {})[row.nodes] = row
    heading = ["data", "kernel", *(f"G={count}" for count in nodes), "bfloat16", "float16"]
    body = [
        [*names, *(f"{found[count].error:.1e}" for count in nodes), *_both(next(iter(found.values())))]
        for names, found in lines.items()
    ]
    return render(heading, body, style, left=2)


def read(path: Path) -> list[Row]:
    """The rows of a file; CommandError if it is not one of this kind."""
    return records.read(path, Row)


def block(rows: list[Row]) -> str:
    """The Markdown of a document: the table, and where it was measured."""
    first = rows[0]
    days = sorted({row.date.split()[0] for row in rows})
    lengths = " or ".join(f"{count:,}" for count in sorted({row.n for row in rows}))
    where = (
        f"N = M = {lengths}, {first.heads} heads, D={first.head_dim}, C={first.value_dim}; "
        f"{first.accelerator or first.cpu} ({first.machine}); torch {first.torch}, sortattn {first.sortattn}; "
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}."
    )
    ratios = [row.estimate / row.error for row in rows if row.error > 1e-5]
    range_ = f"The estimate was between {min(ratios):.2f} and {max(ratios):.2f} times the error (above 1e-5)."
    return f"{where} {range_}\n\n{table(rows, 'markdown')}\n"


def _both(row: Row) -> list[str]:
    return [f"{row.bfloat16:.1e}", f"{row.float16:.1e}"]
