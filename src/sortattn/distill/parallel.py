"""Data parallel under `torchrun`: every process has its own batches, and gradients are averaged over them."""

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def start(device: torch.device) -> None:
    """Joins the group that `torchrun` has started; does nothing without it."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def stop() -> None:
    """Leaves the group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def place() -> tuple[int, int]:
    """The number of this process and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def leads() -> bool:
    """Whether this is the first process, the one that writes and shows."""
    return place()[0] == 0


def average(tensors: Iterable[Tensor]) -> None:
    """Replaces the tensors by their mean over all processes, in one message."""
    tensors = list(tensors)
    if place()[1] == 1 or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1).float() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= place()[1]
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.reshape(tensor.shape))


def wait() -> None:
    """Until all processes are here."""
    if dist.is_initialized():
        dist.barrier()
