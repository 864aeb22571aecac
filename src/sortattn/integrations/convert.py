"""`convert`: another attention for a loaded Hugging Face model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..kernels import KERNELS, Kernel, resolve
from .bandwidths import DEFAULT, ENTRY, FIXED, LEARNED, PREFIX, attach, attention_modules, detach, heads
from .transformers import register

Bandwidth = float | Sequence | Tensor | None


def convert(model: nn.Module, kernel: str, bandwidth: Bandwidth = None, learn_bandwidth: bool = False) -> nn.Module:
    """Replaces the attention of a Hugging Face model, in place, by kernel attention; returns the model.

    - `kernel`: a name of `sortattn.KERNELS`.
    - `bandwidth`: tau of the kernel; a number, one per head `(H,)`, one per layer and head `(L, H)`, or None for the
      kernel's default.
    - `learn_bandwidth`: make the bandwidths parameters, one per layer and head, kept as their logarithms.

    Weights stay as they are. Bandwidths that are given or learned are saved and loaded with the weights by
    `save_pretrained` and `from_pretrained`; call `sortattn.register()` before you load such a model.
    """
    if isinstance(kernel, Kernel) or resolve(kernel) not in KERNELS.values():
        raise TypeError(f"kernel must be a name, since a config is text; expected one of {', '.join(KERNELS)}")
    register()
    name = PREFIX + kernel
    own = bandwidth is not None or learn_bandwidth
    modules = _attention_modules(model)
    # before anything changes: it may be refused
    rows = _rows(bandwidth, kernel, modules) if own else []
    switch(model, name)
    for module in modules:
        detach(module)
    for module, row in zip(modules, rows, strict=False):
        attach(module, row, learn_bandwidth)
    kept = LEARNED if learn_bandwidth else FIXED if own else DEFAULT
    for config in _configs(model):
        setattr(config, ENTRY, {"kernel": kernel, "bandwidths": kept})
    # transformers 5 reads it from the saved config, so that the model is never loaded with softmax by mistake
    model.config.attn_implementation = name
    return model


def switch(model: nn.Module, name: str) -> None:
    """Asks the model for this attention; refuses one that cannot change it, where transformers only logs a warning."""
    modules = _attention_modules(model)
    model.set_attn_implementation(name)
    if any(module.config._attn_implementation != name for module in modules):
        raise _no_interface(model)


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    if not hasattr(model, "set_attn_implementation"):
        raise TypeError(f"expected a model of transformers, got {type(model).__name__}")
    modules = attention_modules(model)
    if not modules:
        raise _no_interface(model)
    return modules


def _no_interface(model: nn.Module) -> ValueError:
    import transformers

    return ValueError(
        f"{type(model).__name__} of transformers {transformers.__version__} does not use the attention interface, so "
        "its attention cannot be replaced; newer versions of transformers have it in more models"
    )


def _configs(model: nn.Module) -> list:
    """The config of the model and those of its attention modules, which may be parts of it or the same."""
    found = [model.config, *(module.config for module in attention_modules(model))]
    return list({id(config): config for config in found}.values())


def _rows(bandwidth: Bandwidth, kernel: str, modules: list[nn.Module]) -> list[Tensor]:
    """One row of bandwidths per module."""
    counts = [heads(module) for module in modules]
    if bandwidth is None:
        return [
            torch.full((count,), KERNELS[kernel].default_bandwidth(_head_dim(module)))
            for module, count in zip(modules, counts, strict=True)
        ]
    try:
        given = torch.as_tensor(bandwidth, dtype=torch.float32).detach()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"bandwidth must be numbers or a tensor, got {bandwidth!r}") from None
    if not bool((given > 0).all()):
        raise ValueError(f"bandwidth must be positive, got {given.tolist()}")
    if not bool(given.isfinite().all()):
        raise ValueError(f"bandwidth must be finite, got {given.tolist()}")
    shape = (len(modules), counts[0])
    fits = given.dim() == 0 or (len(set(counts)) == 1 and given.shape in (shape, shape[1:]))
    if not fits:
        raise ValueError(
            f"bandwidth must be a number, one per head {shape[1:]} or one per layer and head {shape}, "
            f"got shape {tuple(given.shape)}"
        )
    rows = given if given.dim() == 2 else [given] * len(modules)
    return [row.expand(count).clone() for row, count in zip(rows, counts, strict=True)]


def _head_dim(module: nn.Module) -> int:
    for owner in (module, module.config):
        for name in ("head_dim", "attention_head_size"):
            if isinstance(getattr(owner, name, None), int):
                return getattr(owner, name)
    return module.config.hidden_size // heads(module)
