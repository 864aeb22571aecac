"""From CUDA C++ to machine code by NVRTC, kept on disk between processes.

A program has one kernel: others of the same source would only have to be waited for. The source, all options and the
compiler's version are part of a file's name, so nothing stale is ever loaded. Files are written whole and renamed, so
processes that compile at the same time do not disturb each other. Whatever is wrong with the folder, a kernel is
compiled afresh.
"""

import hashlib
import os
import re
import tempfile
import threading
from pathlib import Path

Defines = tuple[tuple[str, str | int], ...]

_SUFFIX = ".cubin"
# threads that import cuda.core for the first time at once may find it half made
importing = threading.Lock()
# a file starts with the digest of what follows, so that one cut short is told from a whole one
_DIGEST = 32
# a kernel in its source, with its name: from its head to a brace at the start of a line
_KERNEL = re.compile(r'(?ms)^extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(.*?^}\n')


class CompileError(RuntimeError):
    """NVRTC refused a source; the message holds its log."""


def folder() -> Path:
    """The folder of compiled kernels: `$SORTATTN_CACHE`, or `sortattn` in the user's cache folder."""
    chosen = os.environ.get("SORTATTN_CACHE")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sortattn"
    except RuntimeError:
        # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"sortattn-{os.getuid()}"


def files() -> list[Path]:
    """All compiled kernels on disk."""
    return sorted(folder().glob(f"*{_SUFFIX}"))


def cubin(source: Path, entry: str, defines: Defines, arch: str) -> bytes:
    """The machine code of the kernel `entry` of `source` for an architecture such as `sm_90`."""
    text = only(entry, _text(source))
    parts = (text, repr(defines), arch, _compiler())
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    path = folder() / f"{source.stem}-{arch}-{name[:32]}{_SUFFIX}"
    code = _read(path)
    if code is None:
        code = _compile(source, text, defines, arch)
        _write(path, code)
    return code


def only(entry: str, text: str) -> str:
    """A source without its other kernels, the lines of which are empty."""
    return _KERNEL.sub(lambda kernel: kernel[0] if kernel[1] == entry else "\n" * kernel[0].count("\n"), text)


def _text(source: Path) -> str:
    """The source with the files beside it that it includes."""
    lines = []
    for number, line in enumerate(source.read_text().splitlines(), 1):
        if line.startswith('#include "'):
            other = source.with_name(line.split('"')[1])
            line = f'#line 1 "{other.name}"\n{_text(other)}\n#line {number + 1} "{source.name}"'
        lines.append(line)
    return "\n".join(lines) + "\n"


def _compiler() -> str:
    with importing:
        from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    return f"{error} {major}.{minor}"


def _compile(source: Path, text: str, defines: Defines, arch: str) -> bytes:
    with importing:
        from cuda.core import Program, ProgramOptions

    macros = [(name, str(value)) for name, value in defines]
    options = ProgramOptions(
        name=source.name, arch=arch, std="c++17", define_macro=macros or None, device_as_default_execution_space=True
    )
    try:
        program = Program(text, code_type="c++", options=options)
        return bytes(program.compile("cubin").code)
    # cuda.core and its bindings have errors of their own; what they say holds the compiler's log
    except Exception as error:
        raise CompileError(f"{source.name} does not compile for {arch} with {dict(defines)}:\n{error}") from error


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError:
        # a folder that cannot be written costs time in the next process, and nothing else
        return
