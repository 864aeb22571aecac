import csv

import pytest

from sortattn.table import render

COLUMNS, ROWS = ["name", "ms"], [["a", "1.5"], ["bcdef", "12.25"]]


def test_text_is_aligned_left_then_right():
    assert render(COLUMNS, ROWS).splitlines() == ["name      ms", "-----  -----", "a        1.5", "bcdef  12.25"]


def test_markdown_escapes_bars():
    table = render(COLUMNS, [["|x|", "1"]], "markdown").splitlines()
    assert table == ["| name  | ms |", "|-------|---:|", r"| \|x\| |  1 |"]


def test_csv_comes_back_as_it_was():
    rows = [['a, "b"', "1,024"], ["", "|x|"]]
    assert list(csv.reader(render(COLUMNS, rows, "csv").splitlines())) == [COLUMNS, *rows]


def test_a_table_without_rows_has_its_heading():
    assert render(COLUMNS, []).splitlines() == ["name  ms", "----  --"]


def test_an_unknown_style_is_refused():
    with pytest.raises(ValueError, match="unknown table style 'html', expected one of text, markdown, csv"):
        render(COLUMNS, ROWS, "html")
