"""The options of the experiments' commands. The work is imported with the command that asks for it."""

import argparse
from pathlib import Path

from ..arguments import count, rate, seconds
from ..kernels import KERNELS
from ..table import STYLES


def add_commands(commands) -> None:
    """Adds the experiments to the commands of `sortattn`."""
    _add_capacity(commands)
    _add_recall(commands)
    _add_mqar(commands)
    _add_report(commands)


def _kernel_option(command, default: list[str], more: str = "") -> None:
    shown = "all" if default == list(KERNELS) else " ".join(default)
    command.add_argument("--kernel", nargs="+", default=default, metavar="NAME", help=f"default: {shown}{more}")


def _capacity(options: argparse.Namespace) -> int:
    from .capacity import capacity

    return capacity(options)


def _add_capacity(commands) -> None:
    command = commands.add_parser(
        "capacity", help="the paper's statements on capacity, and points that reach them, checked by numbers"
    )
    _kernel_option(command, list(KERNELS))
    command.add_argument("--head-dim", type=count, default=64, metavar="D", help="default: %(default)s")
    command.add_argument("-n", "--sizes", type=count, nargs="+", metavar="N", help="default: D, 2D, 6D, 8D")
    command.add_argument("--format", choices=STYLES, default="text", help="default: text")
    command.set_defaults(work=_capacity)


RECALL_SIZES = (20, 40, 60, 100, 120, 140, 200, 300, 380, 400, 500, 600)


def _recall(options: argparse.Namespace) -> int:
    from .recall.command import recall

    return recall(options)


def _add_recall(commands) -> None:
    command = commands.add_parser(
        "recall",
        help="associative recall: how many tokens each kernel learns to tell apart (the paper's Figure 1)",
        description="Learns tokens, W_Q and W_K such that the attention matrix becomes the identity. Interrupt it when "
        "you like; the same command continues, with the same result.",
    )
    _kernel_option(command, list(KERNELS), "; there is also dpfp_123, dpfp with the neighbours 1, 2, 3")
    shown = " ".join(map(str, RECALL_SIZES))
    command.add_argument(
        "-n", "--sizes", type=count, nargs="+", default=list(RECALL_SIZES), metavar="N", help=f"default: {shown}"
    )
    command.add_argument("--head-dim", type=count, default=64, metavar="D", help="default: %(default)s")
    command.add_argument("--seeds", type=count, default=3, help="default: %(default)s")
    command.add_argument("--steps", type=count, default=120_000, help="at most, default: %(default)s")
    command.add_argument(
        "--gradient",
        choices=["token", "whole"],
        default="token",
        help="of the loss per token, as in the authors' code, or of the whole loss, as the paper writes it; default: "
        "%(default)s",
    )
    _training_options(command, "recall")
    command.set_defaults(work=_recall)


MQAR_KERNELS = ["softmax", "add_laplace", "add_bump", "tri", "elu", "dpfp"]


def _mqar(options: argparse.Namespace) -> int:
    from .mqar.command import mqar

    return mqar(options)


def _add_mqar(commands) -> None:
    command = commands.add_parser(
        "mqar",
        help="multi-query associative recall: accuracy against pairs and width for a small causal transformer",
        description="The task of the Zoology benchmark, with any kernel in the attention. Interrupt it when you like; "
        "the same command continues, with the same result.",
    )
    _kernel_option(command, MQAR_KERNELS)
    command.add_argument("--pairs", type=count, nargs="+", default=[4, 8, 16, 32, 64], help="default: 4 8 16 32 64")
    command.add_argument("--width", type=count, nargs="+", default=[32, 64, 128], help="default: 32 64 128")
    command.add_argument(
        "--rate", type=rate, nargs="+", default=[1e-3, 3e-3, 1e-2], help="learning rates, default: 0.001 0.003 0.01"
    )
    command.add_argument("--heads", type=count, default=1, help="default: %(default)s")
    command.add_argument("--vocabulary", type=count, default=8192, help="default: %(default)s")
    command.add_argument("--batch", type=count, default=256, help="sequences in a step, default: %(default)s")
    command.add_argument("--seeds", type=count, default=1, help="default: %(default)s")
    command.add_argument("--steps", type=count, default=4000, help="default: %(default)s")
    _training_options(command, "mqar")
    command.set_defaults(work=_mqar)


def _report(options: argparse.Namespace) -> int:
    from .report.command import report

    return report(options)


def _add_report(commands) -> None:
    command = commands.add_parser("report", help="all results on one HTML page that needs no network")
    command.add_argument(
        "--results",
        type=Path,
        nargs="+",
        metavar="PLACE",
        help="results files or folders of them, default: benchmarks/results and what the commands left here",
    )
    command.add_argument("--out", type=Path, default=Path("sortattn-report"), help="folder, default: %(default)s")
    command.add_argument("--name", default="report", help="of the file: NAME.html, default: %(default)s")
    command.set_defaults(work=_report)


def _training_options(command, name: str) -> None:
    """What all experiments that train have in common."""
    command.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    command.add_argument("--threads", type=count, help="CPU threads, default: as torch chooses")
    command.add_argument(
        "--save-every", type=seconds, default=10.0, metavar="SECONDS", help="between checkpoints, default: %(default)s"
    )
    folder = Path(f"sortattn-{name}")
    command.add_argument("--out", type=Path, default=folder, help="folder, default: %(default)s")
    command.add_argument("--name", default=name, help="of the files: NAME.csv and NAME.png, default: %(default)s")
    command.add_argument("--fresh", action="store_true", help="replace the file instead of continuing it")
    command.add_argument("--smoke", action="store_true", help="a size that takes seconds, to see that all works")
