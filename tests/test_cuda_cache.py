"""Compiled CUDA kernels on disk: found again, and survived whatever becomes of the folder."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from sortattn.cuda import compile as cuda

pytest.importorskip("cuda.core")

SOURCE = 'extern "C" __global__ void scale(float *x) {\n    x[threadIdx.x] *= FACTOR;\n}\n'
DEFINES = (("FACTOR", 2),)
OTHER = 'extern "C" __global__ void __launch_bounds__(32)\n    other(int *x) {\n    x[0] = 1;\n}\n'


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SORTATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "scale.cu"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def compiled(monkeypatch):
    """What has gone to the compiler."""
    calls = []
    honest = cuda._compile
    monkeypatch.setattr(cuda, "_compile", lambda *args: calls.append(args) or honest(*args))
    return calls


def test_a_kernel_is_compiled_once(folder, source, compiled):
    first = cuda.cubin(source, "scale", DEFINES, "sm_90")
    assert cuda.cubin(source, "scale", DEFINES, "sm_90") == first
    assert len(compiled) == 1
    assert len(cuda.files()) == 1


def test_another_source_macro_or_architecture_is_another_kernel(folder, source, compiled):
    cuda.cubin(source, "scale", DEFINES, "sm_90")
    cuda.cubin(source, "scale", (("FACTOR", 3),), "sm_90")
    cuda.cubin(source, "scale", DEFINES, "sm_80")
    source.write_text(SOURCE + "// changed\n")
    cuda.cubin(source, "scale", DEFINES, "sm_90")
    assert len(compiled) == len(cuda.files()) == 4


def test_a_program_has_one_kernel_of_its_source(folder, source, compiled):
    source.write_text(SOURCE + OTHER + "int broken = nowhere;\n")
    with pytest.raises(cuda.CompileError, match=r"scale\.cu\(8\)"):
        cuda.cubin(source, "scale", DEFINES, "sm_90")
    source.write_text(SOURCE + OTHER)
    scale, other = (cuda.cubin(source, entry, DEFINES, "sm_90") for entry in ("scale", "other"))
    assert b"scale" in scale
    assert b"other" not in scale
    assert b"other" in other
    assert len(cuda.files()) == 2


def test_a_file_that_is_included_counts_as_a_part_of_the_source(folder, source, compiled):
    source.write_text('#include "factor.cu"\n' + SOURCE)
    source.with_name("factor.cu").write_text("#define FACTOR 2\n")
    cuda.cubin(source, "scale", (), "sm_90")
    source.with_name("factor.cu").write_text("#define FACTOR 3\n")
    cuda.cubin(source, "scale", (), "sm_90")
    assert len(compiled) == 2


def test_an_error_in_a_file_that_is_included_shows_its_line(folder, source):
    source.write_text('\n#include "factor.cu"\nint broken = somewhere;\n')
    source.with_name("factor.cu").write_text("\n\n\nint broken = nowhere;\n")
    with pytest.raises(cuda.CompileError) as error:
        cuda.cubin(source, "scale", (), "sm_90")
    assert "factor.cu(4)" in str(error.value)
    assert "scale.cu(3)" in str(error.value)


@pytest.mark.parametrize("damage", [lambda code: b"", lambda code: code[:-100], lambda code: b"x" + code[1:]])
def test_a_damaged_file_is_compiled_anew(folder, source, compiled, damage):
    code = cuda.cubin(source, "scale", DEFINES, "sm_90")
    (path,) = cuda.files()
    path.write_bytes(damage(path.read_bytes()))
    assert cuda.cubin(source, "scale", DEFINES, "sm_90") == code
    assert len(compiled) == 2
    assert cuda.cubin(source, "scale", DEFINES, "sm_90") == code
    assert len(compiled) == 2


def test_a_folder_that_is_no_folder_is_survived(folder, source):
    folder.write_text("in the way")
    assert cuda.cubin(source, "scale", DEFINES, "sm_90")


def test_a_folder_that_cannot_be_written_is_survived(folder, source, monkeypatch):
    def refuse(**_):
        raise PermissionError("read-only")

    monkeypatch.setattr(cuda.tempfile, "mkstemp", refuse)
    assert cuda.cubin(source, "scale", DEFINES, "sm_90")
    assert not cuda.files()


def test_many_at_once_leave_one_whole_file(folder, source):
    with ThreadPoolExecutor(8) as pool:
        codes = set(pool.map(lambda _: cuda.cubin(source, "scale", DEFINES, "sm_90"), range(16)))
    assert len(codes) == 1
    assert [path.suffix for path in folder.iterdir()] == [".cubin"]


def test_an_error_shows_the_line(folder, source):
    source.write_text("\n\nint broken = nowhere;\n")
    with pytest.raises(
        cuda.CompileError, match=r"scale\.cu does not compile for sm_90(.|\n)*scale\.cu\(3\)(.|\n)*nowhere"
    ):
        cuda.cubin(source, "scale", (), "sm_90")
    assert not cuda.files()


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("SORTATTN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cuda.folder() == tmp_path / "sortattn"


def test_without_a_home_kernels_are_kept_among_temporary_files(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("SORTATTN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cuda.Path, "home", homeless)
    monkeypatch.setattr(cuda.tempfile, "gettempdir", lambda: str(tmp_path))
    assert cuda.folder().parent == tmp_path
