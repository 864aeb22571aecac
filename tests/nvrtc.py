"""CUDA sources compiled for architectures whose devices need not be there."""

import functools
import io
from pathlib import Path
from unittest import mock

from sortattn.cuda.compile import Defines, _compile, _text, only

ARCHITECTURES = ("sm_80", "sm_90", "sm_120")


def machine_code(
    source: Path, defines: Defines, architecture: str, *, entry: str | None = None, optimised: bool = False
) -> bytes:
    """All kernels of a source, or one, compiled afresh, and as for a user only if `optimised`, ten times as long.

    What the language or an architecture does not allow is an error either way: the whole source is parsed, translated
    and assembled. So is what makes products of four warps wait for each other, as where registers are too few: then a
    kernel is right, and takes a quarter longer.
    """
    import cuda.core

    log = io.StringIO()

    class Program(cuda.core.Program):
        def compile(self, target):
            return super().compile(target, logs=log)

    options = functools.partial(cuda.core.ProgramOptions, ofast_compile=None if optimised else "max")
    with mock.patch.multiple(cuda.core, ProgramOptions=options, Program=Program):
        text = _text(source) if entry is None else only(entry, _text(source))
        code = _compile(source, text, defines, architecture)
    assert "serialized" not in log.getvalue(), log.getvalue()
    return code
