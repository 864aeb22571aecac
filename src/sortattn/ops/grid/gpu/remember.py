"""Launches that remember what was compiled: of the time of a launch on the host, most goes into finding it again."""

import torch
from torch import Tensor


class Remembered:
    """A Triton kernel, launched as such: `kernel[grid](*arguments, **constants)`.

    What Triton compiles depends on the constants, on the types of the arguments, and on whether pointers and whole
    numbers are multiples of 16 or one.
    """

    def __init__(self, kernel):
        self.kernel = kernel
        self._known = {}

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *arguments, **constants: self._launch(grid, arguments, constants)

    def _launch(self, grid: tuple[int, ...], arguments: tuple, constants: dict) -> None:
        key = (torch.cuda.current_device(), *map(_trait, arguments), *constants.items())
        found = self._known.get(key)
        if found is None:
            names = self.kernel.arg_names[len(arguments) :]
            compiled = self.kernel[grid](*arguments, **constants)
            self._known[key] = compiled, [constants[name] for name in names]
            return
        compiled, rest = found
        compiled[*grid, *(1,) * (3 - len(grid))](*arguments, *rest)


def _trait(argument: object) -> object:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument % 16 == 0, argument == 1, argument.bit_length() > 31
    return type(argument)
