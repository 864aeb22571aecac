"""The options of `sortattn text`."""

import argparse
from pathlib import Path

from ...table import STYLES

LENGTHS = (512, 2048, 4096, 8192, 16384)


def add_text(commands, count) -> None:
    """Adds `text distill`, `text eval`, `text table` and `text pareto`; `count` reads a whole number from 1."""
    text = commands.add_parser("text", help="distil a text encoder to another attention, and evaluate it")
    kinds = text.add_subparsers(dest="text_command", required=True, metavar="what")
    _add_distill(kinds, count)
    _add_eval(kinds, count)
    _add_table(kinds)
    _add_pareto(kinds, count)


def _distill(options: argparse.Namespace) -> int:
    from .distillation import distill_text

    return distill_text(options)


def _eval(options: argparse.Namespace) -> int:
    from .command import evaluate_text

    return evaluate_text(options)


def _table(options: argparse.Namespace) -> int:
    from .command import show_scores

    return show_scores(options)


def _pareto(options: argparse.Namespace) -> int:
    from .command import pareto_text

    return pareto_text(options)


def _add_distill(kinds, count) -> None:
    command = kinds.add_parser(
        "distill",
        help="copy, layer by layer, end to end",
        description="Makes a student with another attention from a teacher, with the paper's settings. Interrupt it "
        "when you like: the same command continues from the last checkpoint. torchrun -m sortattn text distill ... "
        "uses several devices.",
    )
    command.add_argument("teacher", help="folder of a Hugging Face encoder with its tokenizer, or a name on the hub")
    command.add_argument(
        "--kernel", nargs="+", default=["add_laplace"], metavar="NAME",
        help="several learn side by side, each in a folder of its own; default: add_laplace",
    )  # fmt: skip
    command.add_argument("--bandwidth", type=float, metavar="TAU", help="default: the kernel's")
    command.add_argument("--learn-bandwidth", action="store_true", help="learn one bandwidth per layer and head")
    command.add_argument(
        "--data", type=Path, nargs="+", required=True, metavar="FILE",
        help="texts to learn from: .jsonl(.gz) with \"text\", an STS .csv, or plain text with a passage per line",
    )  # fmt: skip
    command.add_argument(
        "--join", type=count, default=1, metavar="WORDS",
        help="join lines of a plain text that follow each other until they have so many words; default: do not",
    )  # fmt: skip
    command.add_argument("--layerwise-steps", type=count, default=10_000, metavar="N", help="default: %(default)s")
    command.add_argument("--end-to-end-steps", type=count, default=10_000, metavar="N", help="default: %(default)s")
    command.add_argument(
        "--tokens", type=count, default=512, metavar="N", help="texts are cut here, default: %(default)s"
    )
    command.add_argument(
        "--lengths", type=count, nargs="+", metavar="N",
        help="cut each batch at one of these numbers of tokens, drawn at random; default: at --tokens",
    )  # fmt: skip
    command.add_argument("--batch", type=count, default=16, metavar="B", help="default: %(default)s")
    command.add_argument("--accumulation", type=count, default=1, metavar="N", help="batches per step, default: 1")
    command.add_argument("--clip", type=float, default=1.0, metavar="NORM", help="of gradients, default: %(default)s")
    command.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: %(default)s")
    command.add_argument(
        "--every", type=count, default=250, metavar="N", help="steps between checkpoints, default: 250"
    )
    command.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    command.add_argument(
        "--no-graphs", dest="graphs", action="store_false", help="on a GPU, do not replay steps as CUDA graphs"
    )
    _add_common(command, count, Path("sortattn-text"))
    command.set_defaults(work=_distill)


def _add_eval(kinds, count) -> None:
    command = kinds.add_parser(
        "eval",
        help="Spearman's correlation and nDCG@10 from local files",
        description="Evaluates an encoder. Every finished task is kept in results.csv: the same command continues.",
    )
    command.add_argument(
        "model", nargs="+", help="folders of Hugging Face encoders with their tokenizers, or names on the hub"
    )
    command.add_argument(
        "--kernel", nargs="+", default=[], metavar="NAME",
        help="replace the attention by each of these first; default: as the model was saved",
    )  # fmt: skip
    command.add_argument("--sts", type=Path, nargs="+", default=[], metavar="FILE", help="sentence1,sentence2,score")
    command.add_argument("--cranfield", type=Path, metavar="FOLDER", help="corpus.jsonl, queries.jsonl and qrels.txt")
    command.add_argument(
        "--qmsum", type=Path, nargs="+", default=[], metavar="FILE", help="meetings, .jsonl or .jsonl.gz"
    )
    command.add_argument(
        "--lengths", type=count, nargs="+", default=list(LENGTHS), metavar="N",
        help="tokens at which meetings are cut, default: 512 2048 4096 8192 16384",
    )  # fmt: skip
    command.add_argument(
        "--mteb", nargs="+", default=[], metavar="NAME",
        help="benchmarks or tasks of mteb, such as 'MTEB(eng, v2)', and LoCo; their data come from the hub",
    )  # fmt: skip
    command.add_argument(
        "--mteb-tokens", type=count, default=512, metavar="N", help="where their texts are cut, default: 512"
    )
    command.add_argument("--limit", type=count, metavar="N", help="the first N pairs, documents and queries only")
    command.add_argument("--fresh", action="store_true", help="measure again what results.csv holds")
    _add_common(command, count, Path("sortattn-text"))
    command.set_defaults(work=_eval)


def _add_table(kinds) -> None:
    command = kinds.add_parser("table", help="all scores in one table, beside the paper's Table 3")
    command.add_argument("results", type=Path, help="results.csv of `text eval`")
    command.add_argument("--format", choices=STYLES, default="text", help="default: text")
    command.set_defaults(work=_table)


def _add_pareto(kinds, count) -> None:
    command = kinds.add_parser(
        "pareto",
        help="quality against time per document, the paper's Figure 2",
        description="Times one long document with every kernel, softmax through SDPA beside it, and draws the scores "
        "that `text eval` left in results.csv against it. Finished measurements are kept: the same command continues.",
    )
    command.add_argument("model", help="folder of a Hugging Face encoder: its size decides the time, not its weights")
    command.add_argument("--kernel", action="append", metavar="NAME", help="may be repeated, default: all")
    command.add_argument("--backend", action="append", metavar="NAME", help="may be repeated, default: auto")
    command.add_argument(
        "--lengths", type=count, nargs="+", default=[8192, 16384], metavar="N", help="default: 8192 16384"
    )
    command.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: %(default)s")
    command.add_argument("--results", type=Path, metavar="FILE", help="of `text eval`, default: results.csv in --out")
    _add_common(command, count, Path("sortattn-text"))
    command.set_defaults(work=_pareto)


def _add_common(command: argparse.ArgumentParser, count, folder: Path) -> None:
    command.add_argument("--no-prefixes", dest="prefixes", action="store_false", help="texts without nomic's prefixes")
    command.add_argument("--out", type=Path, default=folder, help="folder, default: %(default)s")
    command.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    command.add_argument("--threads", type=count, help="CPU threads, default: as torch chooses")
    command.add_argument("--smoke", action="store_true", help="a few short steps or texts, to see that all works")
