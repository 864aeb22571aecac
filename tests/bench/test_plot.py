import sys

import pytest

from sortattn.bench.plot import draw, save_plot
from sortattn.errors import CommandError


def test_the_lines_are_the_medians(sweep):
    pytest.importorskip("matplotlib")
    (axes,) = draw(sweep).axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
    assert lines == {
        "softmax (SDPA)": ([512, 2048, 8192], [1.0, 16.0, 256.0]),
        "add_bump": ([512, 2048, 8192], [2.0, 8.0, 32.0]),
        "add_riesz": ([512, 2048, 8192], [8.0, 32.0, 512.0]),
    }
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_every_pass_has_its_panel_and_the_file_is_a_picture(sweep, make_row, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [*sweep, make_row(passes="forward+backward")]
    assert [axes.get_title() for axes in draw(rows).axes] == ["forward, float32", "forward+backward, float32"]
    save_plot(rows, tmp_path / "folder" / "bench.png")
    assert (tmp_path / "folder" / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_the_figures_of_the_paper_stand_beside_a_run_of_its_shape(make_row):
    pytest.importorskip("matplotlib")
    shape = {"batch": 4, "heads": 12, "head_dim": 64, "value_dim": 64, "causal": False}
    rows = [make_row(kernel="add_riesz", backend="grid", n=n, **shape) for n in (128, 4096)]
    lines = {line.get_label(): list(line.get_ydata()) for line in draw(rows).axes[0].get_lines()}
    assert len(lines["add_riesz GLOBAL, paper (RTX 5090)"]) == 6
    assert not any("add_bump" in name for name in lines)


def test_without_matplotlib_the_extra_is_named(sweep, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(CommandError, match=r"sortattn\[bench\]"):
        draw(sweep)
