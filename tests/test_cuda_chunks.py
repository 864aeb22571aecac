"""`tiled` where heads are many: their keys and values are made ready once, and blocks walk over chunks of them."""

import pytest
import torch

import sortattn
from sortattn.ops.tiled import cuda_kernels

from .cases import assert_close
from .definition import FORWARD, GRADIENT

HALF, BRAIN = torch.float16, torch.bfloat16
# so many that more than two blocks come to every multiprocessor of a GPU
BATCH, HEADS = 12, 16
# those that are compared with the definition
SOME = [(0, 0), (5, 9), (11, 15)]
# of queries and keys, dimensions and channels
PLAIN, ODD = (150, 170, 64, 64), (131, 203, 40, 20)
SQUARE, LOW, HIGH = (170, 170, 36, 64), (140, 200, 64, 64), (200, 163, 64, 30)


@pytest.fixture(autouse=True)
def _cuda_only(device):
    if device != "cuda":
        pytest.skip("a way through CUDA kernels, emulated in test_tiled_emulated.py; run with --device cuda")


def draw(shape, dtype=torch.float32, groups=1, change=lambda query, key, value: None):
    queries, keys, dims, channels = shape
    torch.manual_seed(3)
    query = torch.randn(BATCH, HEADS, queries, dims, device="cuda")
    key, value = (torch.randn(BATCH, HEADS // groups, keys, n, device="cuda") for n in (dims, channels))
    # no two are so close to a kink that rounding decides on which side
    query, key = (query * 1024).round() / 1024 + 1 / 2048, (key * 1024).round() / 1024
    change(query, key, value)
    return [part.to(dtype).requires_grad_() for part in (query, key, value)]


def far(query, key, value):
    query[5, 9, 7, :8], key[0, 0, 3, 8:] = 300.0, -200.0


def shifted(query, key, value):
    query += 100
    key += 100


def tied(query, key, value):
    query[..., ::2], key[..., ::2] = (part[..., ::2].mul(2).round().div(2) for part in (query, key))


def huge(query, key, value):
    value[0] *= 1e30
    value[5] *= 1e-20


def small(query, key, value):
    value *= 0.02


CALLS = {
    "plain": (PLAIN, {}, {}),
    "odd sizes": (ODD, {}, {}),
    "causal": (SQUARE, {}, {"is_causal": True}),
    "causal, more keys": (LOW, {}, {"is_causal": True}),
    "causal, more queries": (HIGH, {}, {"is_causal": True}),
    "float16": (PLAIN, {"dtype": HALF}, {}),
    "bfloat16": (ODD, {"dtype": BRAIN}, {}),
    "groups": (PLAIN, {"groups": 4}, {"enable_gqa": True}),
    **{change.__name__: (PLAIN, {"change": change}, {}) for change in (far, shifted, tied, huge, small)},
}


def check(points, name, groups=1, **options) -> None:
    """Output and gradients of some heads against the definition in float64."""
    output = sortattn.kernel_attention(*points, name, backend="tiled", **options)
    gradient = torch.randn_like(output)
    gradients = torch.autograd.grad(output, points, gradient)
    dtype = output.dtype
    options.pop("enable_gqa", None)
    mask, bandwidth = options.pop("key_mask", None), options.pop("bandwidth", None)
    for b, h in SOME:
        own, other = ((slice(b, b + 1), slice(head, head + 1)) for head in (h, h // groups))
        places = zip(points, (own, other, other), strict=True)
        exact = [part[place].detach().double().requires_grad_() for part, place in places]
        more = {"key_mask": mask[b : b + 1]} if mask is not None else {}
        more |= {"bandwidth": bandwidth[h].item()} if bandwidth is not None else {}
        expected = sortattn.kernel_attention(*exact, name, backend="reference", **options, **more)
        assert_close(output[own], expected, FORWARD[dtype])
        if groups == 1:
            wanted = torch.autograd.grad(expected, exact, gradient[own].double())
            for found, want in zip(gradients, wanted, strict=True):
                assert_close(found[own], want, GRADIENT[dtype])


every_kernel = pytest.mark.parametrize("name", ["add_laplace", "add_bump"])


@every_kernel
@pytest.mark.parametrize("call", CALLS)
def test_sums_over_chunks_are_those_of_the_definition(name, call):
    shape, drawn, options = CALLS[call]
    check(draw(shape, **drawn), name, drawn.get("groups", 1), **options)


@every_kernel
def test_masked_keys_and_bandwidths_of_heads_count_in_chunks(name):
    points = draw(PLAIN)
    mask = torch.rand(BATCH, PLAIN[1], device="cuda") < 0.7
    mask[:, 64:128] = False
    check(points, name, key_mask=mask)
    check(points, name, bandwidth=torch.linspace(0.3, 2.0, HEADS, device="cuda"))


@every_kernel
def test_what_is_no_number_stays_in_its_head(name):
    points = [part.detach() for part in draw(PLAIN)]
    before = sortattn.kernel_attention(*points, name, backend="tiled")
    for part, place in zip(points, ((0, 1), (2, 3), (4, 5)), strict=True):
        part[place][6, 7] = float("nan")
    output = sortattn.kernel_attention(*points, name, backend="tiled")
    spoilt = torch.zeros(BATCH, HEADS, dtype=torch.bool, device="cuda")
    for place in ((0, 1), (2, 3), (4, 5)):
        spoilt[place] = True
    assert output[spoilt].isnan().all()
    assert torch.equal(output[~spoilt], before[~spoilt])


@every_kernel
def test_so_many_heads_go_by_chunks_on_hopper(name, monkeypatch):
    if not cuda_kernels.walks(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("this GPU has no room for the walk over chunks")
    asked = []
    monkeypatch.setattr(
        cuda_kernels, "chunks_of", lambda *given, true=cuda_kernels.chunks_of: asked.append(given) or true(*given)
    )
    sortattn.kernel_attention(*(part.detach() for part in draw((137, 170, 64, 64))), name, backend="tiled")
    assert asked
