"""The options of `sortattn vision`."""

import argparse
from pathlib import Path

from ...arguments import count
from ...kernels import KERNELS

OTHERS = [name for name in KERNELS if name != "softmax"]


def add_vision(commands) -> None:
    """Adds `vision scratch`, `vision copy`, `vision layerwise` and `vision end-to-end`."""
    vision = commands.add_parser(
        "vision", help="a vision transformer on CIFAR-10, from scratch and distilled from softmax (the paper's Table 6)"
    )
    kinds = vision.add_subparsers(dest="stage", required=True, metavar="what")
    _add(kinds, "scratch", "train a model on labels", ["softmax"])
    _add(kinds, "copy", "test the teacher's weights with another attention", OTHERS)
    _add(kinds, "layerwise", "fit every attention module to the teacher's", OTHERS)
    _add(kinds, "end-to-end", "fit the whole model to the teacher's logits, after layerwise", OTHERS)


def _work(options: argparse.Namespace) -> int:
    from .command import vision

    return vision(options)


def _add(kinds, stage: str, text: str, kernels: list[str]) -> None:
    command = kinds.add_parser(
        stage,
        help=text,
        description=f"{text[0].upper()}{text[1:]}, with the paper's settings. Interrupt it when you like: the same "
        "command continues from the last checkpoint, with the same result.",
    )
    if stage != "scratch":
        command.add_argument("teacher", type=Path, help="folder that `sortattn vision scratch` has left")
    shown = " ".join(kernels) if len(kernels) == 1 else "all but softmax"
    command.add_argument("--kernel", nargs="+", default=kernels, metavar="NAME", help=f"default: {shown}")
    command.add_argument("--bandwidth", type=float, metavar="TAU", help="default: the kernel's")
    command.add_argument("--learn-bandwidth", action="store_true", help="learn one bandwidth per layer and head")
    command.add_argument("--data", type=Path, metavar="FOLDER", help="CIFAR-10, binary version: data_batch_1.bin ...")
    if stage == "scratch":
        command.add_argument(
            "--epochs", type=count, default=1000, metavar="N", help="a tenth of them warm-up, default: %(default)s"
        )
    if stage in ("layerwise", "end-to-end"):
        command.add_argument("--layerwise-steps", type=count, default=10_000, metavar="N", help="default: %(default)s")
    if stage == "end-to-end":
        command.add_argument("--end-to-end-steps", type=count, default=50_000, metavar="N", help="default: %(default)s")
    command.add_argument(
        "--batch", type=count, default=128 if stage == "scratch" else 512, metavar="B",
        help="images of a step and process, default: %(default)s",
    )  # fmt: skip
    command.add_argument("--clip", type=float, default=2.0, metavar="NORM", help="of gradients, default: %(default)s")
    command.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: %(default)s")
    command.add_argument(
        "--every", type=count, default=1000, metavar="N",
        help="steps between checkpoints, each with a test, default: %(default)s",
    )  # fmt: skip
    command.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    command.add_argument(
        "--no-graphs", dest="graphs", action="store_false", help="on a GPU, do not replay steps as CUDA graphs"
    )
    if stage in ("scratch", "end-to-end"):
        command.add_argument(
            "--compile", action="store_true", help="torch.compile: a minute or so at first, then faster steps on a GPU"
        )
    command.add_argument("--out", type=Path, default=Path("sortattn-vision"), help="folder, default: %(default)s")
    command.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    command.add_argument("--threads", type=count, help="CPU threads, default: as torch chooses")
    command.add_argument("--smoke", action="store_true", help="a tiny model and made-up images, to see that all works")
    command.set_defaults(work=_work)
