"""The operators as torch sees them: schemas, fake kernels, autograd, vmap and autocast."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import sortattn

from .cases import CASES, Shape, assert_close, cotangent, draw, leaves, refusal
from .definition import FORWARD

SHAPE = Shape((2,), 5, 7, 3, 2)
OPERATORS = {
    "sided_sum", "sided_sum_backward", "tiled_sum", "tiled_sum_backward", "sign_dot", "sign_dot_backward",
    "collect", "project", "spread", "unfit", "quotient", "quotient_backward", "grid_plan", "grid_collect", "grid_read",
    "grid_weights_backward", "grid_causal", "grid_causal_backward", "causal_sum", "causal_sum_backward",
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Keeps the arguments of every call of an operator of ours: samples that cannot fall behind the operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sortattn":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def attend(name, backend, shape=SHAPE, dtype=torch.float32, **options):
    def call(device):
        points = leaves(*draw(shape, dtype, device))
        output = sortattn.kernel_attention(*points, CASES[name].kernel, backend=backend, **options)
        output.backward(cotangent(shape, dtype, device))

    return call


def learn(backend, rows=5, **options):
    def call(device):
        slopes, jumps = leaves(torch.tensor([-0.25, 0.75, -0.5]), torch.tensor([0.5, 0.25]))
        kernel = sortattn.Spline([-1.0, 0.5], slopes, jumps=jumps, offset=1.0)
        bandwidth = torch.tensor([0.5, 2.0], device=device, requires_grad=True)
        points = leaves(*draw(Shape((2,), rows, 7, 3, 2), torch.float32, device))
        sortattn.kernel_attention(*points, kernel, bandwidth=bandwidth, backend=backend, **options).sum().backward()

    return call


def signs(device):
    query, key, value = leaves(*draw(Shape((2,), 5, 7, 3, 2), torch.float32, device))
    (weight,) = leaves(cotangent(Shape((2,), 5, 7, 3, 2), torch.float32, device))
    sortattn.weighted_sign_sum(query, key, value, weight, backend="sorted").sum().backward()


def values_only(device):
    query, key, value = draw(Shape((2,), 5, 7, 3, 2), torch.float32, device)
    value.requires_grad_()
    sortattn.kernel_sum(query, key, value, "add_bump", backend="sorted").sum().backward()


SAMPLES = {
    "add_riesz": attend("add_riesz", "sorted"),
    "matern52": attend("matern52", "sorted"),
    "add_laplace_float64": attend("add_laplace", "sorted", dtype=torch.float64),
    "add_bump_masked": attend("add_bump", "sorted", key_mask=torch.tensor([[True] * 5 + [False] * 2])),
    "many_channels": attend("add_laplace", "sorted", Shape((1,), 5, 7, 3, 65)),
    "no_keys": attend("add_laplace", "sorted", Shape((2,), 5, 0, 3, 2)),
    "one_point": attend("add_laplace", "sorted", Shape((1,), 1, 1, 1, 1), dtype=torch.float64),
    "values_only": values_only,
    "spline_coefficients": learn("sorted"),
    "signs": signs,
    "grid_laplace": attend("add_laplace", "grid:8", dtype=torch.float64),
    "grid_bump_masked": attend("add_bump", "grid:8", key_mask=torch.tensor([[True] * 5 + [False] * 2])),
    "grid_no_keys": attend("add_riesz", "grid:8", Shape((2,), 5, 0, 3, 2)),
    "grid_causal": attend("add_riesz", "grid:8", is_causal=True),
    "sorted_causal": attend("add_bump", "sorted", Shape((2,), 40, 37, 3, 2), is_causal=True),
    "tiled_laplace": attend("laplace", "tiled"),
    "tiled_causal": attend("add_bump", "tiled", is_causal=True),
    "tiled_grouped": attend("riesz", "tiled", Shape((2, 2), 5, 7, 3, 2), dtype=torch.float64),
    "tiled_spline_coefficients": learn("tiled"),
    "causal_spline_coefficients": learn("sorted", rows=40, is_causal=True),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
@pytest.mark.usefixtures("cpu_only")
def test_operators_pass_opcheck(sample):
    with Recorder() as recorder:
        sample("cpu")
    assert recorder.calls
    for operator, arguments in recorder.calls:
        torch.library.opcheck(operator, _fresh(arguments, differentiable="backward" not in operator.name()))


def _fresh(arguments, differentiable: bool):
    """Copies of the tensors, of which those that may require gradients do."""

    def copy(argument):
        if not isinstance(argument, torch.Tensor):
            return argument
        return argument.detach().clone().requires_grad_(differentiable and argument.is_floating_point())

    return tuple(copy(argument) for argument in arguments)


@pytest.mark.usefixtures("cpu_only")
def test_the_samples_reach_every_operator():
    with Recorder() as recorder:
        for sample in SAMPLES.values():
            sample("cpu")
    assert {operator.name().split("::")[1].split(".")[0] for operator, _ in recorder.calls} == OPERATORS


@pytest.mark.parametrize("backend", ["reference", "tiled", "sorted", "grid"])
@pytest.mark.parametrize("name", ["add_laplace", "spline", "softmax"])
def test_fake_tensors_pass_through_without_any_work(name, backend, device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    if refusal(backend, CASES[name], device):
        return
    # the coefficients of a kernel are real tensors
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        query, key, value = (mode.from_tensor(part) for part in draw(Shape((2, 3), 5, 7, 3, 2), torch.float16, device))
        output = sortattn.kernel_attention(query, key, value, CASES[name].kernel, backend=backend)
    assert output.shape == (2, 3, 5, 2)
    assert output.dtype == torch.float16


# vmap


@pytest.mark.parametrize("backend", ["reference", "tiled", "sorted", "linear", "grid"])
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "add_bump", "spline", "laplace", "softmax", "elu"])
@pytest.mark.parametrize("dims", [(0, 0, 0), (1, 0, None), (None, None, 0)], ids=str)
def test_vmap_is_a_loop(name, backend, dims, device):
    case = CASES[name]
    if refusal(backend, case, device):
        return
    shape = Shape((3, 2), 5, 7, 3, 2)
    inputs = [
        part[0] if dim is None else part.movedim(0, dim)
        for part, dim in zip(draw(shape, torch.float64, device), dims, strict=True)
    ]

    def call(query, key, value):
        return sortattn.kernel_attention(query, key, value, case.kernel, backend=backend)

    loop = torch.stack(
        [
            call(*(part if dim is None else part.select(dim, i) for part, dim in zip(inputs, dims, strict=True)))
            for i in range(3)
        ]
    )
    assert_close(torch.func.vmap(call, in_dims=dims)(*inputs), loop, FORWARD[torch.float64])


@pytest.mark.parametrize("shape", [(0, 6, 3), (5, 0, 3), (5, 6, 0)], ids=["M", "N", "C"])
@pytest.mark.parametrize(("name", "backend"), [("add_laplace", "sorted"), ("laplace", "tiled"), ("tri", "linear")])
def test_vmap_of_nothing(name, backend, shape):
    queries, keys, channels = shape
    inputs = torch.randn(3, 2, queries, 4), torch.randn(3, 2, keys, 4), torch.randn(3, 2, keys, channels)

    def call(*points):
        return sortattn.kernel_attention(*points, name, backend=backend)

    assert torch.equal(torch.func.vmap(call)(*inputs), call(*inputs))


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("backend", ["reference", "tiled", "sorted", "linear", "grid"])
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "spline", "elu"])
@pytest.mark.parametrize("dims", [(0, 0, 0), (1, 0, None), (None, None, 0)], ids=str)
def test_vmap_over_no_samples_has_no_results(name, backend, dims, causal, device):
    case = CASES[name]
    if refusal(backend, case, device, causal=causal):
        return
    inputs = [
        part if dim is None else part.unsqueeze(dim).narrow(dim, 0, 0)
        for part, dim in zip(draw(Shape((2,), 7, 7, 3, 4), torch.float32, device), dims, strict=True)
    ]

    def call(query, key, value):
        return sortattn.kernel_attention(query, key, value, case.kernel, is_causal=causal, backend=backend)

    assert torch.func.vmap(call, in_dims=dims)(*inputs).shape == (0, 2, 7, 4)


def test_vmap_of_sign_sums_over_no_samples_has_no_results():
    assert torch.func.vmap(sortattn.weighted_sign_sum)(*torch.zeros(4, 0, 2, 5, 3)).shape == (0, 2, 5, 3)


@pytest.mark.parametrize("backend", ["tiled", "sorted"])
def test_vmap_over_coefficients_is_a_clear_error(backend, device):
    query, key, value = draw(Shape((), 5, 7, 3, 2), torch.float64, device)

    def call(coefficients):
        kernel = sortattn.PolynomialExponential(coefficients)
        return sortattn.kernel_attention(query, key, value, kernel, backend=backend)

    with pytest.raises(RuntimeError, match="cannot vmap over the coefficients of a kernel"):
        torch.func.vmap(call)(torch.ones(3, 2, dtype=torch.float64))


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("dims", [(0, 0, 0, 0), (None, 0, 1, 0)], ids=str)
def test_vmap_of_sign_sums_is_a_loop(dims):
    shape = Shape((3, 2), 5, 7, 3, 2)
    inputs = [
        part[0] if dim is None else part.movedim(0, dim)
        for part, dim in zip((*draw(shape), cotangent(shape)), dims, strict=True)
    ]
    loop = torch.stack(
        [
            sortattn.weighted_sign_sum(
                *(part if dim is None else part.select(dim, i) for part, dim in zip(inputs, dims, strict=True))
            )
            for i in range(3)
        ]
    )
    mapped = torch.func.vmap(sortattn.weighted_sign_sum, in_dims=dims)(*inputs)
    assert_close(mapped, loop, FORWARD[torch.float64])


# functional gradients


@pytest.mark.parametrize("backend", ["tiled", "sorted", "grid"])
def test_forward_mode_derivatives_are_refused_and_not_zero(backend, device):
    query, key, value = draw(Shape((2,), 5, 7, 3, 4), torch.float64, device=device)

    def call(points):
        return sortattn.kernel_attention(points, key, value, "add_riesz", backend=backend)

    with pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        torch.func.jvp(call, (query,), (torch.ones_like(query),))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivatives"):
        call(forward_ad.make_dual(query, torch.ones_like(query)))
    # what does not depend on a tangent is served
    output, slope = torch.func.jvp(lambda factor: factor * call(query), (query.new_ones(()),), (query.new_ones(()),))
    assert torch.equal(output, slope)


@pytest.mark.parametrize("backend", ["reference", "tiled", "sorted", "grid"])
def test_functional_gradients_are_those_of_backward_or_an_error(backend, device):
    if refusal(backend, CASES["add_laplace"], device):
        return
    points = leaves(*draw(Shape((3,), 5, 7, 3, 2), torch.float64, device))

    def loss(query, key, value):
        return sortattn.kernel_attention(query, key, value, "add_laplace", backend=backend).square().sum()

    loss(*points).backward()
    gradient = torch.func.grad(loss, argnums=(0, 1, 2))
    mapped = torch.func.grad(lambda *points: torch.func.vmap(loss)(*points).sum(), argnums=(0, 1, 2))
    for transform in (gradient, torch.func.vmap(gradient), mapped):
        if backend == "reference":
            for part, actual in zip(points, transform(*(part.detach() for part in points)), strict=True):
                assert_close(actual, part.grad, FORWARD[torch.float64])
        else:
            # torch has no functional gradients of custom operators
            with pytest.raises(RuntimeError, match="functorch transforms .* use backend='reference'"):
                transform(*(part.detach() for part in points))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("backend", ["tiled", "sorted", "grid"])
@pytest.mark.parametrize("name", ["add_riesz", "add_laplace", "spline"])
def test_many_gradients_at_once_are_those_of_a_loop(name, backend, device):
    case, shape = CASES[name], Shape((2,), 5, 7, 3, 4)
    if refusal(backend, case, device):
        return
    points = leaves(*draw(shape, torch.float64, device))
    bandwidth = points[0].new_full((2,), 0.7).requires_grad_()
    output = sortattn.kernel_attention(*points, case.kernel, bandwidth=bandwidth, backend=backend)
    several = cotangent(Shape((3, *shape.leading), 5, 7, 3, 4), torch.float64, device)

    def gradients(gradient, **options):
        return torch.autograd.grad(output, (*points, bandwidth), gradient, retain_graph=True, **options)

    for together, *alone in zip(gradients(several, is_grads_batched=True), *map(gradients, several), strict=True):
        assert_close(together, torch.stack(alone), FORWARD[torch.float64])


# autocast


@pytest.mark.usefixtures("reproducible")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("backend", ["reference", "tiled", "sorted", "linear", "grid"])
@pytest.mark.parametrize("name", ["softmax", "add_laplace", "elu"])
def test_autocast_rounds_the_inputs_as_for_sdpa(name, backend, dtype, device):
    case = CASES[name]
    if refusal(backend, case, device):
        return
    inputs = draw(Shape((2,), 20, 30, 3, 4), torch.float32, device)
    points = leaves(*inputs)
    with torch.autocast(device, dtype):
        output = sortattn.kernel_attention(*points, case.kernel, backend=backend)
        # a mixture, as a projection and a parameter may be, is no error there
        mixed = sortattn.kernel_attention(points[0], points[1].to(dtype), points[2], case.kernel, backend=backend)
        exact = sortattn.kernel_attention(*(part.double() for part in inputs), case.kernel, backend=backend)
    assert output.dtype == mixed.dtype == dtype
    assert exact.dtype == torch.float64
    rounded = sortattn.kernel_attention(*(part.to(dtype) for part in inputs), case.kernel, backend=backend)
    assert torch.equal(output, rounded)
    assert torch.equal(mixed, rounded)
    output.sum().backward()
    assert all(part.grad.dtype == torch.float32 and part.grad.isfinite().all() for part in points)


@pytest.mark.usefixtures("reproducible")
@pytest.mark.parametrize(("name", "backend"), [("add_laplace", "sorted"), ("laplace", "tiled"), ("spline", "tiled")])
def test_a_backward_pass_within_autocast_rounds_nothing(name, backend, device):
    shape = Shape((2,), 20, 30, 3, 4)
    points, gradient = leaves(*draw(shape, torch.float32, device)), cotangent(shape, torch.float32, device)
    output = sortattn.kernel_attention(*points, CASES[name].kernel, backend=backend)
    outside = torch.autograd.grad(output, points, gradient, retain_graph=True)
    with torch.autocast(device, torch.bfloat16):
        within = torch.autograd.grad(output, points, gradient)
    assert all(map(torch.equal, outside, within))


# modes


@pytest.mark.usefixtures("reproducible")
@pytest.mark.parametrize("backend", ["reference", "tiled", "sorted", "linear", "grid"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_no_grad_and_inference_mode_change_nothing(backend, mode, device):
    case = CASES["elu" if backend == "linear" else "add_laplace"]
    if refusal(backend, case, device):
        return
    points = leaves(*draw(Shape((2,), 20, 30, 3, 4), torch.float32, device))
    with mode():
        quiet = sortattn.kernel_attention(*points, case.kernel, backend=backend)
    assert not quiet.requires_grad
    assert torch.equal(quiet, sortattn.kernel_attention(*points, case.kernel, backend=backend).detach())


@pytest.mark.usefixtures("reproducible")
@pytest.mark.parametrize("backend", ["tiled", "sorted", "grid"])
@pytest.mark.parametrize("wanted", [0, 1, 2], ids=["query", "key", "value"])
def test_one_gradient_alone_is_the_same_as_among_all(wanted, backend, device):
    case = CASES["add_bump"]
    if refusal(backend, case, device):
        return
    shape = Shape((2,), 20, 30, 3, 4)
    points, gradient = leaves(*draw(shape, torch.float32, device)), cotangent(shape, torch.float32, device)
    together = torch.autograd.grad(sortattn.kernel_attention(*points, case.kernel, backend=backend), points, gradient)
    single = [part.detach().requires_grad_(i == wanted) for i, part in enumerate(points)]
    output = sortattn.kernel_attention(*single, case.kernel, backend=backend)
    (alone,) = torch.autograd.grad(output, single[wanted : wanted + 1], gradient)
    if device != "cpu" and (backend, wanted) == ("sorted", 1):
        # one walk for keys and values together takes slopes where one for keys alone sums the derivative
        assert_close(alone, together[wanted], 1e-6)
    else:
        assert torch.equal(alone, together[wanted])
