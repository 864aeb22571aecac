"""What `test_grid_kernels` runs in a process of its own, where Triton's interpreter is switched on."""

import itertools
import sys
import traceback
from unittest import mock

import torch

import sortattn
from sortattn.kernels import PolynomialExponential, resolve
from sortattn.ops.grid import causal as walk
from sortattn.ops.grid.gpu import causal as gpu_causal
from sortattn.ops.grid.gpu import causal_api as gpu_causal_api
from sortattn.ops.grid.gpu import causal_backward as gpu_backward
from sortattn.ops.grid.gpu import finish as gpu_finish
from sortattn.ops.grid.gpu import march as gpu_march
from sortattn.ops.grid.gpu.api import grid_gpu
from sortattn.ops.grid.gpu.formula import formula
from sortattn.ops.grid.gpu.grid import Grid
from sortattn.ops.grid.gpu.layout import INTERPRETED, Layout
from sortattn.ops.grid.gpu.matrix import matrix as kernel_matrix

from . import compiled, surrogate
from .cases import Shape, assert_close, cotangent, draw, leaves
from .emulation.emulator import EmulatedKernel
from .interpreted_hopper import (
    emulated,
    far_nodes,
    few_channels,
    hopper_steps,
    lines_in_order,
    many_keys,
    played_with_cuda,
)
from .interpreted_matrix import KERNELS, matrix
from .interpreted_places import places, words
from .levels import key_weights

# nothing else prints such a line
END = "the end of a check"


def attention(points, kernel, nodes, phi, tau, chunk=0, levels=None):
    """The surrogate in float64 on given nodes, with the kernel between them as `phi` says it is at this bandwidth.

    With a `chunk` the call is causal, and pairs within a chunk of the keys are exact. `levels (P, D, N, G)` are what
    keys give at the nodes, if that is not by way of other nodes.
    """
    query, key, value = points
    wide = tau[:, None, None, None]

    def plain(wide):
        found = kernel.univariate((nodes[..., :, None] - nodes[..., None, :]) / wide)
        return found + (nodes.abs()[..., :, None] + nodes.abs()[..., None, :]) / wide if is_riesz(kernel) else found

    # what is left is the correction, a constant
    whole = plain(wide) + (phi - plain(wide.detach()))
    rows, columns = (surrogate.weights(part.mT, nodes, wide, decays(kernel)) for part in (query, key))
    matrix = (rows @ (whole @ columns.mT if levels is None else levels.mT)).sum(1)
    if chunk:
        place, n = torch.arange(query.shape[1])[:, None] + key.shape[1] - query.shape[1], torch.arange(key.shape[1])
        near = place // chunk == n // chunk
        matrix = torch.where(near, kernel.gram(query, key, tau[:, None, None]), matrix)
        matrix = torch.where(n <= place, matrix, 0.0)
    return matrix @ value / matrix.sum(-1, keepdim=True)


def is_riesz(kernel):
    return kernel.name == "add_riesz"


def decays(kernel):
    return kernel.name == "add_laplace"


def _clear(points, nodes):
    """Zero where a point is so near to a node that its code may be that of the node, but not on it; otherwise one."""
    distance = (points.mT.float()[..., None] - nodes[:, :, None, :]).abs()
    width = nodes.diff(dim=-1)
    width = torch.maximum(torch.nn.functional.pad(width, (0, 1)), torch.nn.functional.pad(width, (1, 0)))
    return ((distance == 0) | (distance > width[:, :, None, :] / 500)).all(-1).mT


def gradients(name, dtype, dims, count=12, chunk=0, channels=5):
    """Output and gradients beside float64 autograd through the same surrogate."""
    kernel = KERNELS.get(name) or resolve(name)
    shape = Shape((2,), 40 if chunk else 30, 40, dims, channels)
    inputs = draw(shape, dtype)
    tau = torch.tensor([0.8, 1.7])
    points = leaves(*inputs, tau)
    options = {"bandwidth": points[3], "backend": f"grid:{count}", "is_causal": bool(chunk)}
    output = sortattn.kernel_attention(*points[:3], kernel, **options)
    gradient = cotangent(shape, dtype)
    actual = torch.autograd.grad(output, points, gradient)
    parameters = torch.empty(0) if kernel.parameters() is None else kernel.parameters()
    # the nodes are the same, whether a call is causal or not
    found = grid_gpu(*inputs, torch.empty(2, 0), tau, parameters, kernel.name, decays(kernel), count, 1, False, True)
    grid = Grid(found[2], found[3], tau, Layout(count, dtype), formula(kernel, tau.device))
    phi = kernel_matrix(grid, torch.zeros(2, dtype=torch.int32))[..., :count, :count].double()
    exact = leaves(*(part.double() for part in (*inputs, tau)))
    nodes = found[2][..., :count]
    wanted = attention(exact[:3], kernel, nodes.double(), phi, exact[3], chunk)
    expected = torch.autograd.grad(wanted, exact, gradient.double())
    bound = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert_close(output, wanted, bound)
    for label, one, other, own in zip(("query", "key", "value"), actual, expected, inputs, strict=False):
        if label != "value" and dtype != torch.float32:
            one, other = (part * _clear(own, nodes) for part in (one, other))
        assert_close(one, other, 3 * bound, name=label)
    if decays(kernel) and dims >= 16:
        # without a gradient of the bandwidth slopes are looked up otherwise
        output = sortattn.kernel_attention(*points[:3], kernel, **{**options, "bandwidth": tau})
        found = torch.autograd.grad(output, points[:3], gradient)
        for label, one, other, own in zip(("query", "key", "value"), found, expected, inputs, strict=False):
            if label != "value":
                one, other = (part * _clear(own, nodes) for part in (one, other))
            assert_close(one, other, 3 * bound, name=f"{label}, looked up")
    if not is_riesz(kernel):
        # of add_riesz it is nearly zero: the bandwidth cancels but for epsilon
        assert_close(actual[3], expected[3], 30 * bound, name="bandwidth")


def hopper_gradients(name, dtype, dims, count):
    """The same by the kernels of CUDA, where there are some: 64 channels, so that all steps have theirs."""
    with emulated() as ran:
        gradients(name, dtype, dims, count, channels=64)
    assert set(ran) >= {"collect"} | ({"change_levels"} if name == "add_laplace" else set())


def causal_gradients(name, dtype, dims):
    """The same for a causal call, in chunks of 16."""
    gpu_causal.CHUNK = walk._CHUNK = 16
    gradients(name, dtype, dims, chunk=16)


def causal():
    """Masks, groups, fewer and more queries than keys, and kernel sums of causal calls, near the definition."""
    gpu_causal.CHUNK = 16
    # with more than 64 nodes points look their rows up
    for name, function, rows, columns, dims, count in (
        ("add_bump", sortattn.kernel_attention, 20, 33, 3, 48),
        ("add_laplace", sortattn.kernel_sum, 40, 33, 2, 72),
        ("add_riesz", sortattn.kernel_sum, 20, 40, 3, 48),
    ):
        query, key, value = (part[None] for part in draw(Shape((4,), rows, columns, dims, 4), torch.float32))
        call = {"key_mask": torch.arange(columns)[None] % 3 != 0, "enable_gqa": True, "is_causal": True}
        found = function(query, key[:, :2], value[:, :2], name, **call, backend=f"grid:{count}")
        wanted = function(query, key[:, :2], value[:, :2], name, **call, backend="reference")
        assert_close(found, wanted, 0.02)
        query[0, 1, 3, 1] = torch.nan
        found = function(query, key[:, :2], value[:, :2], name, **call, backend=f"grid:{count}")
        assert found[0, 1].isnan().all()
        assert found[0, [0, 2, 3]].isfinite().all()
    for name in ("add_riesz", "add_bump"):
        points = draw(Shape((2,), 40, 40, 16, 4), torch.float16)
        points[2][0] = 0
        found = sortattn.kernel_attention(*points, name, is_causal=True, backend="grid:24")
        assert found[0].eq(0).all()
        assert_close(found[1], sortattn.kernel_attention(*points, name, is_causal=True, backend="reference")[1], 0.02)


def causal_ways(name, dtype, dims):
    """Causal gradients by the kernels beside those by torch, which a gradient of the bandwidth asks for."""
    gpu_causal.CHUNK = gpu_backward.CHUNK = walk._CHUNK = 16
    shape = Shape((2,), 40, 40, dims, 5)
    gradient = cotangent(shape, dtype)
    some = torch.arange(40)[None] % 4 != 1
    # many dimensions take long
    for mask in (None, some) if dims < 16 else (some,):
        found = []
        for wanted in (False, True):
            points = leaves(*draw(shape, dtype))
            tau = torch.tensor([0.8, 1.7], requires_grad=wanted)
            options = {"bandwidth": tau, "backend": "grid:24", "is_causal": True, "key_mask": mask}
            output = sortattn.kernel_attention(*points, name, **options)
            found.append(torch.autograd.grad(output, points, gradient))
        for label, one, other in zip(("query", "key", "value"), *found, strict=True):
            assert_close(one, other, {torch.float32: 1e-5, torch.float16: 2e-3}[dtype], name=label)


def marched(name, dtype, dims, count):
    """A causal call whose tables stay in registers, by the kernels for Hopper on an emulator, beside the surrogate."""
    kernel, launched = resolve(name), []

    def direct(found, known):
        emulated = EmulatedKernel(found.source, found.entry, found.defines, "warpgroup.h")

        def launch(grid, block, *arguments, shared):
            launched.append((grid, block))
            emulated(grid, block, *arguments, shared=shared)

        return launch

    # a wave has room for two heads: of the third one blocks have half as many rows
    each = dims * Layout(count, dtype).padded // 512
    # a last chunk that is not full
    inputs = draw(Shape((3,), 136, 136, dims, 64), dtype)
    # all points of a dimension are on one side of zero, on the other side, or the same
    for part in inputs[:2]:
        part[..., 0] = part[..., 0].abs() + 1
        part[..., 1] = -part[..., 1].abs() - 1
        part[..., 2] = 0.5
    # more than a float16 holds, and less
    inputs[2][1] *= 1000 if dtype == torch.float16 else 1e9
    inputs[2][2] *= 1 if dtype == torch.float16 else 1e-9
    broken = inputs[2].clone()
    broken[1, 100, 3] = torch.inf
    tau, nothing = torch.tensor([0.8, 1.7, 1.0]), torch.empty(3, 0)
    rest = (tau, torch.empty(0), kernel.name, decays(kernel), count, 1, False, True)
    kind = name.removeprefix("add_")
    stand_ins = {"serves": lambda *_: True, "direct": direct, "processors": lambda _: 2 * each, "CHUNKS": {kind: 64}}
    with mock.patch.multiple(gpu_march, **stand_ins), mock.patch.object(gpu_finish, "direct", direct):
        found = gpu_causal_api._forward(*inputs, nothing, *rest)
        assert launched == [((each, 2), 512), ((3, 2), 64), ((2 * each, 1), 384), ((3, 1), 64)]
        spoilt = gpu_causal_api._forward(*inputs[:2], broken, nothing, *rest)[0]
    grid = Grid(found[2], found[3], tau, Layout(count, dtype), formula(kernel, tau.device))
    phi = kernel_matrix(grid, torch.zeros(3, dtype=torch.int32))[..., :count, :count].double()
    exact = [part.double() for part in inputs]
    nodes, levels = found[2][..., :count].double(), None
    if kind != "riesz":
        extra = found[3][:, :, -1, :count].double()
        levels = key_weights(kind, nodes, exact[1].mT, extra, tau.double()[:, None, None])
    wanted = attention(exact, kernel, nodes, phi, tau.double(), 64, levels)
    for one, other in zip(found[0], wanted, strict=True):
        assert_close(one, other, {torch.float16: 1e-3, torch.bfloat16: 3e-3}[dtype])
    assert spoilt[1].isnan().all()
    assert torch.equal(spoilt[[0, 2]], found[0][[0, 2]])


def types():
    """Neither torch's default type nor autocast around a backward pass changes a result; fused steps are seen."""
    points = draw(Shape((1,), 20, 20, 2, 3), torch.float32)
    points[2].mul_(3000)

    def gradients(causal):
        inputs = leaves(*points, torch.tensor([1.3], dtype=torch.float32))
        output = sortattn.kernel_sum(*inputs[:3], "add_bump", bandwidth=inputs[3], backend="grid:12", is_causal=causal)
        with torch.autocast("cpu", torch.float16, enabled=casts):
            return [output.detach(), *torch.autograd.grad(output, inputs, torch.ones_like(output))]

    gpu_causal.CHUNK = gpu_backward.CHUNK = walk._CHUNK = 16
    for causal in (False, True):
        casts = False
        wanted = gradients(causal)
        casts = True
        assert all(map(torch.equal, gradients(causal), wanted))
        casts = False
        try:
            torch.set_default_dtype(torch.bfloat16)
            assert all(map(torch.equal, gradients(causal), wanted))
        finally:
            torch.set_default_dtype(torch.float32)
    coefficients = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    kernel, optimizer = PolynomialExponential(coefficients), torch.optim.SGD([coefficients], lr=0.1, fused=True)
    for _ in range(2):
        found = sortattn.kernel_sum(*points, kernel, backend="grid:64")
        assert_close(found, sortattn.kernel_sum(*points, kernel, backend="reference"), 2e-2)
        coefficients.grad = torch.tensor([10.0, -20.0])
        optimizer.step()


def masks():
    """Masked keys do not count, heads of a group share their keys, and what is no number stays in its head."""
    query, key, value = (part[None] for part in draw(Shape((4,), 20, 33, 3, 4), torch.float32))
    key, value = key[:, :2], value[:, :2]
    mask = torch.arange(33)[None] % 3 != 0
    call = {"key_mask": mask, "enable_gqa": True, "backend": "grid:48"}
    for name in ("add_bump", "add_laplace"):
        found = sortattn.kernel_attention(query, key, value, name, **call)
        exact = sortattn.kernel_attention(query, key, value, name, key_mask=mask, enable_gqa=True, backend="reference")
        assert_close(found, exact, 0.05)
    spoilt = query.clone()
    spoilt[0, 1, 3, 2] = torch.nan
    found = sortattn.kernel_attention(spoilt, key, value, name, **call)
    assert found[0, 1].isnan().all()
    assert found[0, [0, 2, 3]].isfinite().all()
    broken = value.clone()
    broken[0, 1, 4, 0] = torch.inf
    found = sortattn.kernel_attention(query, key, broken, name, **call)
    assert found[0, 2:].isnan().all()
    assert found[0, :2].isfinite().all()


def sums():
    """Kernel sums, many channels, more nodes than a block has, and a query that sees no key."""
    query, key, value = draw(Shape((1,), 10, 14, 2, 70), torch.float32)
    wanted = sortattn.kernel_sum(query, key, value, "add_bump", backend="reference")
    assert_close(sortattn.kernel_sum(query, key, value, "add_bump", backend="grid:100"), wanted, 0.02)
    found = sortattn.kernel_attention(query + 100, key, value, "add_bump", backend="grid:16")
    assert (found == 0).all()
    points = leaves(query, key, value)
    output = sortattn.kernel_sum(*points, "add_laplace", backend="grid:100")
    exact = leaves(*(part.double() for part in (query, key, value)))
    reference = sortattn.kernel_sum(*exact, "add_laplace", backend="reference")
    one, other = (torch.autograd.grad(part.sum(), inputs)[2] for part, inputs in ((output, points), (reference, exact)))
    assert_close(one, other, 0.02)


def factored():
    """Exponentials of many dimensions in 16 bits: masked keys, groups, sums, what is no number, far queries."""
    query, key, value = (part[None] for part in draw(Shape((4,), 20, 33, 17, 4), torch.float16))
    key, value = key[:, :2], value[:, :2]
    mask = torch.arange(33)[None] % 3 != 0
    call = {"key_mask": mask, "enable_gqa": True}
    for function in (sortattn.kernel_attention, sortattn.kernel_sum):
        found = function(query, key, value, "add_laplace", **call, backend="grid:48")
        assert_close(found, function(query, key, value, "add_laplace", **call, backend="reference"), 0.02)
    spoilt = query.clone()
    spoilt[0, 1, 3, 2] = torch.nan
    found = sortattn.kernel_attention(spoilt, key, value, "add_laplace", **call, backend="grid:48")
    assert found[0, 1].isnan().all()
    assert found[0, [0, 2, 3]].isfinite().all()
    # what all other keys give one that is far from them, and from the queries but one, adds up to nothing
    query, key, value = draw(Shape((1,), 40, 400, 16, 4), torch.float16)
    query[:, 0] = key[:, 0] = 1000
    value += 3
    found = sortattn.kernel_attention(query, key, value, "add_laplace", backend="grid:48")
    assert_close(found[:, :1], value[:, :1].double(), 1e-3)
    query, key, value = (part[None] for part in draw(Shape((4,), 20, 33, 17, 4), torch.float16))
    key, value = key[:, :2], value[:, :2]
    # no weight is left of keys so far away
    found = sortattn.kernel_attention(query + 1000, key, value, "add_laplace", **call, backend="grid:48")
    assert found.isfinite().all()
    options = ("add_laplace", True, 12, 1, False, True)
    points = draw(Shape((1,), 20, 24, 17, 4), torch.float16)
    inputs = (*leaves(*points), torch.empty(1, 1), *leaves(torch.ones(1)), torch.empty(0), *options)
    torch.library.opcheck(grid_gpu, inputs, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


def played():
    """A call that is played from addresses gives the same bits, for whatever inputs of its kind."""
    draws = [draw(Shape((1,), 20, 24, 17, 5), torch.float16, seed=seed) for seed in range(4)]

    def call(points):
        return sortattn.kernel_attention(*points, "add_riesz", backend="grid:20")

    wanted = [call(points) for points in draws]
    with compiled.stand_ins() as launched:
        # the first compiles, the second is recorded
        for turn, (points, other) in enumerate(zip(draws, wanted, strict=True)):
            assert torch.equal(call(points), other)
            assert len(launched) == max(0, turn - 1) * 8
        # as torch's operations are between the launches of such calls, they are not played
        masked = {"key_mask": torch.arange(24)[None] % 3 != 0, "backend": "grid:20"}
        for _ in range(3):
            sortattn.kernel_attention(*draws[0], "add_riesz", **masked)
        assert len(launched) == 16


def played_shared():
    """Calls in which inputs share their memory are not played for others, nor those that overlap at all."""
    one, two, three, four = (draw(Shape((2,), 16, 16, 3, 3), torch.float16, seed=seed) for seed in range(4))
    # beginning in the same piece of memory, eight rows apart
    piece = torch.cat([three[0], four[0]], 1).flatten()
    apart = [piece[start : start + 96].view(2, 16, 3) for start in (0, 24, 48)]

    def call(points):
        return sortattn.kernel_attention(*points, "add_riesz", backend="grid:8")

    wanted = [call(points) for points in (three, four, (four[0],) * 3, apart)]
    with compiled.stand_ins() as launched:
        # recorded with inputs that are the same, played with such only
        for points in (one, two):
            call((points[0],) * 3)
        assert torch.equal(call(three), wanted[0])
        assert not launched
        assert torch.equal(call((four[0],) * 3), wanted[2])
        assert len(launched) == 8
    with compiled.stand_ins() as launched:
        # not recorded
        for _ in range(2):
            assert torch.equal(call(apart), wanted[3])
        assert torch.equal(call(four), wanted[1])
        assert not launched


def played_rounds():
    """The same of causal calls, of which the heads are taken in rounds: if these are alike, they are played too."""
    draws = [draw(Shape((8,), 18, 18, 2, 4), torch.float16, seed=seed) for seed in range(3)]
    gpu_causal.CHUNK = 16

    def call(points):
        return sortattn.kernel_attention(*points, "add_riesz", is_causal=True, backend="grid:8")

    wanted = call(draws[2])
    # rounds of several sizes are not alike, though the size of one divides the number of heads
    for heads, number in (((0, 4, 8), 21), ((0, 2, 4, 8), 0)):
        gpu_causal.rounds = lambda *_, heads=heads: itertools.starmap(slice, itertools.pairwise(heads))
        with compiled.stand_ins() as launched:
            for points in draws[:2]:
                call(points)
            assert not launched
            assert torch.equal(call(draws[2]), wanted)
            assert len(launched) == number


def played_gradients():
    """The same of calls with gradients: the forward pass with all that it keeps, and the backward pass."""

    def call(name, points):
        points = leaves(*points)
        output = sortattn.kernel_attention(*points, name, backend="grid:12")
        return output.detach(), *torch.autograd.grad(output.square().sum(), points)

    for name, dims, number in (("add_riesz", 3, 22), ("add_laplace", 16, 22)):
        draws = [draw(Shape((1,), 12, 14, dims, 5), torch.float16, seed=seed) for seed in range(3)]
        wanted = [call(name, points) for points in draws]
        with compiled.stand_ins() as launched:
            for turn, (points, other) in enumerate(zip(draws, wanted, strict=True)):
                assert all(map(torch.equal, call(name, points), other))
                assert len(launched) == max(0, turn - 1) * number


def operators():
    """The operator's fake kernel agrees with it, and it can be compiled and mapped."""
    query, key, value = draw(Shape((1,), 20, 24, 3, 4), torch.float32)
    options = ("add_laplace", True, 12, 1, False, True)
    inputs = (*leaves(query, key, value), torch.empty(1, 1), *leaves(torch.ones(1)), torch.empty(0), *options)
    torch.library.opcheck(grid_gpu, inputs, test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))

    def call(query):
        return sortattn.kernel_attention(query, key, value, "add_bump", backend="grid:12")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(query), call(query))
    both = torch.stack([query, query + 1])
    mapped = torch.func.vmap(call)(both)
    assert_close(mapped[1], call(both[1]), 1e-6)


CHECKS = {
    check.__name__: check
    for check in (
        gradients,
        causal_gradients,
        causal_ways,
        marched,
        types,
        masks,
        sums,
        operators,
        places,
        words,
        hopper_steps,
        hopper_gradients,
        many_keys,
        far_nodes,
        few_channels,
        lines_in_order,
        played_with_cuda,
        factored,
        matrix,
        causal,
        played,
        played_shared,
        played_rounds,
        played_gradients,
    )
}


def run(what, *rest):
    """One check by its name; some take the names of a kernel and a dtype, and numbers of dimensions and of nodes."""
    arguments = (rest[0], getattr(torch, rest[1]), *map(int, rest[2:])) if rest else ()
    CHECKS[what](*arguments)


if __name__ == "__main__":
    assert INTERPRETED
    # a line for every check to do; what went wrong, and a line that ends it
    for line in sys.stdin:
        try:
            run(*line.split())
        except Exception:
            traceback.print_exc(file=sys.stdout)
        print(END, flush=True)
