"""A Chromium for the tests of pages: the machine's own, or one that `python tests/browser.py` has put into sys.prefix.

That one comes from the package `@sparticuz/chromium` of npm, pinned and checked, with the libraries it needs, so that
nothing has to be installed on the machine. Without npm those tests are skipped.
"""

import base64
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@sparticuz/chromium@147.0.0"
SHA512 = "4ZKeAQQa8up2mt675qSitztLdbQrlf8BKdC5naeap+5Mv1OV1OlJdPoU+EJC/p5sQUJUQmN4r+q5+EhaaOUHpQ=="
FOLDER = Path(sys.prefix) / "browser" / PACKAGE.rpartition("@")[2]
# what npm's package holds, all compressed by Brotli: the program, its libraries, a software renderer and a typeface
PROGRAM, ARCHIVES = "chromium.br", ("al2023.tar.br", "swiftshader.tar.br", "fonts.tar.br")

FONTS = f"""<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{FOLDER / "fonts"}</dir><cachedir>{FOLDER / "cache"}</cachedir></fontconfig>
"""


def find() -> tuple[str, dict[str, str]] | None:
    """The program and the environment it needs; None if there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path, {}
    if (FOLDER / "chromium").exists():
        return str(FOLDER / "chromium"), {"LD_LIBRARY_PATH": str(FOLDER / "lib"), "FONTCONFIG_PATH": str(FOLDER)}
    return None


def fetch() -> None:
    """Put the pinned Chromium into its folder, whole or not at all."""
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as place:
        archive = Path(place) / _packed(place)
        content = archive.read_bytes()
        found = base64.b64encode(hashlib.sha512(content).digest()).decode()
        if found != SHA512:
            raise SystemExit(f"expected {PACKAGE} with SHA-512 {SHA512}, got {found}; nothing was installed")
        made = Path(place) / "made"
        made.mkdir()
        with tarfile.open(fileobj=io.BytesIO(content)) as files:
            for name in (PROGRAM, *ARCHIVES):
                plain = _decompress(files.extractfile(f"package/bin/{name}").read())
                if name == PROGRAM:
                    (made / "chromium").write_bytes(plain)
                    (made / "chromium").chmod(0o755)
                else:
                    with tarfile.open(fileobj=io.BytesIO(plain)) as parts:
                        parts.extractall(made, filter="data")
        # the package's own file names folders of the place it is made for; without a typeface no text has a width
        (made / "fonts.conf").write_text(FONTS, encoding="utf-8")
        os.replace(made, FOLDER)


def _packed(place: str) -> str:
    result = subprocess.run(
        ["npm", "pack", "--silent", PACKAGE], cwd=place, check=True, capture_output=True, text=True, timeout=300
    )
    return result.stdout.split()[-1]


def _decompress(content: bytes) -> bytes:
    # npm comes with Node, which knows Brotli
    script = "process.stdout.write(require('zlib').brotliDecompressSync(require('fs').readFileSync(0)))"
    return subprocess.run(["node", "-e", script], input=content, check=True, capture_output=True, timeout=300).stdout


if __name__ == "__main__":
    if find():
        print("There is a browser:", find()[0])
    elif shutil.which("npm") is None or not sys.platform.startswith("linux"):
        print("No Chromium on PATH and no npm on Linux to get one with: tests of pages in a browser will be skipped.")
    else:
        try:
            fetch()
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{PACKAGE} could not be fetched ({error}): the tests of pages in a browser will be skipped.")
