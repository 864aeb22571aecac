"""What a student has to match: rows of an attention module, an embedding, or logits."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rows_loss(student: Tensor, teacher: Tensor, mask: Tensor | None) -> Tensor:
    """The mean square of the difference of rows `(B, N, C)`, over the tokens that `mask (B, N)` counts."""
    error = (student.float() - teacher.float()).square().mean(-1)
    if mask is None:
        return error.mean()
    weight = mask.to(error)
    return (error * weight).sum() / weight.sum().clamp(min=1)


def pooled(rows: Tensor, mask: Tensor | None) -> Tensor:
    """The mean `(B, C)` of the rows `(B, N, C)` that `mask (B, N)` counts: the embedding of a text."""
    rows = rows.float()
    if mask is None:
        return rows.mean(1)
    weight = mask.to(rows)[..., None]
    return (rows * weight).sum(1) / weight.sum(1).clamp(min=1)


def embedding(output, batch: dict[str, Tensor]) -> Tensor:
    """The embeddings `(B, C)` in the output of an encoder, before they are normalised."""
    return pooled(output[0], batch.get("attention_mask"))


def embedding_loss(student, teacher, batch: dict[str, Tensor]) -> Tensor:
    """The mean square error of the embeddings of two encoders; the teacher's may be known instead of its output."""
    expected = teacher if isinstance(teacher, Tensor) else embedding(teacher, batch)
    return F.mse_loss(embedding(student, batch), expected)


def logit_loss(student, teacher, batch: dict[str, Tensor], temperature: float = 4.0) -> Tensor:
    """`T^2 KL(teacher / T, student / T)` of the logits `(..., classes)`, the mean over all but the classes.

    Tokens that an `attention_mask` leaves out do not count where there are logits for every token.
    """
    logs = [torch.log_softmax(output.logits.float() / temperature, -1) for output in (student, teacher)]
    divergence = F.kl_div(*logs, reduction="none", log_target=True).sum(-1)
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == divergence.shape:
        divergence = divergence[mask.bool()]
    return temperature**2 * divergence.mean()
