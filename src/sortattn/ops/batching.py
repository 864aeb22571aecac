"""What the operators' rules for `torch.func.vmap` share: a mapped dimension becomes more problems."""

from collections.abc import Callable

from torch import Tensor


def fold(size: int, tensor: Tensor, dim: int | None) -> Tensor:
    """`(P, ...)` per sample, mapped over `dim` (None: the same for all), as `(size * P, ...)`.

    Of no samples at all, one of zeros: it tells how many problems and which results there would be.
    """
    if size == 0:
        return tensor if dim is None else tensor.new_zeros(tensor.movedim(dim, 0).shape[1:])
    batched = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return batched.reshape(batched.shape[0] * batched.shape[1], *batched.shape[2:])


def unfold(size: int, outputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Outputs `(size * P, ...)` as `(size, P, ...)`, and the dimension they are mapped over; see `fold` for no size."""
    if size == 0:
        return tuple(part[None][:0] for part in outputs), (0,) * len(outputs)
    return tuple(part.unflatten(0, (size, part.shape[0] // size)) for part in outputs), (0,) * len(outputs)


def refuse_coefficients(*dims: int | None) -> None:
    """Those of a kernel are the same for all problems: they cannot be mapped over any of these dimensions."""
    if any(dim is not None for dim in dims):
        raise RuntimeError("sortattn cannot vmap over the coefficients of a kernel; call it once per kernel instead")


def map_rule(operator: Callable[..., Tensor]) -> Callable:
    """The rule for an operator of tensors `(P, ...)` alone that returns one tensor."""

    def mapped(info, in_dims, *inputs):
        folded = [fold(info.batch_size, part, dim) for part, dim in zip(inputs, in_dims, strict=True)]
        (out,), (dim,) = unfold(info.batch_size, (operator(*folded),))
        return out, dim

    return mapped
