import gzip

import pytest

from sortattn.errors import CommandError
from sortattn.experiments.text.data import Report, read_cranfield, read_passages, read_qmsum, read_sts
from sortattn.experiments.text.evaluate import first

from .conftest import TEXTS


def test_pairs(sts):
    report = Report()
    pairs = read_sts(sts, report)
    assert (pairs.name, pairs.first, pairs.scores) == ("pairs", TEXTS[:-1], [0, 1, 2, 3, 4])
    assert report.problems == []


def test_broken_lines_are_named_and_the_rest_is_kept(sts):
    lines = sts.read_text().splitlines()
    lines[2:2] = ["only,two", "a,b,high", "a,b,nan"]
    sts.write_bytes("\n".join(lines).encode() + b"\n\xff,b,1\n")
    report = Report()
    assert read_sts(sts, report).first == TEXTS[:-1]
    assert report.problems == [
        f"{sts}, line 3: expected 3 fields, got 2; left out",
        f"{sts}, line 4: expected a score, got 'high'; left out",
        f"{sts}, line 5: expected a score, got 'nan'; left out",
        f"{sts}, line 10: expected UTF-8, got byte 0xff; left out",
    ]


def test_a_line_does_not_take_others_with_it(sts):
    lines = [line.encode() for line in sts.read_text().splitlines()]
    long = b"a" * 200_000
    lines[2:2] = [b"\xff,b,1", b'"never closed,b,1', long + b",b,1", b"only,two"]
    sts.write_bytes(b"\n".join(lines) + b"\n")
    report = Report()
    assert read_sts(sts, report).first == TEXTS[:-1]
    numbers = [problem.split(": ")[0].removeprefix(f"{sts}, ") for problem in report.problems]
    assert numbers == ["line 3", "line 4", "line 5", "line 6"]
    assert "got '\"never closed,b,1' (unexpected end of data); left out" in report.problems[1]


def test_half_a_character_is_a_broken_line(qmsum):
    rows = ['{"id": "x", "text": "a \\ud83d cat", "queries": []}', '{"id": "y", "text": "a", "queries": ["\\uDE00"]}']
    whole = '{"id": "z", "text": "a \\ud83d\\ude00 cat", "queries": ["a"]}'
    qmsum.write_text(qmsum.read_text() + "\n".join([*rows, whole]) + "\n")
    report = Report()
    task = read_qmsum(qmsum, report)
    assert (len(task.documents), task.documents["z"]) == (7, "a \U0001f600 cat")
    half = "expected text, got half of a pair of surrogates; left out"
    assert report.problems == [f"{qmsum}, line 7: {half}", f"{qmsum}, line 8: {half}"]


def test_retrieval(cranfield):
    (cranfield / "qrels.txt").open("a").write("a 0 9 1\nz 0 1 1\nnonsense\n")
    (cranfield / "corpus.jsonl").open("a").write('{"id": 7, "text": "a"}\n{"id": \n')
    report = Report()
    task = read_cranfield(cranfield, report)
    assert list(task.documents.values()) == TEXTS
    # a gain of zero is none, and a query without any is none
    assert task.gains == {"a": {"0": 1.0, "1": 2.0}, "b": {"3": 1.0}}
    assert list(task.queries) == ["a", "b"]
    assert [problem.split(", ")[1].split(":")[0] for problem in report.problems] == [
        "line 7", "line 8", "line 5", "line 6", "line 7",
    ]  # fmt: skip


def test_meetings_are_asked_for_by_their_specific_queries(qmsum):
    text = qmsum.read_text() + '{"id": "x", "text": "t", "queries": [1]}\n'
    packed = qmsum.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(text.encode()))
    report = Report()
    task = read_qmsum(packed, report)
    assert (task.name, len(task.documents), len(task.queries)) == ("qmsum-val", 6, 12)
    assert task.gains["3-1"] == {"3": 1.0}
    assert task.queries["3-1"] == TEXTS[3]
    assert report.problems == [f'{packed}, line 7: expected "queries", a list of texts; left out']
    assert len(first(task, 2).documents) == 2
    assert list(first(task, 2).queries) == ["0-0", "0-1"]


def test_passages(sts, qmsum, tmp_path):
    assert len(read_passages(sts, Report())) == 10
    assert len(read_passages(qmsum, Report())) == 6
    plain = tmp_path / "plain"
    plain.write_text("== heading ==\n" + "word " * 30 + "\n")
    assert read_passages(plain, Report()) == ["word " * 30]


def test_lines_are_joined_to_passages_of_one_page(tmp_path):
    line = " ".join(["word"] * 25)
    plain = tmp_path / "wiki"
    plain.write_text("\n".join([line, "short", line, line, "  </page>", line, line, line, "</page>", line]) + "\n")
    found = read_passages(plain, Report(), words=50)
    # a line is left over on each page
    assert [text.count("\n") + 1 for text in found] == [2, 2]
    assert len(read_passages(plain, Report())) == 7


def test_files_that_cannot_be_read_are_named(tmp_path, sts):
    with pytest.raises(CommandError, match="cannot read .*nowhere.csv: .*No such file"):
        read_sts(tmp_path / "nowhere.csv", Report())
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"id": "1"}\n' * 1000)[:-20])
    with pytest.raises(CommandError, match="cannot read .*cut.jsonl.gz"):
        read_qmsum(cut, Report())
    packed = bytearray(gzip.compress(bytes(range(256)) * 100))
    packed[40:60] = b"\xff" * 20
    cut.write_bytes(packed)
    with pytest.raises(CommandError, match="cannot read .*cut.jsonl.gz"):
        read_qmsum(cut, Report())
    sts.write_text("a,b,c\n")
    with pytest.raises(CommandError, match="must begin with sentence1,sentence2,score, got 'a,b,c'"):
        read_sts(sts, Report())
    sts.write_text("sentence1,sentence2,score\na,b,x\n")
    with pytest.raises(CommandError, match="holds 0 pairs that can be read, expected at least 3"):
        read_sts(sts, Report())
