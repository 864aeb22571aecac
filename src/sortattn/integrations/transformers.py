"""Kernel attention as an `attn_implementation` of Hugging Face models.

`register()` enters one attention function and one mask function per kernel, `sortattn_add_laplace` and so on. The model
hands the first its queries, keys and values, and the second what it knows of padding: a mask over the keys comes back,
never a dense one. What a model asks for and kernel attention cannot give is refused by name.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..attention import kernel_attention
from ..choose import named
from ..kernels import KERNELS
from .bandwidths import PREFIX, attach_while_building, bandwidth_of

# arguments of a model's attention that change its result, and what to do about them
_REFUSED = {
    "sliding_window": "a sliding window; make all its layers full attention in the config, or keep its own attention",
    "softcap": "a soft cap of the scores; there are no scores here",
    "position_bias": "a position bias, which is added to scores; there are no scores here",
    "s_aux": "attention sinks, which are added to the sum of a softmax",
    "head_mask": "a head mask",
    "cu_seq_lens_q": "packed sequences; pass a padded batch with an attention_mask",
    "cache": "a paged cache; generate with the dynamic cache",
}


# that of the last `register`
_backend = "auto"


def register(backend: str | None = None) -> None:
    """Makes `attn_implementation="sortattn_<kernel>"` known to transformers, for every kernel of `sortattn.KERNELS`.

    Afterwards `AutoModel.from_pretrained(name, attn_implementation="sortattn_add_laplace")` gives the model with
    kernel attention, at the kernel's default bandwidth. `backend` is that of `kernel_attention`, for all models; None
    keeps the one there is, `"auto"` at first.

    The model's own scale of the scores is kept: with `scaling = 1 / sqrt(D)`, as nearly all models have it, the
    bandwidth is the kernel's; with any other it is multiplied by `(scaling sqrt(D))^(-1/2)`, which makes `softmax` the
    model's own softmax.
    """
    global _backend
    if backend not in (None, "auto"):
        named(backend)
    interface, masks = interfaces()
    _backend = backend or _backend
    for kernel in KERNELS:
        interface.register(PREFIX + kernel, _attention(kernel, _backend))
        masks.AttentionMaskInterface.register(PREFIX + kernel, functools.partial(_padding, masks))
    attach_while_building()


def interfaces():
    """Where transformers keeps attention functions, and where mask functions."""
    try:
        from transformers import AttentionInterface, masking_utils
    except ImportError as error:
        raise ImportError(
            "Hugging Face models need transformers 4.57 or later: pip install 'sortattn[hf]'" + f" ({error})"
        ) from error
    return AttentionInterface, masking_utils


def _padding(masks, *, mask_function: Callable, attention_mask: Tensor | None, kv_length: int, **others) -> Any:
    """What a model calls a mask: `(B, N)` if causal, `(B, 1, 1, N)` if not, None without padding, or why it is refused.

    A refusal is returned and not raised, as some models make masks that no layer of theirs uses.
    """
    causal = mask_function is masks.causal_mask_function
    if not causal and mask_function is not getattr(masks, "bidirectional_mask_function", None):
        return "a mask that is more than causal and padding (a sliding window, chunks, packed sequences, or a prefix)"
    if causal and _seen(kv_length, others) != kv_length:
        raise ValueError(
            "kernel attention cannot use a static cache, which holds keys that are not written yet; generate with the "
            "dynamic cache"
        )
    if attention_mask is None or _hides_nothing(attention_mask):
        # a decoder that was told not to be causal: its modules still say that they are
        if causal or getattr(others.get("config"), "is_causal", None) is not False:
            return None
        attention_mask = torch.ones(others["batch_size"], kv_length, dtype=torch.bool, device=others.get("device"))
    attention_mask = attention_mask[:, -kv_length:].bool()
    return attention_mask if causal else attention_mask[:, None, None, :]


def _hides_nothing(mask: Tensor) -> bool:
    """Whether a mask may be left out, which is faster; where asking is not allowed it stays."""
    if torch.compiler.is_compiling() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return bool(mask.all())


def _seen(kv_length: int, others: dict[str, Any]) -> int | None:
    """How many keys there are up to the last query; None where a cache of fixed size keeps that to itself."""
    offset = others.get("kv_offset", 0)
    if "cache_position" in others:
        # transformers 4; as many queries as keys need no look at their positions
        positions = others["cache_position"]
        return kv_length if len(positions) == kv_length else int(positions[-1]) + 1 - offset
    start = others.get("q_offset", 0)
    return None if isinstance(start, Tensor) else start + others["q_length"] - offset


def _attention(kernel: str, backend: str) -> Callable:
    def forward(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | str | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options,
    ) -> tuple[Tensor, None]:
        """`query (B, H, M, D)`, `key` and `value (B, G, N, D)` to `(B, M, H, D)`."""
        _refuse(module, dropout, options)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask, causal = _read_mask(module, attention_mask, causal)
        rows = kernel_attention(
            query, key, value, kernel, bandwidth=_bandwidth(module, kernel, query, scaling), key_mask=mask,
            # the last query sees all keys, causal or not
            is_causal=bool(causal) and query.shape[2] > 1,
            enable_gqa=query.shape[1] != key.shape[1], backend=backend,
        )  # fmt: skip
        return rows.transpose(1, 2).contiguous(), None

    return forward


def _bandwidth(module: torch.nn.Module, kernel: str, query: Tensor, scaling: float | None) -> float | Tensor:
    bandwidth = bandwidth_of(module, kernel)
    if bandwidth is None:
        bandwidth = KERNELS[kernel].default_bandwidth(query.shape[-1])
    scale = 1.0 if scaling is None else scaling * query.shape[-1] ** 0.5
    return bandwidth * scale**-0.5


def _read_mask(module: torch.nn.Module, mask: Tensor | str | None, causal: bool) -> tuple[Tensor | None, bool]:
    """The mask over the keys, and whether the call is causal."""
    if mask is None:
        return None, causal
    if isinstance(mask, str):
        raise _refusal(module, mask)
    if mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1:3] == (1, 1):
        return mask[:, 0, 0], False
    if mask.dim() == 2 and not mask.is_floating_point():
        return mask.bool(), causal
    raise _refusal(
        module,
        f"a dense mask of shape {tuple(mask.shape)} and {mask.dtype}; pass the padding as an attention_mask (B, N)",
    )


def _refuse(module: torch.nn.Module, dropout: float, options: dict[str, Any]) -> None:
    if dropout:
        raise _refusal(
            module,
            f"attention dropout ({dropout}); set it to zero in the config (attention_probs_dropout_prob, "
            "attention_dropout), or call model.eval()",
        )
    for name, why in _REFUSED.items():
        if options.get(name) is not None:
            raise _refusal(module, why)
    if options.get("output_attentions"):
        raise _refusal(module, "output_attentions; the matrix of weights is never made")


def _refusal(module: torch.nn.Module, what: str) -> ValueError:
    return ValueError(f"{type(module).__name__} asks kernel attention for what it cannot give: {what}")
