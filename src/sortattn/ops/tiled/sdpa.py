"""`softmax`, and on GPUs `gauss`, through torch's own attention, `gauss` with more dimensions: `q' = [q, 1]`,
`k' = [k, -|k|^2 / 2]`, as the query's norm cancels.

In 16 bits the tensors go there as they are and the bandwidth as torch's scale, so that nothing is rounded twice but the
weights; `|k|^2 / 2` is split into three numbers of eight bits each.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import Gauss, Kernel, Softmax, scaled
from ...validation import Problem, autocasts

# numbers of bfloat16 that together have the digits of a float32, and what torch's fast kernels want dimensions to be
# a multiple of
_PARTS, _EVEN = 3, 8


def serves(problem: Problem, kernel: Kernel) -> bool:
    """Whether torch's attention can compute this."""
    # it aligns its causal mask at the start, knows no heads one behind the other, and takes no other mask beside it
    square = problem.group == 1 and problem.query.shape[1] == problem.key.shape[1]
    # on the CPU squares of differences take no longer, and keep their digits however far from their mean keys are
    known = isinstance(kernel, Softmax) or (isinstance(kernel, Gauss) and problem.query.device.type != "cpu")
    return known and (not problem.causal or (square and problem.weight is None))


def takes_16_bits(kernel: Kernel, query: Tensor, bandwidth: object) -> bool:
    """Whether these tensors may stay in 16 bits; squares overflow in float16, and a scale is one for all heads."""
    if not query.is_cuda or isinstance(bandwidth, Tensor):
        return False
    dtype = torch.get_autocast_dtype("cuda") if autocasts("cuda") else query.dtype
    if isinstance(kernel, Softmax):
        return dtype in (torch.float16, torch.bfloat16)
    return isinstance(kernel, Gauss) and dtype == torch.bfloat16


def attention(problem: Problem, kernel: Softmax | Gauss) -> Tensor:
    """`(P, M, C)`."""
    points = _narrow if problem.query.dtype in (torch.float16, torch.bfloat16) else _wide
    query, key, scale = points(problem, kernel)
    value = problem.value
    channels = value.shape[-1]
    # torch's fast kernels want as many channels as dimensions; else that of the CPU writes down the whole matrix
    if query.shape[-1] > channels:
        value = F.pad(value, (0, query.shape[-1] - channels))
    elif query.shape[-1] < channels and not query.is_cuda:
        query, key = (F.pad(part, (0, channels - part.shape[-1])) for part in (query, key))
    mask = None if problem.weight is None else (problem.weight != 0)[:, None, None, :]
    out = F.scaled_dot_product_attention(
        query[:, None], key[:, None], value[:, None], attn_mask=mask, is_causal=problem.causal, scale=scale
    )[:, 0, :, :channels]
    return out if mask is None else torch.where(mask.any(-1), out, 0.0)


def _wide(problem: Problem, kernel: Softmax | Gauss) -> tuple[Tensor, Tensor, float]:
    query, key = kernel.center(problem.query, problem.key)
    query, key = scaled(query, problem.bandwidth), scaled(key, problem.bandwidth)
    if isinstance(kernel, Gauss):
        query = F.pad(query, (0, 1), value=1.0)
        key = torch.cat([key, key.square().sum(-1, keepdim=True) / -2], -1)
    return query, key, 1.0


def _narrow(problem: Problem, kernel: Softmax | Gauss) -> tuple[Tensor, Tensor, float]:
    query, key = problem.query, problem.key
    if isinstance(kernel, Gauss):
        origin = _middle(query, key)
        query, key = query - origin, key - origin
        rest, parts = key.float().square().sum(-1, keepdim=True) / -2, []
        for _ in range(_PARTS):
            parts.append(rest.to(key.dtype))
            rest = rest - parts[-1].float()
        spare = -(key.shape[-1] + _PARTS) % _EVEN
        query = F.pad(F.pad(query, (0, _PARTS), value=1.0), (0, spare))
        key = F.pad(torch.cat([key, *parts], -1), (0, spare))
    else:
        # a constant added to all keys changes nothing but the rounding of the query's gradient
        key = key - _middle(key)
    return query, key, problem.bandwidth**-2


def _middle(*points: Tensor) -> Tensor | float:
    """What can be taken from all points without rounding: their middle, where they lie closely around it, else zero."""
    points = [part.detach() for part in points if part.shape[-2]]
    if not points:
        return 0.0
    low = functools.reduce(torch.minimum, (part.amin(-2, keepdim=True) for part in points))
    high = functools.reduce(torch.maximum, (part.amax(-2, keepdim=True) for part in points))
    middle = low / 2 + high / 2
    # the difference of two numbers is exact if neither is more than twice the other
    return torch.where(middle.abs() > 4 * (high - low), middle, 0.0)
