import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sortattn
from sortattn.bench.machine import version

ROOT = Path(__file__).parents[1]


def test_import_takes_nothing_heavy_or_optional_with_it():
    code = """
import sys
import sortattn, sortattn.cli
heavy = {"numba", "llvmlite", "matplotlib", "rich", "triton", "pykeops", "transformers", "cuda"}
print(*sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""
    # torch alone may take some of them along where they are installed; what it takes is not ours
    torch_alone = subprocess.run(
        [sys.executable, "-c", code.replace("sortattn, sortattn.cli", "torch")],
        capture_output=True,
        text=True,
        check=True,
    )
    with_us = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(with_us.stdout.split()) <= set(torch_alone.stdout.split())
    assert "numba" not in with_us.stdout


def test_all_sources_are_written_for_the_oldest_python_that_is_named():
    metadata = (ROOT / "pyproject.toml").read_text()
    oldest = tuple(int(part) for part in re.search(r'requires-python = ">=(\d+)\.(\d+)"', metadata).groups())
    for path in (*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")):
        ast.parse(path.read_text(), filename=str(path), feature_version=oldest)


def test_the_version_is_the_same_everywhere():
    assert version("sortattn") in (None, sortattn.__version__)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[?([\d.]+)", changelog, re.MULTILINE)[1] == sortattn.__version__


def test_everything_named_in_all_is_there():
    assert [name for name in sortattn.__all__ if not hasattr(sortattn, name)] == []


@pytest.mark.slow
def test_the_wheel_is_pure_typed_and_holds_the_package_alone(tmp_path):
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.iterdir()
    assert wheel.name == f"sortattn-{sortattn.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"sortattn", f"sortattn-{sortattn.__version__}.dist-info"}
    assert "sortattn/py.typed" in names
    assert "sortattn/bench/paper/rtx5090.csv" in names
    # CUDA sources, which are compiled on the user's machine, among them
    files = [path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*") if path.is_file()]
    sources = {path.as_posix() for path in files if "__pycache__" not in path.parts}
    assert any(name.endswith(".cu") for name in sources)
    assert sources == {name for name in names if ".dist-info/" not in name}
    assert not [name for name in names if "__pycache__" in name]
