"""The options of the experiments' commands. The work is imported with the command that asks for it."""

import argparse

from ..arguments import count
from ..kernels import KERNELS
from ..table import STYLES


def add_commands(commands) -> None:
    """Adds the experiments to the commands of `sortattn`."""
    _add_capacity(commands)


def _kernel_option(command, default: list[str]) -> None:
    shown = "all" if default == list(KERNELS) else " ".join(default)
    command.add_argument("--kernel", nargs="+", default=default, metavar="NAME", help=f"default: {shown}")


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
