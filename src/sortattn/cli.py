"""The `sortattn` command: reads the options and hands them to the module that does the work."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ._version import __version__
from .arguments import count, file_name, seconds
from .errors import CommandError
from .experiments.commands import add_commands
from .experiments.text.options import add_text
from .experiments.vision.options import add_vision
from .table import STYLES

SIZES = (512, 1024, 2048, 4096, 8192, 16384)
KERNELS_BY_DEFAULT = ("add_riesz", "add_laplace", "add_bump")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0 if all is well, 1 if not, 2 for a wrong wish, 130 for Ctrl-C."""
    parser = _parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        # not argparse's one line, which names no command
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(arguments)
    try:
        code = options.work(options)
        # here and not when Python ends, so that a closed pipe is noticed below
        sys.stdout.flush()
        return code
    except CommandError as error:
        print(f"sortattn {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of a pipe has gone; Python would complain once more when it closes standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # a full disk, a folder that nobody may write to
        print(f"sortattn {options.command}: {error}", file=sys.stderr)
        return 2


# the work is imported with the command that asks for it


def _kernels(options: argparse.Namespace) -> int:
    from .overview import kernel_table

    print(kernel_table(options.format))
    return 0


def _demo(options: argparse.Namespace) -> int:
    from .demo import demo

    return demo(options.out, options.sizes)


def _bench(options: argparse.Namespace) -> int:
    from .bench.command import bench

    # a default given to argparse would be added to, not replaced
    options.kernel = options.kernel or list(KERNELS_BY_DEFAULT)
    options.backend = options.backend or ["auto"]
    options.dtype = options.dtype or ["float32"]
    _fill_shape(options)
    return bench(options)


def _fill_shape(options: argparse.Namespace) -> None:
    """What was not given: the shape and sizes of the paper's tables, of a smoke run, or of an ordinary run."""
    shape, sizes, name = (1, 8, 64), SIZES, "bench"
    if options.paper:
        from .bench.paper.methods import CPU_SIZES, PAPER_SIZES

        shape, sizes, name = (4, 12, 64), CPU_SIZES if options.device == "cpu" else PAPER_SIZES, "paper"
    if options.smoke:
        shape, sizes, options.memory, options.rounds = (1, 1, 8), (16, 32, 64), False, 3
    for option, value in zip(("batch", "heads", "head_dim"), shape, strict=True):
        setattr(options, option, getattr(options, option) or value)
    options.sizes, options.name = options.sizes or list(sizes), options.name or name


def _grid(options: argparse.Namespace) -> int:
    from .bench.grid import tabulate

    options.kernel = options.kernel or list(KERNELS_BY_DEFAULT)
    return tabulate(options)


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import doctor

    return doctor(costs=options.costs, clear_cache=options.clear_cache)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sortattn", description="Kernel attention that is exact and quasi linear: try it, measure it, check it."
    )
    parser.add_argument("--version", action="version", version=f"sortattn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_kernels(commands)
    _add_demo(commands)
    _add_bench(commands)
    _add_grid(commands)
    _add_doctor(commands)
    add_commands(commands)
    add_text(commands, count)
    add_vision(commands)
    return parser


def _add_kernels(commands) -> None:
    kernels = commands.add_parser("kernels", help="list the kernels and their properties (the paper's Table 1)")
    kernels.add_argument("--format", choices=STYLES, default="text", help="default: text")
    kernels.set_defaults(work=_kernels)


def _add_demo(commands) -> None:
    demo = commands.add_parser("demo", help="see that it is exact, and from which N on it is faster than softmax")
    demo.add_argument("--out", type=Path, default=Path("sortattn-demo"), help="folder, default: %(default)s")
    _add_sizes(demo)
    demo.set_defaults(work=_demo)


def _add_sizes(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-n", "--sizes", type=count, nargs="+", default=list(SIZES), metavar="N", help="default: 512, 1024 ... 16384"
    )


def _add_bench(commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure time and memory beside softmax",
        description="Measures kernels and softmax (SDPA) in turn, and keeps every finished row: interrupt it when you "
        "like, the same command continues.",
    )
    what = bench.add_argument_group("what is measured")
    what.add_argument(
        "--kernel", action="append", metavar="NAME", help=f"may be repeated, default: {' '.join(KERNELS_BY_DEFAULT)}"
    )
    what.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="may be repeated, default: auto; cudnn, flash and mem_eff are those of torch's softmax",
    )
    what.add_argument("--dtype", action="append", metavar="NAME", help="may be repeated, default: float32")
    what.add_argument("-n", "--sizes", type=count, nargs="+", metavar="N", help="default: 512, 1024 ... 16384")
    what.add_argument("--backward", action="store_true", help="forward and backward too, not only forward")
    what.add_argument("--causal", action="store_true", help="a query sees only the keys up to its own place")
    what.add_argument("--batch", type=count, metavar="B", help="default: 1")
    what.add_argument("--heads", type=count, metavar="H", help="default: 8")
    what.add_argument("--head-dim", type=count, metavar="D", help="default: 64")
    what.add_argument("--value-dim", type=count, metavar="C", help="default: the same as --head-dim")
    what.add_argument(
        "--paper",
        action="store_true",
        help="the paper's Tables 2 and 5 instead, with all methods that this machine has, beside the paper's figures; "
        "default: B=4, H=12, N=128 ... 131072 (CPU: 4096), name: paper",
    )
    what.add_argument("--smoke", action="store_true", help="sizes that take seconds, to see that all works")
    how = bench.add_argument_group("how")
    how.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    how.add_argument("--threads", type=count, help="CPU threads, default: as torch chooses")
    how.add_argument("--rounds", type=count, default=15, help="most rounds, default: %(default)s")
    how.add_argument(
        "--budget",
        type=seconds,
        default=20.0,
        metavar="SECONDS",
        help="begin no further round of a size (with --paper: run of a cell) after this long, if three are done; "
        "default: %(default)s",
    )
    how.add_argument(
        "--patience",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="with --paper: a method with slower calls is not measured at larger sizes; default: %(default)s",
    )
    how.add_argument("--no-memory", dest="memory", action="store_false", help="time only; memory takes a while")
    where = bench.add_argument_group("where it goes")
    where.add_argument("--out", type=Path, default=Path("sortattn-bench"), help="folder, default: %(default)s")
    where.add_argument("--name", type=file_name, help="of the files: NAME.csv and NAME.png, default: bench")
    where.add_argument("--fresh", action="store_true", help="replace the file instead of continuing it")
    bench.set_defaults(work=_bench)


def _add_grid(commands) -> None:
    grid = commands.add_parser("grid", help="tabulate the error of the grid beside that of rounding to 16 bits")
    grid.add_argument(
        "--kernel", action="append", metavar="NAME", help=f"may be repeated, default: {' '.join(KERNELS_BY_DEFAULT)}"
    )
    grid.add_argument(
        "--nodes", type=count, nargs="+", default=[16, 32, 64, 128], metavar="G", help="default: 16 32 64 128"
    )
    grid.add_argument("--length", type=count, default=4096, metavar="N", help="of synthetic data, default: 4096")
    grid.add_argument("--heads", type=count, default=2, metavar="H", help="default: %(default)s")
    grid.add_argument("--head-dim", type=count, default=64, metavar="D", help="default: %(default)s")
    grid.add_argument(
        "--activations",
        type=Path,
        metavar="FOLDER",
        help="instead of synthetic data: files NAME.pt, each a dict of query, key and value of shape (heads, N, D)",
    )
    grid.add_argument(
        "--model", metavar="NAME", help="instead: what the layers of this Hugging Face encoder see, with --text"
    )
    grid.add_argument("--text", type=Path, metavar="FILE", help="what the model reads, from its beginning")
    grid.add_argument(
        "--tokens", type=count, nargs="+", default=[512, 2048], metavar="N", help="of the text, default: 512 2048"
    )
    grid.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    grid.add_argument("--out", type=Path, default=Path("sortattn-grid"), help="folder, default: %(default)s")
    grid.add_argument("--name", type=file_name, default="grid", help="of the file: NAME.csv, default: %(default)s")
    grid.set_defaults(work=_grid)


def _add_doctor(commands) -> None:
    doctor = commands.add_parser("doctor", help="see what works on this machine, and why the rest does not")
    doctor.add_argument("--costs", action="store_true", help="print the cost model by which `auto` chooses")
    doctor.add_argument("--clear-cache", action="store_true", help="remove the compiled kernels")
    doctor.set_defaults(work=_doctor)
