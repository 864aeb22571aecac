"""The gradient by bandwidths of kernels that are functions of `q / tau` and `k / tau` alone."""

import torch
from torch import Tensor


def gradient(
    query: Tensor, key: Tensor, grad_query: Tensor, grad_key: Tensor, bandwidth: Tensor, stationary: bool
) -> Tensor:
    """`dtau = -(sum q dq + sum k dk) / tau` of points `(P, ..., D)` and bandwidths `(P,)`, in float64."""
    # the sum of all gradients of a stationary kernel is zero, so any origin serves; a near one does not cancel
    origin = key.mean(1, keepdim=True) if key.shape[1] and stationary else 0.0
    products = ((query - origin) * grad_query).sum(1, dtype=torch.float64)
    products = products + ((key - origin) * grad_key).sum(1, dtype=torch.float64)
    # first over the points: a sum of everything at once would round differently with the number of threads
    return -products.sum(1) / bandwidth
