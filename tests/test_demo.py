import sys
from types import SimpleNamespace

import pytest
import torch

from sortattn import demo as module
from sortattn.bench.store import read
from sortattn.cli import main
from sortattn.demo import PROMISES, dense_attention, relative_errors


def test_the_dense_definition_weighs_by_the_kernel_and_leaves_masked_keys_out():
    query, key = torch.zeros(1, 1, 1, 1), torch.tensor([0.0, 0.75, 0.3])[None, None, :, None]
    value = torch.tensor([1.0, 2.0, 100.0])[None, None, :, None]
    mask = torch.tensor([[True, True, False]])
    # add_bump with its bandwidth of 1.5 gives the weights 1 and 1/2
    torch.testing.assert_close(dense_attention(query, key, value, "add_bump", mask).item(), (1 + 2 / 2) / 1.5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kernel", module.KERNELS)
def test_what_the_demo_shows_is_so(kernel, masked):
    output, *gradients = relative_errors(kernel, torch.float32, masked)
    assert 0 < output <= PROMISES[torch.float32][0]
    assert 0 < max(gradients) <= PROMISES[torch.float32][1]


def test_an_error_in_the_output_would_be_seen(monkeypatch):
    honest = module.kernel_attention
    monkeypatch.setattr(module, "kernel_attention", lambda *args, **options: honest(*args, **options) * 1.001)
    assert min(relative_errors("add_bump", torch.float32, False)) == pytest.approx(1e-3, rel=0.1)


class Beside:
    """A process that is none: what is asked of it is listed."""

    def __init__(self, target, args, daemon):
        self.work = (target, *args)
        # the demo ends with an interrupt, too
        assert daemon

    def start(self):
        seen.append(("start", *self.work))

    def join(self):
        seen.append(("join", *self.work))


seen = []


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """The demo at sizes that take no time, and without its accuracy part, which is tested above."""
    monkeypatch.setattr(module, "relative_errors", lambda *case: [1e-15] * 4)
    monkeypatch.setattr(module, "get_context", lambda method: SimpleNamespace(Process=Beside))
    monkeypatch.setattr(module, "BUDGET", 0.0)
    return lambda: main(["demo", "-n", "16", "--out", str(tmp_path)])


def test_the_demo_writes_its_rows_and_its_picture(quick, tmp_path, capsys):
    assert quick() == 0
    kernels = {row.kernel for row in read(tmp_path / "time.csv")}
    assert kernels == {"softmax", "add_riesz", "add_laplace", "add_bump"}
    assert (tmp_path / "time.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert str(tmp_path / "time.png") in printed
    assert "add_bump, keys masked" in printed
    assert "add_laplace: " in printed


def test_the_kernels_of_the_second_type_are_compiled_meanwhile_and_waited_for(quick, monkeypatch):
    seen.clear()

    def errors(kernel, dtype, masked):
        seen.append(dtype)
        return [1e-15] * 4

    monkeypatch.setattr(module, "relative_errors", errors)
    assert quick() == 0
    work = (module.compile_kernels, torch.float32)
    assert seen == [("start", *work), *[torch.float64] * 6, ("join", *work), *[torch.float32] * 6]


def test_all_kernels_are_compiled_as_the_demo_needs_them(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "relative_errors", lambda *case: asked.append(case))
    module.compile_kernels(torch.float32)
    assert asked == [(kernel, torch.float32, False) for kernel in module.KERNELS]


def test_the_demo_starts_afresh_and_does_without_matplotlib(quick, tmp_path, capsys, monkeypatch):
    (tmp_path / "time.csv").write_text("left over")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert quick() == 0
    assert len(read(tmp_path / "time.csv")) == 4
    assert "pip install 'sortattn[bench]'" in capsys.readouterr().out


def test_a_broken_promise_ends_with_1(quick, monkeypatch, capsys):
    monkeypatch.setattr(module, "relative_errors", lambda *case: [1e-15, 1e-15, 1.0, 1e-15])
    assert quick() == 1
    printed = capsys.readouterr().out
    assert "larger than promised" in printed
    assert "NO" in printed
