import os
import subprocess
import sys

import pytest

import sortattn
from sortattn import cli
from sortattn.cli import main
from sortattn.errors import CommandError
from sortattn.overview import kernel_table


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.strip() == f"sortattn {sortattn.__version__}"


@pytest.mark.parametrize("style", ["text", "markdown", "csv"])
def test_kernels_prints_the_table(capsys, style):
    assert main(["kernels", "--format", style]) == 0
    assert capsys.readouterr().out == kernel_table(style) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dance"], "invalid choice: 'dance'"),
        (["kernels", "--format", "html"], "invalid choice: 'html'"),
        (["bench", "-n", "0"], "expected a whole number from 1, got '0'"),
        (["bench", "-n", "many"], "expected a whole number from 1, got 'many'"),
        (["bench", "--rounds", "-3"], "argument --rounds"),
        (["bench", "--budget", "nan"], "expected a number of seconds, got 'nan'"),
        (["bench", "--budget", "soon"], "expected a number of seconds, got 'soon'"),
        (["bench", "--name", "../x"], "expected the name of a file, got '../x'; --out names the folder"),
        (["recall", "--name", "/tmp/x"], "expected the name of a file"),
        (["report", "--name", ""], "expected the name of a file"),
        (["mqar", "--rate", "-1"], "expected a number above 0, got '-1'"),
        (["mqar", "--rate", "nan"], "expected a number above 0, got 'nan'"),
    ],
)
def test_wrong_usage_ends_with_2_and_a_message(capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_command_all_are_listed(capsys):
    assert main([]) == 2
    assert "see what works on this machine" in capsys.readouterr().err


def fail_with(monkeypatch, error):
    def work(options):
        raise error

    monkeypatch.setattr(cli, "_kernels", work)
    return main(["kernels"])


def test_a_command_error_is_a_message_and_2(monkeypatch, capsys):
    assert fail_with(monkeypatch, CommandError("expected this, got that")) == 2
    assert capsys.readouterr().err == "sortattn kernels: expected this, got that\n"


@pytest.mark.parametrize("command", ["bench", "bench --paper", "recall", "mqar", "report"])
def test_a_place_that_cannot_be_written_is_refused_before_any_work(tmp_path, capsys, command, threads):
    threads(1)
    place = tmp_path / "notes"
    place.write_text("not a folder")
    assert main([*command.split(), "--out", str(place / "deeper")]) == 2
    message = capsys.readouterr().err
    assert "cannot be written: expected a folder with leave to write" in message
    assert str(place) in message
    assert place.read_text() == "not a folder"


def test_an_interrupt_is_a_message_and_130(monkeypatch, capsys):
    assert fail_with(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err.strip() == "Interrupted."


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        fail_with(monkeypatch, ZeroDivisionError())


def test_options_given_replace_the_defaults(monkeypatch):
    seen = []
    monkeypatch.setattr("sortattn.bench.command.bench", lambda options: seen.append(options) or 0)
    main(["bench"])
    main(["bench", "--backend", "auto", "--backend", "tiled", "--kernel", "elu", "-n", "64", "128"])
    default, given = seen
    assert (default.kernel, default.backend) == (["add_riesz", "add_laplace", "add_bump"], ["auto"])
    assert (default.dtype, default.sizes[0], default.sizes[-1]) == (["float32"], 512, 16384)
    assert (given.kernel, given.backend, given.sizes) == (["elu"], ["auto", "tiled"], [64, 128])


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such pipes")
def test_a_reader_that_goes_away_is_no_error():
    command = [sys.executable, "-m", "sortattn", "kernels"]
    # with a buffer the pipe is written to, and found closed, only at the end
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    assert errors == ""
