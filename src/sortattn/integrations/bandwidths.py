"""Bandwidths of their own for the attention modules of a Hugging Face model, one per head.

They are kept as `log_bandwidth` of the modules, a parameter if learned and a buffer if not, so `save_pretrained` writes
them with the weights; the config says that they are there. When a model is built from such a config its attention
modules are given theirs at once, so that `from_pretrained` finds where to put them.
"""

import warnings

import torch
from torch import Tensor, nn

# the entry of a converted model's config: {"kernel": name, "bandwidths": one of the three}
ENTRY = "sortattn"
DEFAULT, FIXED, LEARNED = "default", "fixed", "learned"
PREFIX = "sortattn_"
NAME = "log_bandwidth"

_hook = None


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that call the attention interface, in the order of the layers."""
    return [module for module in model.modules() if _is_attention(module)]


def _is_attention(module: nn.Module) -> bool:
    # what the interface itself asks of a module
    return isinstance(getattr(module, "is_causal", None), bool) and hasattr(module, "config")


def bandwidth_of(module: nn.Module, kernel: str) -> Tensor | None:
    """The bandwidths `(H,)` of a module, None if it has none of its own."""
    logarithm = getattr(module, NAME, None)
    if logarithm is None:
        return None
    entry = getattr(module.config, ENTRY, None)
    if entry and entry["kernel"] != kernel:
        raise ValueError(
            f"the bandwidths of this model are for the kernel {entry['kernel']!r}, but its attention is now {kernel!r};"
            f" call sortattn.convert(model, {kernel!r}) to start from that kernel's own"
        )
    return logarithm.exp()


def heads(module: nn.Module) -> int:
    """The number of query heads."""
    for owner, name in ((module, "num_heads"), (module, "num_attention_heads"), (module.config, "num_attention_heads")):
        count = getattr(owner, name, None)
        if isinstance(count, int):
            return count
    raise ValueError(f"{type(module).__name__} does not say how many heads it has; give no bandwidth of its own")


def attach(module: nn.Module, bandwidths: Tensor, learned: bool) -> None:
    """Gives a module its bandwidths `(H,)`; on the device and in the type of its weights."""
    logarithm = bandwidths.log().to(next(module.parameters()))
    if learned:
        module.register_parameter(NAME, nn.Parameter(logarithm))
    else:
        module.register_buffer(NAME, logarithm)


def detach(module: nn.Module) -> None:
    """Takes a module's bandwidths away."""
    if hasattr(module, NAME):
        delattr(module, NAME)


def attach_while_building() -> None:
    """From now on modules built from a config with the entry are given bandwidths as they join their model."""
    global _hook
    if _hook is None:
        _hook = torch.nn.modules.module.register_module_module_registration_hook(_on_join)


def _on_join(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    if module is None or not _is_attention(module):
        return
    entry = getattr(module.config, ENTRY, None)
    if not isinstance(entry, dict):
        return
    if entry["bandwidths"] != DEFAULT and not hasattr(module, NAME):
        attach(module, torch.ones(heads(module)), entry["bandwidths"] == LEARNED)
    _keep_implementation(module.config, PREFIX + entry["kernel"])


def _keep_implementation(config, name: str) -> None:
    if config._attn_implementation == name:
        # where transformers 5 looks for it; it has taken it away on reading
        config.attn_implementation = name
    else:
        warnings.warn(
            f"this model was converted to {name!r} and is loaded with {config._attn_implementation!r}; "
            f"pass attn_implementation={name!r} to from_pretrained",
            stacklevel=2,
        )
