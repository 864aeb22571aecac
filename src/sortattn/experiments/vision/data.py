"""CIFAR-10 in its binary version, read from a local folder; and a few coloured images in its place for `--smoke`."""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import CommandError

SIDE, CHANNELS, CLASSES = 32, 3, 10
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = ("test_batch.bin",)
IMAGES_PER_FILE = 10_000
# a byte for the class, then the red, green and blue planes, row by row
RECORD = 1 + CHANNELS * SIDE * SIDE
FOLDER = "cifar-10-batches-bin"


@dataclass(frozen=True)
class Images:
    """`pixels (B, 3, 32, 32)` of bytes with their classes `labels (B,)`."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: str) -> "Images":
        """The same on a device."""
        return Images(self.pixels.to(device), self.labels.to(device))


def read_cifar10(folder: Path) -> tuple[Images, Images]:
    """The images to learn from and those to test on; the folder may be the one around `cifar-10-batches-bin` too."""
    if not folder.is_dir():
        raise CommandError(f"no folder {folder}; expected one with {TRAIN[0]} ... {TRAIN[-1]} and {TEST[0]}")
    inner = folder / FOLDER
    folder = inner if inner.is_dir() else folder
    train, test = ([read_file(folder / name) for name in names] for names in (TRAIN, TEST))
    return _joined(train), _joined(test)


def read_file(path: Path) -> Images:
    """The images of one file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CommandError(
            f"cannot read {path} ({error.strerror}); expected the binary version of CIFAR-10, with {TRAIN[0]} ... "
            f"{TRAIN[-1]} and {TEST[0]}"
        ) from error
    if len(data) != IMAGES_PER_FILE * RECORD:
        raise CommandError(
            f"{path} has {len(data):,} bytes, expected {IMAGES_PER_FILE * RECORD:,}: {IMAGES_PER_FILE:,} images of "
            f"{RECORD:,} bytes; fetch it again"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, RECORD)
    labels = torch.from_numpy(records[:, 0].astype(np.int64))
    wrong = (labels >= CLASSES).nonzero()
    if len(wrong):
        place = wrong[0].item()
        raise CommandError(
            f"{path}, image {place + 1:,}: expected a class from 0 to {CLASSES - 1}, got {labels[place].item()}; this "
            "is not CIFAR-10, or damaged"
        )
    return Images(torch.from_numpy(records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE).copy()), labels)


def synthetic(train: int, test: int) -> tuple[Images, Images]:
    """Images that a model can learn in a few steps: noise around a colour for each class."""
    source = torch.Generator().manual_seed(0)
    colours = torch.randint(0, 256, (CLASSES, CHANNELS, 1, 1), generator=source)

    def draw(count: int) -> Images:
        labels = torch.arange(count) % CLASSES
        noise = torch.randint(-40, 41, (count, CHANNELS, SIDE, SIDE), generator=source)
        return Images((colours[labels] + noise).clamp(0, 255).to(torch.uint8), labels)

    return draw(train), draw(test)


def digest(images: Images) -> str:
    """Their number and a sum over them: other images are another run."""
    total = zlib.crc32(images.labels.numpy().tobytes(), zlib.crc32(images.pixels.numpy()))
    return f"{len(images):,} images, {total:08x}"


def _joined(parts: list[Images]) -> Images:
    return Images(torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts]))
