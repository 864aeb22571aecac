"""What a call must look like, checked before any work is done, and the one layout that every backend sees."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import threads
from .kernels import Kernel, positive
from .ops.direct import plain

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Problem:
    """One validated call with its leading dimensions flattened into P problems.

    `query (P, M, D)`, `key (P, N, D)`, `value (P, N, C)` in float32 or float64, or in 16 bits for a backend that asks
    for the caller's type; `weight (P, N)` one where a key takes part and zero elsewhere (None: all do), `bandwidth` a
    float or a tensor `(P, 1, 1)`, never in 16 bits. Grouped query heads are
    folded into M, `group` of them one behind the other, so that keys are never copied. Masked keys are finite and
    masked values zero, whatever the caller's held.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor | None
    bandwidth: float | Tensor
    causal: bool
    group: int
    leading: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """The number of queries of one head, before folding."""
        return self.query.shape[-2] // self.group

    def widened(self) -> "Problem":
        """The same problem in the type that sums are made in: float32, or float64."""
        return self._in(working_type(self.dtype))

    def as_given(self) -> "Problem":
        """The same problem in the caller's type."""
        return self._in(self.dtype)

    def _in(self, dtype: torch.dtype) -> "Problem":
        if self.query.dtype == dtype:
            return self
        parts = (part.to(dtype) for part in (self.query, self.key, self.value))
        return replace(self, **dict(zip(("query", "key", "value"), parts, strict=True)))

    def visible(self, start: int, stop: int) -> Tensor | None:
        """For a causal call: how many keys the queries `start ... stop - 1` see, at least zero; None otherwise."""
        if not self.causal:
            return None
        position = torch.arange(start, stop, device=self.query.device) % max(self.rows, 1)
        return (position + 1 + self.key.shape[-2] - self.rows).clamp(min=0)

    def restore(self, rows: Tensor) -> Tensor:
        """Bring `(P, M, ...)` rows back to the caller's leading dimensions and dtype."""
        rows = rows if rows.dtype == self.dtype else rows.to(self.dtype)
        return rows.reshape(*self.leading, self.rows, *rows.shape[2:])


def working_type(dtype: torch.dtype) -> torch.dtype:
    """The type that sums are made in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def make_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Kernel,
    *,
    native: bool = False,
    bandwidth: float | Tensor | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Problem:
    """Check a call against the contract and flatten it; `native` leaves tensors of 16 bits as they are."""
    _check_tensors(query, key, value)
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    threads.settle()
    query, key, value = autocast(query, key, value)
    _check_match(query, key, value)
    leading, group = _leading(query, key, value, enable_gqa)
    bandwidth = _check_bandwidth(bandwidth, kernel, query, leading)
    mask = _check_mask(key_mask, query, key, leading)
    own_bandwidth = isinstance(bandwidth, Tensor) and bandwidth.dim() > 0 and bandwidth.shape[-1] != 1
    own_mask = mask is not None and mask.dim() > 1 and mask.shape[-2] != 1
    if group > 1 and (own_bandwidth or own_mask):
        # heads of one group with bandwidths or masks of their own share no sums: then the keys are repeated
        key, value = (part.repeat_interleave(group, -3) for part in (key, value))
        group = 1

    dtype = query.dtype
    working = working_type(dtype)
    if not native and dtype != working:
        query, key, value = query.to(working), key.to(working), value.to(working)
    rows, columns = query.shape[-2], key.shape[-2]
    shared = leading if group == 1 else (*leading[:-1], leading[-1] // group)
    # not -1, which a reshape cannot infer where there is no query, key or channel
    problems = math.prod(shared)
    query = _flat(query, leading, problems, group * rows)
    key, value = _flat(key, shared, problems, columns), _flat(value, shared, problems, columns)
    weight = None
    if mask is not None:
        mask = mask.expand(*shared, columns).reshape(problems, columns)
        # whatever masked rows held, a NaN say, must not count; keys go to the mean of the others and not to zero, which
        # may be far away: backends that measure from the mean of the keys would then lose digits
        seen = mask[..., None]
        total = torch.where(seen, key.detach(), 0.0).sum(-2, keepdim=True, dtype=working)
        key = torch.where(seen, key, (total / mask.sum(-1).clamp(min=1)[..., None, None]).to(key.dtype))
        value = torch.where(seen, value, 0.0)
        weight = mask.to(working)
    if isinstance(bandwidth, Tensor):
        bandwidth = bandwidth.to(query.device, working)
        narrow = bandwidth if group == 1 else bandwidth.expand(*leading[:-1], 1)
        bandwidth = narrow.expand(shared).reshape(problems, 1, 1)
    return Problem(query, key, value, weight, bandwidth, is_causal, group, leading, dtype)


def check_flag(name: str, flag: object) -> None:
    """TypeError if it is neither True nor False."""
    if not isinstance(flag, (bool, torch.SymBool)):
        kind = type(flag)
        came = kind.__name__ if kind.__module__ in ("builtins", "torch") else f"{kind.__module__}.{kind.__name__}"
        raise TypeError(f"{name} must be True or False, got {came}")


def _flat(tensor: Tensor, leading: tuple[int, ...], problems: int, rows: int) -> Tensor:
    """`(*leading, ...)`, after broadcasting, as `(problems, rows, ...)`."""
    if tuple(tensor.shape[:-2]) != leading:
        tensor = tensor.expand(*leading, *tensor.shape[-2:])
    return tensor.reshape(problems, rows, tensor.shape[-1])


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be float64, float32, float16 or bfloat16, got {tensor.dtype}")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got {tensor.layout}")
        if tensor.dim() < 2:
            raise ValueError(f"{name} must have shape (..., length, channels), got {tuple(tensor.shape)}")
        if tensor.device != query.device:
            raise ValueError(f"{name} must be on query's device {query.device}, got {tensor.device}")


def autocasts(device: str) -> bool:
    """Whether autocast is on for this kind of device; `meta` has none."""
    return device != "meta" and torch.is_autocast_enabled(device)


def autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors as autocast has them."""
    device = query.device.type
    if autocasts(device):
        dtype = torch.get_autocast_dtype(device)
        # as for SDPA: autocast brings all three to its type, but leaves float64 alone
        if all(part.dtype != torch.float64 for part in (query, key, value)):
            return query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value


def _check_match(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have query's dtype {query.dtype}, got {tensor.dtype}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key must have shape (..., N, {query.shape[-1]}) to match query {tuple(query.shape)}, "
            f"got {tuple(key.shape)}"
        )
    if query.shape[-1] == 0:
        raise ValueError(f"query must have at least one channel, got shape {tuple(query.shape)}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"value must have shape (..., {key.shape[-2]}, C) to match key {tuple(key.shape)}, got {tuple(value.shape)}"
        )


def _leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[tuple[int, ...], int]:
    """The broadcast leading dimensions and the number of query heads per key head."""
    shapes = [tuple(part.shape[:-2]) for part in (query, key, value)]
    group = 1
    if not enable_gqa and shapes[0] == shapes[1] == shapes[2]:
        # the usual call: broadcasting takes torch a tenth of the time of a short one
        return shapes[0], group
    if enable_gqa:
        if any(len(shape) == 0 for shape in shapes):
            raise ValueError("enable_gqa needs a head dimension: tensors of shape (..., heads, length, channels)")
        heads, shared = shapes[0][-1], shapes[1][-1]
        if shapes[2][-1] != shared:
            raise ValueError(f"value must have key's {shared} heads, got {shapes[2][-1]}")
        if shared == 0 or heads % shared:
            raise ValueError(
                f"with enable_gqa the query heads must be a multiple of the key heads, got {heads} and {shared}"
            )
        group = heads // shared
        shapes[1:] = [(*shape[:-1], heads) for shape in shapes[1:]]
    try:
        return tuple(torch.broadcast_shapes(*shapes)), group
    except RuntimeError:
        hint = "" if enable_gqa else " (fewer key heads than query heads need enable_gqa=True)"
        raise ValueError(
            "the leading dimensions of query, key and value must broadcast, got "
            f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}{hint}"
        ) from None


def _check_bandwidth(
    bandwidth: float | Tensor | None, kernel: Kernel, query: Tensor, leading: tuple[int, ...]
) -> float | Tensor:
    if bandwidth is None:
        return kernel.default_bandwidth(query.shape[-1])
    if isinstance(bandwidth, Tensor):
        if not bandwidth.is_floating_point():
            raise TypeError(f"bandwidth must be a floating-point tensor, got {bandwidth.dtype}")
        if bandwidth.device != query.device:
            raise ValueError(f"bandwidth must be on query's device {query.device}, got {bandwidth.device}")
        try:
            fits = tuple(torch.broadcast_shapes(bandwidth.shape, leading)) == leading
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(
                "bandwidth must be a number or a tensor that broadcasts to the leading dimensions "
                f"{leading} (shape (H,) gives one per head), got shape {tuple(bandwidth.shape)}"
            )
        # a look at a GPU would wait for it; a NaN makes its own head NaN, as one in the inputs does
        if bandwidth.device.type == "cpu" and plain(bandwidth):
            # of float64 numbers some are zero where they are used
            used = bandwidth.detach().to(working_type(query.dtype))
            if bool((used <= 0).any()):
                raise ValueError(f"bandwidth must be positive, got {bandwidth.tolist()}, for sums in {used.dtype}")
        return bandwidth
    return positive(bandwidth, "a number, a tensor or None")


def _check_mask(mask: Tensor | None, query: Tensor, key: Tensor, leading: tuple[int, ...]) -> Tensor | None:
    """The mask with shape broadcastable to `(*leading, N)`."""
    if mask is None:
        return None
    columns = key.shape[-2]
    batch = leading[0] if leading else 1

    # written out only for an error: sizes that a compiler holds as symbols have no digits
    def expected() -> str:
        shapes = f"({batch}, {columns}), or any shape that broadcasts to {(*leading, columns)}"
        return f"key_mask must be bool of shape (B, N) = {shapes}"

    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.layout != torch.strided:
        kind = type(mask).__name__
        if isinstance(mask, Tensor):
            kind = mask.layout if mask.dtype == torch.bool else mask.dtype
        raise TypeError(f"{expected()}, True where the key takes part, got {kind}")
    if mask.device != query.device:
        raise ValueError(f"key_mask must be on query's device {query.device}, got {mask.device}")
    if mask.dim() == 2 and mask.shape[1] == columns and (mask.shape[0] == batch or mask.shape[0] == 1):
        return mask.reshape(*mask.shape[: len(leading[:1])], *(1,) * (len(leading) - 1), columns)
    if mask.dim() == len(leading) + 2 or (mask.dim() == 2 and mask.shape[0] == query.shape[-2]):
        raise ValueError(f"{expected()}; dense (M, N) masks are not supported, got shape {tuple(mask.shape)}")
    try:
        fits = tuple(torch.broadcast_shapes(mask.shape, (*leading, columns))) == (*leading, columns)
    except RuntimeError:
        fits = False
    # a 2-D mask is (B, N) and nothing else: (H, N) would be taken for it on a square shape
    if not fits or mask.shape[-1:] != (columns,) or (mask.dim() == 2 and len(leading) != 1):
        raise ValueError(f"{expected()}, got shape {tuple(mask.shape)}")
    return mask
