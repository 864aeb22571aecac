"""The vision transformer of Appendix E, as transformers has it: a class token before the patches, norms first."""

from pathlib import Path

import torch
from torch import nn

from ...errors import CommandError
from ...integrations.bandwidths import ENTRY, PREFIX
from ...integrations.convert import convert
from ...integrations.transformers import register
from .data import CLASSES, SIDE

# 12 layers, 3 heads of 64, patches of 4 x 4 pixels
PAPER = {
    "num_hidden_layers": 12, "num_attention_heads": 3, "hidden_size": 192, "intermediate_size": 768, "patch_size": 4,
}  # fmt: skip
SMOKE = {
    "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32, "patch_size": 8,
}  # fmt: skip


def build(
    shape: dict[str, int], kernel: str, bandwidth: float | None, seed: int, learn_bandwidth: bool = False
) -> nn.Module:
    """A model of this shape with random weights and kernel attention."""
    transformers = _transformers()
    config = transformers.ViTConfig(
        **shape, image_size=SIDE, num_labels=CLASSES, layer_norm_eps=1e-6, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    # the generator of the process is as it was afterwards
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.ViTForImageClassification(config)
    try:
        return convert(model, kernel, bandwidth, learn_bandwidth)
    except ValueError as error:
        raise CommandError(str(error)) from error


def load(folder: Path) -> nn.Module:
    """The model in `folder`, or the one that `vision scratch` left there; CommandError if it is none for CIFAR-10."""
    transformers = _transformers()
    inner = folder / "scratch"
    folder = inner if (inner / "config.json").exists() else folder
    if not (folder / "config.json").exists():
        raise CommandError(f"no model in {folder}: expected the folder that `sortattn vision scratch` has left")
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    # what does not fit is said below, in one line
    logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        _refuse_other_task(folder, config)
        # transformers 4 does not read it from the config
        attention = {"attn_implementation": PREFIX + kernel_of(config)} if hasattr(config, ENTRY) else {}
        # safetensors alone: other formats may run code
        model, info = transformers.ViTForImageClassification.from_pretrained(
            folder, **attention, use_safetensors=True, local_files_only=True, output_loading_info=True,
            dtype=torch.float32, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except CommandError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise CommandError(f"cannot load the model in {folder} ({reason})") from error
    finally:
        logging.set_verbosity(verbosity)
    _refuse_other_shape(folder, info)
    return model.eval()


def shape_of(model: nn.Module) -> dict[str, int]:
    """The numbers that make a model's shape."""
    return {name: getattr(model.config, name) for name in PAPER}


def kernel_of(config) -> str:
    """The kernel that a model with this config was converted to, `own` for any other."""
    return getattr(config, ENTRY, {"kernel": "own"})["kernel"]


def _refuse_other_task(folder: Path, config) -> None:
    for name, value in {"model_type": "vit", "image_size": SIDE, "num_labels": CLASSES}.items():
        if getattr(config, name, None) != value:
            raise CommandError(f"the model in {folder} has {name}={getattr(config, name, None)!r}, expected {value!r}")


def _refuse_other_shape(folder: Path, info: dict) -> None:
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            names = ", ".join(str(name) for name in sorted(info[problem], key=str)[:3])
            raise CommandError(f"the weights in {folder} are of another shape than its config: {problem} {names}")


def _transformers():
    try:
        register()
    except ImportError as error:
        raise CommandError(str(error)) from error
    import transformers

    # the command has a bar of its own
    transformers.utils.logging.disable_progress_bar()
    return transformers
