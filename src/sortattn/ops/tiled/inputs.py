"""What the operator of the tiled backend takes, forward and backward."""

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The arguments of `tiled_sum`.

    `weight (P, N)` is zero where a key does not take part. The bandwidth is `bandwidth (P, 1, 1)`, else the number
    `tau`; `parameters` are those of kernels that are not known by name. `group` queries share a key, and their rows lie
    one behind the other. With `coarse`, for numbers that had 16 bits, products may have eleven digits.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor | None
    bandwidth: Tensor | None
    parameters: Tensor | None
    tau: float
    kernel: str
    causal: bool
    group: int
    normalised: bool
    coarse: bool


# how many of them are tensors, which come first
TENSORS = 6
_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", str: "str", bool: "bool", int: "SymInt"}


def schema(outputs: int, *more: str, last: tuple[str, ...] = ()) -> str:
    """The schema of an operator with so many outputs that takes `more` tensors, then `Inputs`, and then the `last`."""
    names = [f"Tensor {name}" for name in more]
    names += [f"{_TYPES[kind]} {name}" for name, kind in Inputs.__annotations__.items()]
    return f"({', '.join((*names, *last))}) -> ({', '.join(['Tensor'] * outputs)})"
