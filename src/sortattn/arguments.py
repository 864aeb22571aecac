"""The kinds of numbers that commands take."""

import argparse
from pathlib import Path


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def file_name(text: str) -> str:
    """That of a file, which folders are no part of."""
    if not text or Path(text).name != text:
        raise argparse.ArgumentTypeError(f"expected the name of a file, got {text!r}; --out names the folder")
    return text


def seconds(text: str) -> float:
    """A time, zero or more."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text!r}")
    return number


def rate(text: str) -> float:
    """A learning rate, above zero."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number
