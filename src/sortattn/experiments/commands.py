"""The options of the experiments' commands. The work is imported with the command that asks for it."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from ..arguments import count, file_name, rate, seconds
from ..kernels import KERNELS
from ..table import STYLES


def add_commands(commands) -> None:
    """Adds the experiments to the commands of `sortattn`."""
    _add_capacity(commands)
    _add_recall(commands)
    _add_mqar(commands)
    _add_report(commands)


def _fill(options: argparse.Namespace, usual: Mapping[str, object], smoke: Mapping[str, object]) -> None:
    """Sets the options that were not given, as `usual`; with --smoke as `smoke`, where that has a value."""
    for name, value in {**usual, **(smoke if options.smoke else {})}.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def _shown(value: object) -> str:
    return f"default: {' '.join(map(str, value)) if isinstance(value, list) else value}"


def _capacity(options: argparse.Namespace) -> int:
    from .capacity import capacity

    return capacity(options)


def _add_capacity(commands) -> None:
    command = commands.add_parser(
        "capacity", help="the paper's statements on capacity, and points that reach them, checked by numbers"
    )
    command.add_argument("--kernel", nargs="+", default=list(KERNELS), metavar="NAME", help="default: all")
    command.add_argument("--head-dim", type=count, default=64, metavar="D", help="default: %(default)s")
    command.add_argument("-n", "--sizes", type=count, nargs="+", metavar="N", help="default: D, 2D, 6D, 8D")
    command.add_argument("--format", choices=STYLES, default="text", help="default: text")
    command.set_defaults(work=_capacity)


RECALL = {
    "kernel": list(KERNELS), "sizes": [20, 40, 60, 100, 120, 140, 200, 300, 380, 400, 500, 600], "head_dim": 64,
    "seeds": 3, "steps": 120_000, "save_every": 10.0,
}  # fmt: skip
RECALL_SMOKE = {
    "kernel": ["add_bump", "relu"], "sizes": [3, 6, 9], "head_dim": 4, "seeds": 2, "steps": 200, "save_every": 0.0,
}  # fmt: skip


def _recall(options: argparse.Namespace) -> int:
    from .recall.command import recall

    _fill(options, RECALL, RECALL_SMOKE)
    return recall(options)


def _add_recall(commands) -> None:
    command = commands.add_parser(
        "recall",
        help="associative recall: how many tokens each kernel learns to tell apart (the paper's Figure 1)",
        description="Learns tokens, W_Q and W_K such that the attention matrix becomes the identity. Interrupt it when "
        "you like; the same command continues, with the same result.",
    )
    command.add_argument(
        "--kernel",
        nargs="+",
        metavar="NAME",
        help="default: all; there is also dpfp_123, dpfp with the neighbours 1, 2, 3",
    )
    command.add_argument("-n", "--sizes", type=count, nargs="+", metavar="N", help=_shown(RECALL["sizes"]))
    command.add_argument("--head-dim", type=count, metavar="D", help=_shown(RECALL["head_dim"]))
    command.add_argument("--seeds", type=count, help=_shown(RECALL["seeds"]))
    command.add_argument("--steps", type=count, help=f"at most, {_shown(RECALL['steps'])}")
    command.add_argument(
        "--adam",
        choices=["own", "authors"],
        default="own",
        help="what the paper leaves open of Adam: by the kernel, or as in the authors' code; default: %(default)s",
    )
    _training_options(command, "recall", RECALL)
    command.set_defaults(work=_recall)


MQAR = {
    "kernel": ["softmax", "add_laplace", "add_bump", "tri", "elu", "dpfp"], "pairs": [4, 8, 16, 32, 64],
    "width": [32, 64, 128], "rate": [1e-3, 3e-3, 1e-2], "heads": 1, "vocabulary": 8192, "batch": 256, "seeds": 1,
    "steps": 4000, "save_every": 10.0,
}  # fmt: skip
MQAR_SMOKE = {
    "kernel": ["softmax", "elu"], "pairs": [2], "width": [8, 16], "rate": [1e-2], "vocabulary": 16, "batch": 8,
    "steps": 40, "save_every": 0.0,
}  # fmt: skip


def _mqar(options: argparse.Namespace) -> int:
    from .mqar.command import mqar

    _fill(options, MQAR, MQAR_SMOKE)
    return mqar(options)


def _add_mqar(commands) -> None:
    command = commands.add_parser(
        "mqar",
        help="multi-query associative recall: accuracy against pairs and width for a small causal transformer",
        description="The task of the Zoology benchmark, with any kernel in the attention. Interrupt it when you like; "
        "the same command continues, with the same result.",
    )
    command.add_argument("--kernel", nargs="+", metavar="NAME", help=_shown(MQAR["kernel"]))
    command.add_argument("--pairs", type=count, nargs="+", help=_shown(MQAR["pairs"]))
    command.add_argument("--width", type=count, nargs="+", help=_shown(MQAR["width"]))
    command.add_argument("--rate", type=rate, nargs="+", help=f"learning rates, {_shown(MQAR['rate'])}")
    command.add_argument("--heads", type=count, help=_shown(MQAR["heads"]))
    command.add_argument("--vocabulary", type=count, help=_shown(MQAR["vocabulary"]))
    command.add_argument("--batch", type=count, help=f"sequences in a step, {_shown(MQAR['batch'])}")
    command.add_argument("--seeds", type=count, help=_shown(MQAR["seeds"]))
    command.add_argument("--steps", type=count, help=_shown(MQAR["steps"]))
    _training_options(command, "mqar", MQAR)
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
    command.add_argument(
        "--name", type=file_name, default="report", help="of the file: NAME.html, default: %(default)s"
    )
    command.set_defaults(work=_report)


def _training_options(command, name: str, usual: Mapping[str, object]) -> None:
    """What all experiments that train have in common."""
    command.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    command.add_argument("--threads", type=count, help="CPU threads, default: as torch chooses")
    command.add_argument(
        "--save-every", type=seconds, metavar="SECONDS", help=f"between checkpoints, {_shown(usual['save_every'])}"
    )
    folder = Path(f"sortattn-{name}")
    command.add_argument("--out", type=Path, default=folder, help="folder, default: %(default)s")
    command.add_argument(
        "--name", type=file_name, default=name, help="of the files: NAME.csv and NAME.png, default: %(default)s"
    )
    command.add_argument("--fresh", action="store_true", help="replace the file instead of continuing it")
    command.add_argument("--smoke", action="store_true", help="sizes that take seconds where none are given")
