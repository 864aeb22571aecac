"""How precise `backend="auto"` has to be: exact, or to the rounding of 16-bit inputs."""

PRECISIONS = ("exact", "rounding")

_current = "exact"


def set_precision(precision: str) -> None:
    """`"exact"` (the default) keeps `auto` to exact backends; `"rounding"` lets it take the grid for 16-bit inputs.

    With `"rounding"` a float16 or bfloat16 call goes to the grid if that is expected to be faster than every exact
    backend. The result is returned if its error, estimated on the data of the call as `sortattn.grid_error` does, is
    below the unit roundoff of the type in every head, 2^-11 or 2^-8; otherwise an exact backend makes the call again.
    The estimate is read back, one number: on a GPU such a call waits for the device. Where nothing can be read, under
    `torch.compile`, `vmap` and while a CUDA graph is captured, `auto` stays exact; there ask for `backend="grid"` by
    name.

    >>> import sortattn
    >>> sortattn.set_precision("rounding")
    >>> sortattn.get_precision()
    'rounding'
    >>> sortattn.set_precision("exact")
    """
    global _current
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    _current = precision


def get_precision() -> str:
    """What `set_precision` has set."""
    return _current
