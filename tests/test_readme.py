"""What the README shows is run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
# `sortattn demo` is `make demo`, which CI runs beside the tests
SHOWN = set(re.findall(r"^sortattn .*$", TEXT, re.MULTILINE))
COMMANDS = sorted(SHOWN | {"sortattn kernels", "sortattn doctor --costs"})


@pytest.mark.parametrize("example", EXAMPLES)
def test_python_examples_run(example):
    space = {}
    exec(example, space)
    assert space["y"].shape == space["query"].shape


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, tmp_path):
    arguments = [sys.executable, "-m", "sortattn", *shlex.split(command)[1:]]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_command_in_the_table_exists():
    from sortattn.cli import main

    for name in re.findall(r"^\| `sortattn (\w+)` \|", TEXT, re.MULTILINE):
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0


def test_files_it_names_are_there():
    names = re.findall(r"`((?:docs|benchmarks)/[\w./-]+)`|\]\(([\w./-]+)\)", TEXT)
    assert ("docs/performance-gpu.md", "") in names
    for name in names:
        assert (ROOT / (name[0] or name[1])).exists(), name
