"""`KernelAttention`, a drop-in for self- and cross-attention in the manner of `torch.nn.MultiheadAttention`."""

import math
from copy import copy

import torch
from torch import Tensor, nn

from .attention import kernel_attention
from .choose import named
from .kernels import Kernel, positive, resolve
from .validation import check_flag


class KernelAttention(nn.Module):
    """Multi-head kernel attention with its four projections, batch first.

    `forward(query, key=None, value=None, key_mask=None)` takes `(B, M, embed_dim)`, `(B, N, key_dim)` and
    `(B, N, value_dim)`, or unbatched `(M, embed_dim)`, and returns `(B, M, embed_dim)`. Without `key` and `value` it is
    self-attention; `value` defaults to `key`.

    Unlike `nn.MultiheadAttention` it returns the rows alone, as no matrix of weights is ever made, and its `key_mask`
    is True where a key takes part, as in SDPA: the opposite of `key_padding_mask`.

    - `kv_heads`: fewer key and value heads than query heads (grouped queries).
    - `bandwidth`: a number, or None for the kernel's default; with `learn_bandwidth` it is the start of one positive
      parameter per head, kept as its logarithm.
    - `is_causal`, `backend`: as in `kernel_attention`.

    Coefficients of a kernel that are an `nn.Parameter` are parameters of this module, trained, saved and moved with it.

    >>> import torch, sortattn
    >>> attention = sortattn.KernelAttention(32, num_heads=4, kernel="add_bump")
    >>> attention(torch.randn(2, 50, 32)).shape
    torch.Size([2, 50, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kernel: str | Kernel = "add_laplace",
        *,
        bandwidth: float | None = None,
        learn_bandwidth: bool = False,
        kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = True,
        is_causal: bool = False,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        kv_heads = num_heads if kv_heads is None else kv_heads
        key_dim = embed_dim if key_dim is None else key_dim
        value_dim = key_dim if value_dim is None else value_dim
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kv_heads": kv_heads}
        for name, size in {**sizes, "key_dim": key_dim, "value_dim": value_dim}.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} must be a whole number from 1, got {size!r}")
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if num_heads % kv_heads:
            raise ValueError(f"num_heads must be a multiple of kv_heads, got {num_heads} and {kv_heads}")
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        # a kernel of the user's is kept as it is, not copied
        self.kernel = resolve(kernel)
        self._learned = tuple(name for name, part in vars(self.kernel).items() if isinstance(part, nn.Parameter))
        for name in self._learned:
            self.register_parameter(f"kernel_{name}", getattr(self.kernel, name))
        if backend != "auto":
            # an unknown one is told here, not in the first call
            named(backend)
        check_flag("is_causal", is_causal)
        self.is_causal, self.backend = is_causal, backend
        options = {"bias": bias, "device": device, "dtype": dtype}
        shared = kv_heads * self.head_dim
        self.query_proj = nn.Linear(embed_dim, embed_dim, **options)
        self.key_proj = nn.Linear(key_dim, shared, **options)
        self.value_proj = nn.Linear(value_dim, shared, **options)
        self.out_proj = nn.Linear(embed_dim, embed_dim, **options)
        start = self.kernel.default_bandwidth(self.head_dim) if bandwidth is None else positive(bandwidth)
        self.bandwidth = start
        if learn_bandwidth:
            self.log_bandwidth = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        else:
            self.register_parameter("log_bandwidth", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier weights and zero biases, as `nn.MultiheadAttention` has them, and the bandwidth to begin with.

        Coefficients of the kernel stay as they are: what they were is not known here.
        """
        for projection in (self.query_proj, self.key_proj, self.value_proj, self.out_proj):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self.log_bandwidth is not None:
            nn.init.constant_(self.log_bandwidth, math.log(self.bandwidth))

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from `query` to `key` and `value`; `key_mask (B, N)` is True where a key takes part."""
        key = query if key is None else key
        value = key if value is None else value
        heads = self._split("query", query, self.query_proj, self.num_heads)
        keys = self._split("key", key, self.key_proj, self.kv_heads)
        values = self._split("value", value, self.value_proj, self.kv_heads)
        bandwidth = self.bandwidth if self.log_bandwidth is None else self.log_bandwidth.exp()
        rows = kernel_attention(
            heads, keys, values, self._present(), bandwidth=bandwidth, key_mask=key_mask, is_causal=self.is_causal,
            enable_gqa=self.kv_heads != self.num_heads, backend=self.backend,
        )  # fmt: skip
        return self.out_proj(rows.transpose(-3, -2).flatten(-2))

    def _present(self) -> Kernel:
        """The kernel with the parameters of the module, in place of which others may have been put."""
        parts = {name: getattr(self, f"kernel_{name}") for name in self._learned}
        if all(part is getattr(self.kernel, name) for name, part in parts.items()):
            return self.kernel
        kernel = copy(self.kernel)
        for name, part in parts.items():
            setattr(kernel, name, part)
        return kernel

    def _split(self, name: str, rows: Tensor, projection: nn.Linear, heads: int) -> Tensor:
        """The projected rows by head, `(B, heads, N, head_dim)`."""
        if not isinstance(rows, Tensor) or rows.dim() < 2 or rows.shape[-1] != projection.in_features:
            came = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(f"{name} must be a tensor of shape (..., length, {projection.in_features}), got {came}")
        return projection(rows).unflatten(-1, (heads, self.head_dim)).transpose(-3, -2)

    def extra_repr(self) -> str:
        """What `print` shows of the module."""
        grouped = f", kv_heads={self.kv_heads}" if self.kv_heads != self.num_heads else ""
        learned = ", learn_bandwidth=True" if self.log_bandwidth is not None else ""
        causal = ", is_causal=True" if self.is_causal else ""
        chosen = f", backend={self.backend!r}" if self.backend != "auto" else ""
        kernel = f"kernel={self.kernel.name!r}, bandwidth={self.bandwidth:g}"
        return f"{self.embed_dim}, num_heads={self.num_heads}{grouped}, {kernel}{learned}{causal}{chosen}"
