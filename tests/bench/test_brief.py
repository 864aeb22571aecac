from dataclasses import asdict

import pytest

from sortattn.bench.brief import block
from sortattn.bench.paper.run import PaperRow
from sortattn.bench.report import refresh
from sortattn.bench.store import write
from sortattn.errors import CommandError
from sortattn.records import write as write_rows

WORDS = ["softmax=sdpa", "by=auto", "kernels=add_bump"]


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


@pytest.fixture
def paper(tmp_path, settings, machine):
    """A file of `sortattn bench --paper`, in which one method is faster forward and the other one with gradients."""
    common = {"dtype": "float32", "std_ms": 0.1, "runs": 10, "warm_ups": 5, "memory_bytes": None, "n": 512}
    common |= {**asdict(settings), **asdict(machine), "date": "2026-01-31 12:00"}
    rows = [
        PaperRow(kernel=kernel, method=method, backend=method.lower(), passes=passes, mean_ms=spent, **common)
        for kernel, method, forward, both in (
            ("softmax", "MEM_EFF32", 2.0, 1234.0), ("add_bump", "TILED", 1.0, 8.0), ("add_bump", "SORTED", 3.0, 4.0),
        )
        for passes, spent in (("forward", forward), ("forward+backward", both))
    ]  # fmt: skip
    write_rows(tmp_path / "paper.csv", PaperRow, rows)
    return tmp_path / "paper.csv"


def test_a_cell_has_the_time_and_how_many_times_as_fast_as_softmax_it_is(tmp_path, sweep):
    write(tmp_path / "some.csv", sweep)
    text = block(tmp_path / "some.csv", [*WORDS, "passes=forward"])
    heading, _, first, second, last = cells(text)
    assert heading == ["N", "softmax sdpa", "add_bump"]
    assert first == ["512", "1.00", "2.00 (0.50x)"]
    assert second == ["2,048", "16.0", "8.00 (2.00x)"]
    assert last == ["8,192", "256", "32.0 (8.00x)"]
    assert "Some CPU" in text
    assert "2026-01-31" in text


def test_softmax_is_that_of_the_same_rounds(tmp_path, sweep, make_row):
    later = make_row(kernel="elu", n=512, median_ms=2.0, softmax_ms=3.0)
    write(tmp_path / "some.csv", [*sweep, later])
    words = ["softmax=sdpa", "by=auto", "kernels=elu", "passes=forward", "n=512"]
    assert cells(block(tmp_path / "some.csv", words))[2] == ["512", "1.00", "2.00 (1.50x)"]


def test_without_softmax_there_are_times_alone(tmp_path, sweep):
    write(tmp_path / "some.csv", sweep)
    heading, _, first, *_ = cells(block(tmp_path / "some.csv", [*WORDS[1:], "passes=forward"]))
    assert heading == ["N", "add_bump"]
    assert first == ["512", "2.00"]


def test_only_the_lengths_that_were_asked_for_are_shown(tmp_path, sweep):
    write(tmp_path / "some.csv", sweep)
    text = block(tmp_path / "some.csv", [*WORDS, "n=512,8192"])
    assert [line[0] for line in cells(text)[2:]] == ["512", "8,192"]


def test_the_faster_of_two_methods_is_shown_for_each_pass(paper):
    words = ["softmax=MEM_EFF32", "by=TILED+SORTED", "kernels=add_bump"]
    assert cells(block(paper, words))[2] == ["512", "2.00 (1,234)", "1.00 (4.00)"]


def test_methods_apart_have_a_column_each(paper):
    heading, _, line = cells(block(paper, ["softmax=MEM_EFF32", "by=TILED,SORTED", "kernels=add_bump"]))
    assert heading[2:] == ["add_bump TILED", "add_bump SORTED"]
    assert line[2:] == ["1.00 (8.00)", "3.00 (4.00)"]


def test_rows_of_another_type_do_not_count(tmp_path, sweep, make_row):
    write(tmp_path / "some.csv", [*sweep, make_row(dtype="float16", median_ms=0.5)])
    assert cells(block(tmp_path / "some.csv", [*WORDS, "dtype=float32"]))[2][2] == "2.00"


@pytest.mark.parametrize(
    "words",
    [
        ["softmax=sdpa"],
        [*WORDS, "colour=red"],
        ["softmax=cudnn", "by=auto"],
        ["softmax=sdpa", "by=auto", "kernels=elu"],
    ],
    ids=["nothing", "unknown", "no-softmax", "no-kernel"],
)
def test_what_cannot_be_shown_is_an_error(tmp_path, sweep, words):
    write(tmp_path / "some.csv", sweep)
    with pytest.raises(CommandError, match="brief table takes|has no rows"):
        block(tmp_path / "some.csv", words)


def test_a_document_says_in_its_mark_what_is_shown(tmp_path, sweep):
    write(tmp_path / "some.csv", sweep)
    mark = f"<!-- brief:some {' '.join(WORDS)} -->\n"
    text = refresh(f"before\n{mark}old\n<!-- /brief:some -->\nbehind\n", tmp_path)
    assert text == f"before\n{mark}{block(tmp_path / 'some.csv', WORDS)}<!-- /brief:some -->\nbehind\n"
