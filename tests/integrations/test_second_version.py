"""The tests of this folder once more, with the oldest transformers that is supported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

# without their dependencies, torch among them, which are here already but for the client of the hub
OLDEST = (
    "transformers==4.57.6", "huggingface-hub==0.36.0", "tokenizers==0.22.1",
    "requests", "urllib3", "charset-normalizer", "idna", "certifi",
)  # fmt: skip


@pytest.mark.slow
def test_everything_holds_for_transformers_4(tmp_path):
    packages = tmp_path / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(packages)]
    installed = subprocess.run([*pip, *OLDEST], capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    here = Path(__file__).parent
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / "test_transformers.py")]
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    shown = "import transformers; print(transformers.__version__)"
    version = subprocess.run([sys.executable, "-c", shown], env=environment, capture_output=True, text=True)
    assert version.stdout.strip() == "4.57.6"
    done = subprocess.run(tests, cwd=here.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    # the three models that have the interface there, not a folder of skipped tests
    assert int(done.stdout.split(" passed")[0].split()[-1]) >= 50
