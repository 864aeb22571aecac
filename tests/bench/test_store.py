import os
from dataclasses import replace
from pathlib import Path

import pytest

from sortattn.bench.store import COLUMNS, Store, read, write
from sortattn.errors import CommandError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "bench.csv"


def test_rows_come_back_as_they_were(path, make_row):
    rows = [make_row(), make_row(n=1024, causal=True, speedup=None, memory_bytes=None, machine='a, "b"')]
    write(path, rows)
    assert read(path) == rows


def test_the_file_holds_a_row_as_soon_as_it_is_added(path, make_row, settings, machine):
    store = Store(path, settings, machine)
    for n in (512, 1024):
        store.add(make_row(n=n))
        assert [row.n for row in read(path)] == [row.n for row in store.rows]
    assert [row.n for row in store.rows] == [512, 1024]


def test_a_second_store_finds_the_rows_of_the_first(path, make_row, settings, machine):
    Store(path, settings, machine).add(make_row(n=512))
    second = Store(path, settings, machine)
    assert make_row(n=512).case in second
    assert make_row(n=1024).case not in second
    assert make_row(n=512, passes="forward+backward").case not in second


def test_fresh_starts_from_nothing(path, make_row, settings, machine):
    write(path, [make_row(n=512)])
    store = Store(path, settings, machine, fresh=True)
    store.add(make_row(n=1024))
    assert [row.n for row in read(path)] == [1024]


@pytest.mark.parametrize(("name", "value"), [("threads", 7), ("heads", 3), ("causal", True)])
def test_a_file_with_other_settings_is_refused(path, make_row, settings, machine, name, value):
    write(path, [make_row()])
    with pytest.raises(
        CommandError, match=rf"bench.csv was measured with {name}=.* this run has {name}={value}.*--name"
    ):
        Store(path, replace(settings, **{name: value}), machine)


@pytest.mark.parametrize("name", ["cpu", "torch", "sortattn"])
def test_a_file_from_another_machine_is_refused(path, make_row, settings, machine, name):
    write(path, [make_row()])
    with pytest.raises(CommandError, match=f"{name}='something else'"):
        Store(path, settings, replace(machine, **{name: "something else"}))


def test_a_file_of_another_kind_is_refused_and_left_alone(path, settings, machine):
    path.parent.mkdir()
    path.write_text("a,b\n1,2\n")
    with pytest.raises(CommandError, match=r"not a results file.*got a, b"):
        Store(path, settings, machine)
    assert path.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00"], ids=["empty", "binary"])
def test_a_file_that_is_no_table_is_refused(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(CommandError, match=r"bench\.csv is not a"):
        read(path)


def test_a_damaged_line_is_named(path, make_row):
    write(path, [make_row(n=512), make_row(n=1024)])
    text = path.read_text()
    path.write_text(text[: text.rindex(",")] + "\n")
    with pytest.raises(
        CommandError, match=rf"line 3, is damaged: expected {len(COLUMNS)} fields, got {len(COLUMNS) - 1}"
    ):
        read(path)
    path.write_text(text.replace("1024", "many"))
    with pytest.raises(CommandError, match=r"line 3, is damaged: .*'many'"):
        read(path)
    path.write_text(text.replace("False", "perhaps", 1))
    with pytest.raises(CommandError, match=r"line 2, is damaged: expected True or False, got 'perhaps'"):
        read(path)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["disk-full", "interrupt"])
def test_a_write_that_fails_half_way_leaves_the_old_file(path, make_row, settings, machine, monkeypatch, error):
    store = Store(path, settings, machine)
    store.add(make_row(n=512))
    honest = Path.write_text

    def half(self, text, *args):
        honest(self, text[: len(text) // 2])
        raise error

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(type(error)):
        store.add(make_row(n=1024))
    monkeypatch.undo()
    assert [row.n for row in read(path)] == [512]
    assert [row.n for row in store.rows] == [512]
    assert os.listdir(path.parent) == ["bench.csv"]


def test_the_file_changes_in_one_step(path, make_row, monkeypatch):
    write(path, [make_row(n=512)])
    seen = []
    honest = os.replace

    def replace_and_look(draft, target):
        # the new rows are complete beside the old ones
        seen.append(([row.n for row in read(Path(draft))], [row.n for row in read(target)]))
        honest(draft, target)

    monkeypatch.setattr(os, "replace", replace_and_look)
    write(path, [make_row(n=512), make_row(n=1024)])
    assert seen == [([512, 1024], [512])]
    assert [row.n for row in read(path)] == [512, 1024]
