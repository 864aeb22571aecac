from pathlib import Path

import pytest

from sortattn.bench.report import BLOCK, block, main, refresh
from sortattn.bench.store import write
from sortattn.bench.summary import conditions, memory_table, time_table

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
STALE = "# Title\n\n<!-- bench:cpu -->\nold\n<!-- /bench:cpu -->\n\nThe rest.\n"


@pytest.fixture
def folder(tmp_path, sweep, make_row):
    """A document with a block that is out of date, and the results it should show."""
    backward = make_row(passes="forward+backward", median_ms=7.0)
    write(tmp_path / "cpu.csv", [*sweep, backward])
    (tmp_path / "README.md").write_text(STALE)
    return tmp_path


def report(folder, *options):
    return main([str(folder / "README.md"), "--results", str(folder), *options])


def test_a_block_shows_the_rows_and_the_rest_stays(folder, sweep):
    assert report(folder) == 0
    text = (folder / "README.md").read_text()
    assert text.startswith("# Title\n\n<!-- bench:cpu -->\n")
    assert text.endswith("<!-- /bench:cpu -->\n\nThe rest.\n")
    assert "old" not in text
    for part in (time_table(sweep, "markdown"), memory_table(sweep, "markdown"), "**forward+backward, float32**"):
        assert part in text
    assert conditions(sweep) in text


def test_check_finds_a_stale_block_and_changes_nothing(folder):
    assert report(folder, "--check") == 1
    assert (folder / "README.md").read_text() == STALE
    report(folder)
    assert report(folder, "--check") == 0


def test_a_change_of_the_results_makes_the_block_stale(folder, sweep):
    report(folder)
    write(folder / "cpu.csv", sweep[:6])
    assert report(folder, "--check") == 1


def test_a_block_without_results_is_an_error_that_names_the_file(folder, capsys):
    (folder / "cpu.csv").unlink()
    assert report(folder) == 2
    assert "cpu.csv" in capsys.readouterr().err
    assert (folder / "README.md").read_text() == STALE


def test_blocks_of_several_files_do_not_mix(tmp_path, sweep, make_row):
    write(tmp_path / "one.csv", sweep)
    write(tmp_path / "two.csv", [make_row(kernel="elu")])
    text = "<!-- bench:one -->\n<!-- /bench:one -->\nbetween\n<!-- bench:two -->\n<!-- /bench:two -->\n"
    first, second = refresh(text, tmp_path).split("between")
    assert block(sweep) in first
    assert "elu" in second
    assert "elu" not in first


@pytest.mark.skipif(not README.exists(), reason="an installed package has no README")
@pytest.mark.parametrize("name", ["README.md", "docs/grid.md", "docs/performance.md", "docs/performance-gpu.md"])
def test_documents_show_the_results_that_are_in_the_repository(name):
    text = (ROOT / name).read_text()
    assert BLOCK.search(text)
    assert refresh(text, ROOT / "benchmarks" / "results") == text, f"run: python -m sortattn.bench.report {name}"
