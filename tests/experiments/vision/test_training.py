"""Accuracy, the loss of a run from scratch, and the paper's table."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sortattn.distill.training import _optimizer
from sortattn.experiments.vision import model, results
from sortattn.experiments.vision.batches import normalised
from sortattn.experiments.vision.data import Images, synthetic
from sortattn.experiments.vision.training import SCRATCH, Scratch, accuracy


class Reader(nn.Module):
    """Answers the class that stands in the first pixel of an image."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, pixel_values):
        classes = (pixel_values[:, 0, 0, 0] * 0.2470 + 0.4914) * 255
        return SimpleNamespace(logits=-(classes[:, None] - torch.arange(10)).abs())


def test_accuracy_counts_right_answers_over_all_batches():
    labels = torch.arange(1030) % 10
    pixels = torch.zeros(1030, 3, 32, 32, dtype=torch.uint8)
    pixels[:, 0, 0, 0] = labels
    # one wrong answer in each of the three batches of at most 512
    pixels[[0, 600, 1029], 0, 0, 0] += 1
    pixels[1029, 0, 0, 0] = 0
    assert accuracy(Reader(), Images(pixels, labels)) == pytest.approx(100 * 1027 / 1030)


def test_the_loss_is_cross_entropy_with_smoothed_shares():
    logits = torch.tensor([[2.0, 0.0, -1.0] + [0.0] * 7])
    shares = torch.tensor([[0.75, 0.25] + [0.0] * 8])
    (loss,) = Scratch(lambda pixel_values: SimpleNamespace(logits=logits)).losses(
        {"pixel_values": None, "labels": shares}, None
    )
    expected = -((0.9 * shares + 0.01) * logits.double().log_softmax(-1)).sum()
    assert loss.item() == pytest.approx(expected.item())


def test_the_schedule_is_the_papers():
    stage = replace(SCRATCH, steps=1000)
    assert [stage.learning_rate(step) for step in (0, 99, 999)] == pytest.approx([1e-5, 1e-3, 1e-5])
    assert Scratch.weight_decay == 0.1


def test_matrices_decay_and_biases_do_not():
    layer = nn.Linear(2, 2)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    optimizer = _optimizer(list(layer.parameters()), 0.5, 0.1)
    for part in layer.parameters():
        part.grad = torch.zeros_like(part)
    optimizer.step()
    assert torch.allclose(layer.weight, weight * 0.95)
    assert torch.equal(layer.bias, bias)


def test_the_model_of_the_paper_has_its_shape_and_learns():
    pytest.importorskip("transformers")
    paper = model.build(model.PAPER, "gauss", None, 0)
    # 12 (4 192^2 + 2 192 768) weights, and biases, norms, embeddings and the classes
    assert sum(part.numel() for part in paper.parameters()) == 5_362_762
    assert len(paper.vit.layers if hasattr(paper.vit, "layers") else paper.vit.encoder.layer) == 12
    small = model.build(model.SMOKE, "gauss", None, 0)
    images, test = synthetic(40, 40)
    batch = {"pixel_values": normalised(images.pixels), "labels": nn.functional.one_hot(images.labels, 10).float()}
    work = Scratch(small)
    optimizer = torch.optim.Adam(work.groups()[0], lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        (loss,) = work.losses(batch, None)
        loss.backward()
        optimizer.step()
    assert accuracy(small, test) > 80


def test_the_papers_table_is_complete():
    found, source = results.published()
    assert len(found) == 11 + 3 * 10
    assert found["softmax", "scratch"] == 96.57
    assert [found["dpfp", stage] for stage in results.COLUMNS] == [95.15, 75.84, 96.39, 96.41]
    assert "Table 6" in source
    # the columns summed by hand from the paper
    sums = [sum(value for (_, stage), value in found.items() if stage == column) for column in results.COLUMNS]
    assert sums == pytest.approx([1046.33, 612.95, 961.36, 962.69])
