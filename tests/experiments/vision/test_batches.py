"""Augmentation, compared with what hands find on small images."""

from collections import Counter

import numpy as np
import pytest
import torch

from sortattn.errors import CommandError
from sortattn.experiments.vision import batches, mix
from sortattn.experiments.vision.augment import OPERATIONS, rand_augment, shift_and_mirror
from sortattn.experiments.vision.batches import Batches
from sortattn.experiments.vision.data import synthetic

PLUS, MINUS = torch.ones(1), -torch.ones(1)


class Fixed:
    """Draws these numbers and no others."""

    def __init__(self, integers=(), shares=(), beta=None):
        self._integers, self._shares, self._beta = iter(integers), iter(shares), beta

    def integers(self, end, size=None):
        return _next(self._integers, size)

    def random(self, size=None):
        return _next(self._shares, size)

    def beta(self, *alphas):
        return self._beta


def _next(values, size):
    return next(values) if size is None else np.array([next(values) for _ in range(size)])


def dot(row, column, value=200):
    """A black image with one pixel."""
    image = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    image[0, :, row, column] = value
    return image


def grey(*values):
    """An image of one channel's bytes, for all three."""
    return torch.tensor(values, dtype=torch.uint8).expand(1, 3, -1, -1)


def place(image):
    return image[0, 0].nonzero().tolist()


def test_a_crop_moves_and_a_mirror_turns():
    images = torch.cat([dot(10, 3)] * 4)
    # tops, lefts, mirrored or not: 4 is the middle of the border, no move
    moved = shift_and_mirror(images, [Fixed([4, 0, 8, 4, 4, 4, 4, 8], [0.9, 0.9, 0.9, 0.1])])
    assert moved.shape == images.shape
    assert [place(image[None]) for image in moved] == [[[10, 3]], [[14, 3]], [[6, 3]], []]
    # to column 5, which mirrored is 26
    again = shift_and_mirror(images[:1], [Fixed([4, 2], [0.1])])
    assert place(again) == [[10, 26]]


@pytest.mark.parametrize(
    ("name", "sign", "where"),
    [
        ("identity", PLUS, [[20, 20]]),
        ("translate_x", PLUS, [[20, 16]]),
        ("translate_x", MINUS, [[20, 24]]),
        ("translate_y", PLUS, [[16, 20]]),
        ("translate_y", MINUS, [[24, 20]]),
        # 0.09 x 20.5 is two pixels
        ("shear_x", PLUS, [[20, 18]]),
        ("shear_x", MINUS, [[20, 22]]),
        ("shear_y", PLUS, [[18, 20]]),
    ],
)
def test_where_a_pixel_goes(name, sign, where):
    assert place(OPERATIONS[name](dot(20, 20), sign)) == where


def test_nine_degrees_turn_the_border_by_two_pixels():
    line = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    line[..., 15:17, :] = 255
    turned = {sign.item(): OPERATIONS["rotate"](line, sign)[0, 0] for sign in (PLUS, MINUS)}
    # tan(9 degrees) x 15.5 = 2.45
    middle = {sign: image[:, 0].nonzero().float().mean().item() for sign, image in turned.items()}
    assert sorted(middle.values()) == pytest.approx([13.0, 18.0], abs=0.6)
    assert torch.equal(turned[1.0], turned[-1.0].flip(1))


@pytest.mark.parametrize(
    ("name", "sign", "before", "after"),
    [
        ("brightness", PLUS, [[100, 250]], [[127, 255]]),
        ("brightness", MINUS, [[100, 200]], [[73, 146]]),
        # the mean is 100
        ("contrast", PLUS, [[50, 150]], [[36, 164]]),
        ("contrast", MINUS, [[50, 150]], [[64, 136]]),
        # the last bit goes
        ("posterize", PLUS, [[0, 1, 2, 255]], [[0, 0, 2, 254]]),
        # inverted from 178.5 on
        ("solarize", PLUS, [[178, 179, 255]], [[178, 76, 0]]),
        ("auto_contrast", PLUS, [[10, 20, 60]], [[0, 51, 255]]),
        ("auto_contrast", PLUS, [[7, 7]], [[7, 7]]),
        ("equalize", PLUS, [[7, 7]], [[7, 7]]),
        ("sharpness", MINUS, [[0, 0, 0], [0, 130, 0], [0, 0, 0]], [[0, 0, 0], [0, 108, 0], [0, 0, 0]]),
    ],
)
def test_what_becomes_of_values(name, sign, before, after):
    assert torch.equal(OPERATIONS[name](grey(*before), sign), grey(*after))


def test_colour_goes_towards_the_grey_of_the_eye():
    red = torch.tensor([100, 0, 0], dtype=torch.uint8).view(1, 3, 1, 1)
    # grey is 29; 0.73 of the image and 0.27 of that
    assert OPERATIONS["colour"](red, MINUS).flatten().tolist() == [81, 8, 8]


def test_equalizing_spreads_values_by_rank():
    # 512 pixels each of 10 and 20: the brighter ones have a half below them
    image = grey(*[[10] * 16 + [20] * 16] * 32)
    assert sorted(OPERATIONS["equalize"](image, PLUS).unique().tolist()) == [0, 255]
    ramp = torch.arange(256, dtype=torch.uint8).repeat(4).view(1, 1, 32, 32)
    assert (OPERATIONS["equalize"](ramp, PLUS).int() - ramp.int()).abs().max() <= 1


def test_rand_augment_changes_each_image_alone():
    images, _ = synthetic(28, 1)
    found = rand_augment(images.pixels, [np.random.default_rng(3)])
    assert (found.shape, found.dtype) == (images.pixels.shape, torch.uint8)
    assert torch.equal(found, rand_augment(images.pixels, [np.random.default_rng(3)]))
    changed = [not torch.equal(one, other) for one, other in zip(found, images.pixels, strict=True)]
    assert 0.8 < sum(changed) / len(changed) <= 1.0


def test_mixup_takes_shares_of_neighbours():
    images = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 3, 4, 4)
    mixed, targets = mix.mix(images, torch.tensor([2, 5]), Fixed(shares=[0.1], beta=0.75))
    assert mixed[:, 0, 0, 0].tolist() == [0.25, 0.75]
    assert targets[0].tolist() == [0, 0, 0.75, 0, 0, 0.25, 0, 0, 0, 0]
    assert targets[1].tolist() == [0, 0, 0.25, 0, 0, 0.75, 0, 0, 0, 0]


@pytest.mark.parametrize(("corner", "kept"), [((4, 4), 0.75), ((0, 0), 0.9375)], ids=["inside", "at the edge"])
def test_cutmix_counts_the_area_that_is_left(corner, kept):
    images = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, 3, 8, 8)
    mixed, targets = mix.mix(images, torch.tensor([2, 5]), Fixed(corner, [0.9], 0.75))
    assert mixed.mean((1, 2, 3)).tolist() == pytest.approx([1 - kept, kept])
    assert targets[0, [2, 5]].tolist() == pytest.approx([kept, 1 - kept])
    assert mixed[0, 0, 0, 0] == (corner == (0, 0))


def test_an_epoch_has_every_image_once_and_the_next_another_order():
    images, _ = synthetic(20, 1)
    first, second = (
        [Batches(images, size=6, seed=0, labelled=False).places(n) for n in range(k, k + 3)] for k in (0, 3)
    )
    for epoch in (first, second):
        assert max(Counter(sum(epoch, [])).values()) == 1
        assert [len(places) for places in epoch] == [6, 6, 6]
    assert first != second


def test_a_batch_is_a_function_of_its_number_and_the_seed():
    images, _ = synthetic(20, 1)
    draw = Batches(images, size=6, seed=0, labelled=True)
    fifth, other = draw(5), draw(6)
    assert fifth["labels"].sum(1).tolist() == pytest.approx([1.0] * 6)
    for name, tensor in draw(5).items():
        assert torch.equal(tensor, fifth[name])
        assert not torch.equal(tensor, other[name])
        assert not torch.equal(tensor, Batches(images, size=6, seed=1, labelled=True)(5)[name])
    assert list(Batches(images, size=6, seed=0, labelled=False)(5)) == ["pixel_values"]


@pytest.mark.parametrize("labelled", [True, False])
def test_batches_made_at_a_time_are_those_made_alone(labelled, monkeypatch):
    images, _ = synthetic(20, 1)
    together = Batches(images, size=6, seed=0, labelled=labelled)
    found = [together(number) for number in (3, 18, 19)]
    monkeypatch.setattr(batches, "BLOCK", 1)
    alone = Batches(images, size=6, seed=0, labelled=labelled)
    for batch, number in zip(found, (3, 18, 19), strict=True):
        assert all(torch.equal(batch[name], part) for name, part in alone(number).items())


def test_more_images_than_there_are_is_a_message():
    with pytest.raises(CommandError, match="expected a --batch of at most 20 images, got 21"):
        Batches(synthetic(20, 1)[0], size=21, seed=0, labelled=True)


def test_pixels_are_normalised_by_channel():
    found = batches.normalised(torch.tensor([0, 255, 128], dtype=torch.uint8).view(1, 3, 1, 1)).flatten()
    expected = [-0.4914 / 0.2470, (1 - 0.4822) / 0.2435, (128 / 255 - 0.4465) / 0.2616]
    assert found.tolist() == pytest.approx(expected)
