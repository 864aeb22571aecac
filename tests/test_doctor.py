import pytest

from sortattn import cache, choose, doctor
from sortattn.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A cache folder of 3 MB that is nobody's own."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "kernel.nbc").write_bytes(bytes(3_000_000))
    (tmp_path / "module.pyc").write_bytes(bytes(1_000_000))
    monkeypatch.setattr(cache, "folders", lambda: [tmp_path])
    monkeypatch.setenv("SORTATTN_CACHE", str(tmp_path / "cuda"))
    # which compiles for half a minute
    monkeypatch.setattr(doctor, "BACKENDS", tuple(name for name in doctor.BACKENDS if name != "keops"))
    return tmp_path


def test_a_healthy_machine_is_told_so(folder, capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for backend in doctor.ALWAYS:
        assert any(line.split()[:2] == [backend, "works,"] for line in lines)
    assert any(line.split()[:1] == ["torch"] and line.split()[1][0].isdigit() for line in lines)
    assert any("3.0 MB in 1 files" in line for line in lines)
    assert lines[-1] == "All well."


def test_every_backend_is_tried():
    assert set(choose.NAMES) - {"auto"} <= set(doctor.BACKENDS)
    assert set(doctor.ALWAYS) <= set(doctor.BACKENDS)


def test_a_backend_that_fails_is_named_with_its_reason(folder, capsys, monkeypatch):
    honest = doctor.kernel_attention

    def broken(*args, backend):
        if backend == "sorted":
            raise ImportError("Numba is missing\nmore")
        return honest(*args, backend=backend)

    monkeypatch.setattr(doctor, "kernel_attention", broken)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["sorted", "no:", "ImportError:", "Numba", "is", "missing"] for line in lines)
    assert lines[-1] == "Not well: sorted should work here."


def test_every_line_is_there_before_the_next_backend_and_nothing_else(folder, capsys, monkeypatch):
    honest, printed = doctor.kernel_attention, []

    def talking(*args, backend):
        print("Compiling ...")
        # behind the one that caught this
        printed.append(capsys.readouterr().out.rstrip().rsplit("\n", 1)[-1].strip())
        return honest(*args, backend=backend)

    monkeypatch.setattr(doctor, "kernel_attention", talking)
    assert main(["doctor"]) == 0
    assert printed == list(doctor.BACKENDS)
    assert "Compiling" not in capsys.readouterr().out


def test_a_backend_whose_gradient_fails_does_not_work(monkeypatch):
    monkeypatch.setattr(doctor, "kernel_attention", lambda *args, backend: args[0].detach())
    assert "RuntimeError" in doctor._trouble("tiled", "cpu")


def test_the_extras_may_be_missing(folder, monkeypatch):
    def broken(*args, backend):
        if backend not in doctor.ALWAYS:
            raise ImportError("not installed")
        return args[0] * 1

    monkeypatch.setattr(doctor, "kernel_attention", broken)
    assert main(["doctor"]) == 0


def test_clear_cache_clears_and_says_what(folder, capsys, monkeypatch):
    monkeypatch.setattr(cache, "clear", lambda: 7)
    assert main(["doctor", "--clear-cache"]) == 0
    assert capsys.readouterr().out.strip() == f"Removed 7 files from {folder} and {folder / 'cuda'}"


def test_costs_prints_the_cost_model(capsys):
    assert main(["doctor", "--costs"]) == 0
    assert capsys.readouterr().out.strip() == choose.cost_table().strip()
