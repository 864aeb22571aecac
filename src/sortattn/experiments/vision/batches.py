"""Batches to learn from: a function of the seed and their number alone, so that an interrupt changes nothing."""

import random

import numpy as np
from torch import Tensor

from ...errors import CommandError
from .augment import constant, rand_augment, shift_and_mirror, there
from .data import Images
from .mix import mix

# of CIFAR-10, by channel
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


# batches that are augmented at a time
BLOCK = 16


class Batches:
    """The batch with a number, of an epoch in which every image comes at most once.

    To learn from labels (`labelled`) images are augmented by RandAugment, MixUp and CutMix; to learn from a teacher
    they are only shifted and mirrored.
    """

    def __init__(self, images: Images, *, size: int, seed: int, labelled: bool):
        if size > len(images):
            raise CommandError(f"expected a --batch of at most {len(images):,} images, got {size:,}")
        self.images, self.size, self.seed, self.labelled = images, size, seed, labelled
        self._order: tuple[int, list[int]] | None = None
        self._block: tuple[int, list[dict[str, Tensor]]] | None = None

    @property
    def per_epoch(self) -> int:
        """Batches in an epoch; what is left over of the images waits for the next one."""
        return len(self.images) // self.size

    def __call__(self, number: int) -> dict[str, Tensor]:
        block, place = divmod(number, BLOCK)
        if self._block is None or self._block[0] != block:
            self._block = block, self._make(range(block * BLOCK, (block + 1) * BLOCK))
        return self._block[1][place]

    def _make(self, numbers: range) -> list[dict[str, Tensor]]:
        """Some batches at once."""
        places = there(np.array([self.places(number) for number in numbers]), self.images.pixels.device)
        sources = [np.random.default_rng([self.seed % (1 << 32), number]) for number in numbers]
        pixels = shift_and_mirror(self.images.pixels[places.flatten()], sources)
        if not self.labelled:
            return [{"pixel_values": images} for images in normalised(pixels).split(self.size)]
        images = normalised(rand_augment(pixels, sources)).split(self.size)
        mixed = (mix(*batch) for batch in zip(images, self.images.labels[places], sources, strict=True))
        return [{"pixel_values": pixels, "labels": targets} for pixels, targets in mixed]

    def places(self, number: int) -> list[int]:
        """Which images a batch holds."""
        epoch, place = divmod(number, self.per_epoch)
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self.images)))
            random.Random(f"{self.seed} epoch {epoch}").shuffle(order)
            self._order = epoch, order
        return self._order[1][place * self.size : (place + 1) * self.size]


def normalised(pixels: Tensor) -> Tensor:
    """Bytes to numbers with mean zero and variance one over CIFAR-10."""
    mean, deviation = (constant(row, pixels.device) for row in (MEAN, DEVIATION))
    return (pixels.float() / 255 - mean) / deviation
