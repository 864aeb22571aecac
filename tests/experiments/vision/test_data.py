"""The reader of CIFAR-10, given bytes made by hand."""

import pytest
import torch

from sortattn.errors import CommandError
from sortattn.experiments.vision import data


def record(label, red, green, blue):
    """An image whose planes have these first bytes and then zeros."""
    return bytes([label]) + b"".join(bytes(plane) + bytes(1024 - len(plane)) for plane in (red, green, blue))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """CIFAR-10 with two images in a file; the first of each has the class of the file's number."""
    monkeypatch.setattr(data, "IMAGES_PER_FILE", 2)
    inner = tmp_path / "cifar-10-batches-bin"
    inner.mkdir()
    for number, name in enumerate([*data.TRAIN, *data.TEST]):
        (inner / name).write_bytes(record(number, [1, 2], [3], [4]) + record(9, [255] * 33, [], []))
    return inner


def test_bytes_become_images(folder):
    train, test = data.read_cifar10(folder)
    assert (train.pixels.shape, train.pixels.dtype, test.pixels.shape) == ((10, 3, 32, 32), torch.uint8, (2, 3, 32, 32))
    assert train.labels.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert test.labels.tolist() == [5, 9]
    assert train.pixels[0, :, 0, :3].tolist() == [[1, 2, 0], [3, 0, 0], [4, 0, 0]]
    # the 33rd byte begins the second row
    assert train.pixels[1, 0, :3, 0].tolist() == [255, 255, 0]
    assert train.pixels[1, 0, 1, 1] == 0


def test_the_folder_around_will_do(folder):
    assert torch.equal(data.read_cifar10(folder.parent)[1].pixels, data.read_cifar10(folder)[1].pixels)


def test_a_file_of_another_size_is_named(folder):
    path = folder / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CommandError, match="data_batch_3.bin has 6,145 bytes, expected 6,146: 2 images of 3,073 bytes"):
        data.read_cifar10(folder)


def test_a_missing_file_is_named(folder):
    (folder / "test_batch.bin").unlink()
    with pytest.raises(CommandError, match="cannot read .*test_batch.bin .No such file"):
        data.read_cifar10(folder)


def test_a_class_beyond_nine_is_named_with_its_place(folder):
    (folder / "data_batch_2.bin").write_bytes(record(0, [], [], []) + record(10, [], [], []))
    with pytest.raises(CommandError, match="data_batch_2.bin, image 2: expected a class from 0 to 9, got 10"):
        data.read_cifar10(folder)


def test_other_images_have_another_digest():
    images, _ = data.synthetic(4, 1)
    changed = data.Images(images.pixels.clone(), images.labels)
    changed.pixels[3, 2, 31, 31] ^= 1
    assert data.digest(images) == data.digest(data.synthetic(4, 2)[0]) != data.digest(changed)
    assert data.digest(data.Images(images.pixels, images.labels.flip(0))) != data.digest(images)
