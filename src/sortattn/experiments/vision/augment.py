"""Augmentation of images of bytes `(B, C, H, W)`: shifts and mirror images, and RandAugment.

RandAugment (Cubuk et al., 2020) with two operations of magnitude 9 out of 30, drawn for every image. The fourteen
operations and their ranges are those of torchvision.

Images are those of one batch or of several, one behind the other, so that a GPU has more to do at a time; each batch
has a source of random numbers of its own.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .data import SIDE

PADDING = 4
OPERATIONS_PER_IMAGE = 2
STRENGTH = 9 / 30


Sources = Sequence[np.random.Generator]


def shift_and_mirror(pixels: Tensor, sources: Sources) -> Tensor:
    """A crop of every image with a black border of four pixels, half of them mirrored."""
    count, _, height, width = pixels.shape
    padded = F.pad(pixels, (PADDING,) * 4)
    top, left = (
        _drawn(pixels, sources, lambda source, size: source.integers(2 * PADDING + 1, size=size)) for _ in "tl"
    )
    mirrored = _drawn(pixels, sources, lambda source, size: source.random(size) < 0.5)
    columns = torch.arange(width, device=pixels.device).expand(count, -1)
    columns = (
        torch.where(there(mirrored, pixels.device)[:, None], columns.flip(1), columns)
        + there(left, pixels.device)[:, None]
    )
    rows = torch.arange(height, device=pixels.device) + there(top, pixels.device)[:, None]
    images = torch.arange(count, device=pixels.device)
    # indices on both sides of a slice put the channels last
    return padded[images[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def rand_augment(pixels: Tensor, sources: Sources) -> Tensor:
    """Two operations on every image, one after the other; half of those that have a direction go the other way."""
    for _ in range(OPERATIONS_PER_IMAGE):
        chosen = _drawn(pixels, sources, lambda source, size: source.integers(len(OPERATIONS), size=size))
        sign = _drawn(pixels, sources, lambda source, size: np.where(source.random(size) < 0.5, 1.0, -1.0))
        order = np.argsort(chosen, kind="stable")
        counts = np.bincount(chosen, minlength=len(OPERATIONS)).tolist()
        # the images of an operation one behind the other: two copies to the device serve all of them
        places = there(order, pixels.device).split(counts)
        signs = there(sign[order].astype(np.float32), pixels.device).split(counts)
        result = pixels.clone()
        for operation, where, direction in zip(OPERATIONS.values(), places, signs, strict=True):
            if len(where):
                result[where] = operation(pixels[where], direction)
        pixels = result
    return pixels


def _drawn(pixels: Tensor, sources: Sources, draw: Callable[[np.random.Generator, int], np.ndarray]) -> np.ndarray:
    """A number for every image, those of a batch from its own source."""
    return np.concatenate([draw(source, len(pixels) // len(sources)) for source in sources])


def there(values: np.ndarray, device: torch.device) -> Tensor:
    """The values on the device; from pinned memory, as a copy waits for all that a GPU has to do otherwise."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@lru_cache
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A number for every channel, `(C, 1, 1)`, made once."""
    return torch.tensor(values, device=device)[:, None, None]


# an operation takes images (B, C, H, W) and signs (B,), and returns images
Operation = Callable[[Tensor, Tensor], Tensor]


def _moved(pixels: Tensor, matrices: Tensor) -> Tensor:
    """Every image where `matrices (B, 2, 3)` take its pixels from, in units of pixels around the middle; else black."""
    count, _, height, width = pixels.shape
    rows = torch.arange(height, device=pixels.device) - (height - 1) / 2
    columns = torch.arange(width, device=pixels.device) - (width - 1) / 2
    row, column = torch.meshgrid(rows, columns, indexing="ij")
    here = torch.stack([column, row, torch.ones_like(row)])
    there = (matrices @ here.flatten(1)).unflatten(2, (height, width))
    column = (there[:, 0] + (width - 1) / 2).round().long()
    row = (there[:, 1] + (height - 1) / 2).round().long()
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    images = torch.arange(count, device=pixels.device)[:, None, None]
    found = pixels[images, :, row.clamp(0, height - 1), column.clamp(0, width - 1)].permute(0, 3, 1, 2)
    return found * inside[:, None]


def _affine(*entries: Callable[[Tensor], Tensor]) -> Operation:
    """The six entries of the matrix as functions of the signs."""

    def operation(pixels: Tensor, sign: Tensor) -> Tensor:
        matrix = torch.stack([entry(sign) for entry in entries], -1)
        return _moved(pixels, matrix.unflatten(-1, (2, 3)))

    return operation


def _constant(value: float) -> Callable[[Tensor], Tensor]:
    return lambda sign: torch.full_like(sign, value)


def _signed(value: float) -> Callable[[Tensor], Tensor]:
    return lambda sign: value * sign


def _blend(other: Callable[[Tensor], Tensor]) -> Operation:
    """Between another version of the image and the image, or beyond it."""

    def operation(pixels: Tensor, sign: Tensor) -> Tensor:
        share = 1.0 + 0.9 * STRENGTH * sign[:, None, None, None]
        image = pixels.float()
        return (share * image + (1.0 - share) * other(image)).round().clamp(0, 255).to(torch.uint8)

    return operation


def _grey(image: Tensor) -> Tensor:
    return (image * constant((0.299, 0.587, 0.114), image.device)).sum(1, keepdim=True).floor()


def _smooth(image: Tensor) -> Tensor:
    """The mean with the eight neighbours, the pixel itself five times; the border as it is."""
    kernel = torch.ones(3, 3, device=image.device)
    kernel[1, 1] = 5.0
    channels = image.shape[1]
    inner = F.conv2d(image, (kernel / kernel.sum()).expand(channels, 1, 3, 3), groups=channels).round()
    return torch.cat(
        [image[:, :, :1], torch.cat([image[:, :, 1:-1, :1], inner, image[:, :, 1:-1, -1:]], 3), image[:, :, -1:]], 2
    )


def _posterize(pixels: Tensor, sign: Tensor) -> Tensor:
    dropped = round(STRENGTH * 4)
    return pixels >> dropped << dropped


def _solarize(pixels: Tensor, sign: Tensor) -> Tensor:
    return torch.where(pixels.float() >= 255 * (1 - STRENGTH), 255 - pixels, pixels)


def _auto_contrast(pixels: Tensor, sign: Tensor) -> Tensor:
    image = pixels.float()
    low, high = image.amin((2, 3), keepdim=True), image.amax((2, 3), keepdim=True)
    stretched = (image - low) * (255 / (high - low).clamp(min=1))
    return torch.where(high > low, stretched, image).clamp(0, 255).to(torch.uint8)


def _equalize(pixels: Tensor, sign: Tensor) -> Tensor:
    """Grey values by rank, in every channel: the share of the pixels that are darker."""
    flat = pixels.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.long, device=pixels.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - last) // 255
    below = counts.cumsum(2) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp(0, 255)
    # a channel of one value, or of very few others, stays
    return torch.where(step > 0, table.gather(2, flat), flat).to(torch.uint8).view_as(pixels)


_ONE, _ZERO = _constant(1.0), _constant(0.0)
# whole pixels
_SHIFT = float(int(150 / 331 * SIDE * STRENGTH))
# around the corner, not the middle
_SHEAR, _CORNER = _signed(0.3 * STRENGTH), _signed(0.3 * STRENGTH * SIDE / 2)
_ANGLE = math.radians(30 * STRENGTH)
_COSINE = _constant(math.cos(_ANGLE))

OPERATIONS: dict[str, Operation] = {
    "identity": lambda pixels, sign: pixels,
    "shear_x": _affine(_ONE, _SHEAR, _CORNER, _ZERO, _ONE, _ZERO),
    "shear_y": _affine(_ONE, _ZERO, _ZERO, _SHEAR, _ONE, _CORNER),
    "translate_x": _affine(_ONE, _ZERO, _signed(_SHIFT), _ZERO, _ONE, _ZERO),
    "translate_y": _affine(_ONE, _ZERO, _ZERO, _ZERO, _ONE, _signed(_SHIFT)),
    "rotate": _affine(_COSINE, _signed(-math.sin(_ANGLE)), _ZERO, _signed(math.sin(_ANGLE)), _COSINE, _ZERO),
    "brightness": _blend(torch.zeros_like),
    "colour": _blend(_grey),
    "contrast": _blend(lambda image: _grey(image).mean((1, 2, 3), keepdim=True)),
    "sharpness": _blend(_smooth),
    "posterize": _posterize,
    "solarize": _solarize,
    "auto_contrast": _auto_contrast,
    "equalize": _equalize,
}
