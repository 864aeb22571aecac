"""`kernel_attention`, `kernel_sum` and `gram`: validate, choose a backend, normalise."""

from collections.abc import Callable

import torch
from torch import Tensor

from . import choose
from .kernels import Kernel, resolve
from .normalise import poisoned
from .ops import repeated
from .ops.grid.error import estimate, probes
from .ops.sorted import backend as by_sorting
from .ops.tiled import ordinary
from .validation import Problem, autocasts, make_problem


def kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: str | Kernel = "add_laplace",
    *,
    bandwidth: float | Tensor | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Kernel attention, `y_m = sum_n Phi(q_m, k_n) v_n / sum_n Phi(q_m, k_n)`.

    Shapes: `query (..., M, D)`, `key (..., N, D)`, `value (..., N, C)` give `(..., M, C)`; leading dimensions
    broadcast.

    - `kernel`: a name of `sortattn.KERNELS` or a `Kernel` such as `sortattn.Spline(...)`.
    - `bandwidth`: tau in `Phi(q / tau, k / tau)`; a number, a tensor that broadcasts to the leading dimensions (shape
      `(H,)` is one per head) and may require a gradient, or None for the kernel's default.
    - `key_mask (B, N)`: True where a key takes part.
    - `is_causal`: query m sees the keys `n <= m + N - M`.
    - `enable_gqa`: fewer key and value heads than query heads, as in SDPA. Keys and values are not copied, unless query
      heads of one group have bandwidths or masks of their own.
    - `backend`: `"auto"`, or one of `reference`, `tiled`, `sorted`, `linear`, `keops`, `grid` by name. All
      but `grid` are exact; `"grid:128"` has 128 nodes by dimension, `"grid:1e-3"` as many as that tolerance needs on
      unit normal data (docs/grid.md).

    A query that sees no key gets zeros. NaN or infinity in a head makes that head's output NaN and no other.

    >>> import torch, sortattn
    >>> query, key, value = torch.randn(3, 2, 4, 100, 16).unbind()
    >>> sortattn.kernel_attention(query, key, value, "add_riesz").shape
    torch.Size([2, 4, 100, 16])
    """
    call = query, key, value, kernel, bandwidth, is_causal, backend
    simple = key_mask is None and not enable_gqa and not torch.compiler.is_compiling()
    if simple:
        rows = repeated.attention(*call)
        if rows is not None:
            return rows
    chosen = resolve(kernel)
    if backend in ("auto", "tiled"):
        usual = ordinary.problem(query, key, value, chosen, bandwidth, key_mask, is_causal, enable_gqa)
        if usual is not None and choose.is_tiled(backend, usual, chosen):
            rows = ordinary.attention(usual, chosen)
            if ordinary.is_given(usual, query, key, value):
                repeated.remember(*call, lambda: ordinary.again(usual, chosen))
            return rows
    problem = make_problem(
        query,
        key,
        value,
        chosen,
        bandwidth=bandwidth,
        key_mask=key_mask,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        native=choose.takes_16_bits(backend, query, chosen, bandwidth),
    )
    run = choose.backend(backend, problem, chosen, normalised=True)
    rows = problem.restore(_full_precision(problem, lambda: run.attention(problem, chosen)))
    if simple and run is by_sorting:
        again = by_sorting.again(query, key, value, problem, chosen)
        if again is not None:
            repeated.remember(*call, lambda: again)
    return rows


def kernel_sum(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: str | Kernel = "add_laplace",
    *,
    bandwidth: float | Tensor | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    backend: str = "auto",
) -> Tensor:
    """The kernel sum `z_m = sum_n Phi(q_m, k_n) v_n`, with the arguments of `kernel_attention`.

    >>> import torch, sortattn
    >>> points = torch.tensor([[0.0], [1.0]])
    >>> sortattn.kernel_sum(points, points, torch.ones(2, 1), "add_bump", bandwidth=2.0)
    tensor([[1.5000],
            [1.5000]])
    """
    chosen = resolve(kernel)
    problem = make_problem(
        query,
        key,
        value,
        chosen,
        bandwidth=bandwidth,
        key_mask=key_mask,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
        native=choose.takes_16_bits(backend, query),
    )
    run = choose.backend(backend, problem, chosen, normalised=False)
    return problem.restore(_full_precision(problem, lambda: poisoned(problem, run.kernel_sum(problem, chosen))))


def grid_error(
    query: Tensor,
    key: Tensor,
    kernel: str | Kernel = "add_laplace",
    *,
    value: Tensor | None = None,
    bandwidth: float | Tensor | None = None,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    backend: str = "grid",
) -> Tensor:
    """An estimate of the relative Frobenius error of `kernel_attention(..., backend="grid")` on these data.

    64 queries of every head are computed exactly beside the grid, which takes time linear in N. The result is a number
    on the device of the inputs, so asking for it waits for nothing. Without `value` it is for unit normal values; the
    smoother real ones are, the smaller the true error. `backend` may name the nodes, as in `"grid:128"`.

    >>> import torch, sortattn
    >>> query, key = torch.randn(2, 4, 1000, 16, generator=torch.Generator().manual_seed(0)).unbind()
    >>> bool(sortattn.grid_error(query, key, "add_riesz") < 2e-3)
    True
    """
    chosen = resolve(kernel)
    if value is None:
        # the columns of a key that is no tensor are not there to be counted: the check below says what it is
        value = probes(key) if isinstance(key, Tensor) and key.dim() > 1 else key
        if enable_gqa and isinstance(key, Tensor):
            value = value.expand(*key.shape[:-2], *value.shape)
    problem = make_problem(
        query, key, value, chosen, bandwidth=bandwidth, key_mask=key_mask, is_causal=is_causal, enable_gqa=enable_gqa
    )
    run = choose.backend(backend, problem, chosen, normalised=True)
    if not isinstance(run, choose.Grid):
        raise ValueError(f"backend must be 'grid' or 'grid:NODES', got {backend!r}")
    return _full_precision(problem, lambda: estimate(problem, chosen, run))


def gram(
    query: Tensor, key: Tensor, kernel: str | Kernel = "add_laplace", *, bandwidth: float | Tensor | None = None
) -> Tensor:
    """The dense Gram matrix `Phi(q_m, k_n)`, shape `(..., M, N)`.

    >>> import torch, sortattn
    >>> sortattn.gram(torch.zeros(1, 3), torch.ones(2, 3), "laplace", bandwidth=3.0)
    tensor([[0.3679, 0.3679]])
    """
    chosen = resolve(kernel)
    problem = make_problem(query, key, key, chosen, bandwidth=bandwidth)
    return problem.restore(_full_precision(problem, lambda: chosen.gram(problem.query, problem.key, problem.bandwidth)))


def _full_precision(problem: Problem, function: Callable[[], Tensor]) -> Tensor:
    """What the function returns, its matrix products not touched by autocast: that has rounded the inputs already."""
    device = problem.query.device.type
    if not autocasts(device):
        return function()
    with torch.autocast(device, enabled=False):
        return function()
