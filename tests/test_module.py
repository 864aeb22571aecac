"""`KernelAttention` against the same computation written out."""

import copy
import io

import pytest
import torch

import sortattn

from .cases import assert_close
from .definition import FORWARD

KERNELS = {
    **{name: name for name in ("add_laplace", "add_riesz", "softmax", "elu")},
    "spline": sortattn.Spline([0.0], [-0.5, 0.25], offset=1.0),
}


def by_hand(module, query, key, value, **options):
    """Project, split into heads, attend in each, join, project."""

    def split(rows, heads):
        return torch.stack(rows.split(module.head_dim, -1), -3) if heads > 1 else rows.unsqueeze(-3)

    heads = split(query @ module.query_proj.weight.T + module.query_proj.bias, module.num_heads)
    keys = split(key @ module.key_proj.weight.T + module.key_proj.bias, module.kv_heads)
    values = split(value @ module.value_proj.weight.T + module.value_proj.bias, module.kv_heads)
    group = module.num_heads // module.kv_heads
    keys, values = (part.repeat_interleave(group, -3) for part in (keys, values))
    rows = sortattn.kernel_attention(heads, keys, values, module.kernel, backend="reference", **options)
    joined = torch.cat(rows.unbind(-3), -1)
    return joined @ module.out_proj.weight.T + module.out_proj.bias


@pytest.fixture
def rows(device):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 21, 12, generator=generator, dtype=torch.float64).to(device)


@pytest.fixture
def context(device):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 33, 12, generator=generator, dtype=torch.float64).to(device)


def make(device, *args, **options):
    torch.manual_seed(0)
    module = sortattn.KernelAttention(*args, **options, device=device, dtype=torch.float64)
    # biases start at zero: give them something to do
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


@pytest.mark.parametrize("kernel", [*KERNELS.values()], ids=KERNELS.keys())
def test_self_attention(kernel, rows, device):
    module = make(device, 12, 3, kernel=kernel)
    assert_close(module(rows), by_hand(module, rows, rows, rows), FORWARD[torch.float64])


def test_cross_attention_with_sizes_of_its_own(rows, context, device):
    module = make(device, 12, 3, key_dim=12, value_dim=5)
    value = context[..., :5]
    assert_close(module(rows, context, value), by_hand(module, rows, context, value), FORWARD[torch.float64])
    # the value defaults to the key
    module = make(device, 12, 3)
    assert_close(module(rows, context), by_hand(module, rows, context, context), FORWARD[torch.float64])


def test_padded_batches(rows, context, device):
    module = make(device, 12, 3)
    mask = (torch.rand(2, 33, generator=torch.Generator().manual_seed(2)) < 0.6).to(device)
    output = module(rows, context, key_mask=mask)
    for b in range(2):
        seen = context[b : b + 1, mask[b]]
        assert_close(output[b : b + 1], by_hand(module, rows[b : b + 1], seen, seen), FORWARD[torch.float64])


def test_grouped_heads(rows, device):
    module = make(device, 12, 4, kv_heads=2)
    assert module.key_proj.out_features == module.value_proj.out_features == 6
    assert_close(module(rows), by_hand(module, rows, rows, rows), FORWARD[torch.float64])


def test_causal_attention_does_not_look_ahead(rows, device):
    module = make(device, 12, 3, is_causal=True)
    before = module(rows)
    assert_close(before, by_hand(module, rows, rows, rows, is_causal=True), FORWARD[torch.float64])
    changed = rows.clone()
    changed[:, 10:] += 1.0
    after = module(changed)
    assert_close(after[:, :10], before[:, :10], FORWARD[torch.float64])
    assert (after[:, 10:] != before[:, 10:]).any()


def test_unbatched_rows(rows, context, device):
    module = make(device, 12, 3)
    batched = module(rows[:1], context[:1])
    assert_close(module(rows[0], context[0]), batched[0], FORWARD[torch.float64])
    mask = torch.ones(33, dtype=torch.bool, device=device)
    mask[5:] = False
    masked = module(rows[:1], context[:1], key_mask=mask[None])
    assert_close(module(rows[0], context[0], key_mask=mask), masked[0], FORWARD[torch.float64])


def test_learned_bandwidths_start_at_the_default_and_are_learned_per_head(rows, device):
    for options, start in (({}, 0.5), ({"bandwidth": 3.0}, 3.0), ({"kernel": "softmax"}, 4**0.25)):
        module = sortattn.KernelAttention(12, 3, learn_bandwidth=True, **options, device=device)
        assert module.log_bandwidth.exp().tolist() == pytest.approx([start] * 3)
    fixed, learned = make(device, 12, 3), make(device, 12, 3, learn_bandwidth=True)
    learned.load_state_dict({**fixed.state_dict(), "log_bandwidth": torch.full((3,), 0.5, dtype=torch.float64).log()})
    # the default of add_laplace
    assert_close(learned(rows), fixed(rows), FORWARD[torch.float64])
    learned(rows).square().sum().backward()
    assert learned.log_bandwidth.grad.shape == (3,)
    assert (learned.log_bandwidth.grad != 0).all()
    taus = torch.tensor([0.3, 0.5, 2.0], dtype=torch.float64, device=device)
    learned.log_bandwidth.data = taus.log()
    assert_close(learned(rows), by_hand(learned, rows, rows, rows, bandwidth=taus), FORWARD[torch.float64])


def test_parameters_that_were_made_without_memory_are_reset(device):
    module = sortattn.KernelAttention(12, 3, "softmax", learn_bandwidth=True, device="meta").to_empty(device=device)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    module.reset_parameters()
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert module.log_bandwidth.exp().tolist() == pytest.approx([4**0.25] * 3)


def test_every_parameter_gets_a_gradient(rows, device):
    module = make(device, 12, 4, kv_heads=2, kernel="add_riesz", learn_bandwidth=True)
    module(rows).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # a constant added to all keys moves no attention weight of a stationary kernel; add_riesz is not quite
        assert (parameter.grad != 0).any(), name


@pytest.mark.parametrize("learn", [False, True], ids=["fixed", "learned"])
def test_deepcopy_and_state_dict_keep_everything(learn, rows, device):
    options = {"kernel": "add_bump", "kv_heads": 1, "learn_bandwidth": learn}
    module = make(device, 12, 3, **options)
    expected = module(rows)
    twin = copy.deepcopy(module)
    assert torch.equal(twin(rows), expected)
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(twin.parameters(), module.parameters(), strict=True))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh = sortattn.KernelAttention(12, 3, **options, device=device, dtype=torch.float64)
    assert not torch.equal(fresh(rows), expected)
    assert set(module.state_dict()) == set(fresh.state_dict())
    assert ("log_bandwidth" in module.state_dict()) == learn
    fresh.load_state_dict(torch.load(file))
    assert torch.equal(fresh(rows), expected)


def test_a_copied_kernel_with_coefficients_still_works(rows, device):
    kernel = sortattn.PolynomialExponential([1.0, 0.5])
    module = make(device, 12, 3, kernel=kernel)
    assert torch.equal(copy.deepcopy(module)(rows), module(rows))


def test_gradients_reach_the_coefficients_of_a_kernel(rows, device):
    slopes = torch.tensor([-0.5, 0.25], dtype=torch.float64, requires_grad=True)
    module = make(device, 12, 3, kernel=sortattn.Spline([0.0], slopes, offset=1.0))
    module(rows).square().sum().backward()
    assert (slopes.grad != 0).all()


@pytest.mark.usefixtures("reproducible")
@pytest.mark.parametrize("backend", ["sorted", "tiled"])
def test_coefficients_that_are_parameters_are_trained_saved_and_copied_with_the_module(backend, rows, device):
    def build():
        slopes, offset = (torch.nn.Parameter(torch.tensor(numbers)) for numbers in ([-0.5, 0.25], 1.0))
        kernel = sortattn.Spline([0.0], slopes, offset=offset)
        return sortattn.KernelAttention(12, 3, kernel=kernel, backend=backend).to(device, torch.float64)

    module = build()
    before = module(rows)
    assert {"kernel_slopes", "kernel_offset"} < set(module.state_dict())
    before.square().sum().backward()
    assert (module.kernel_slopes.grad != 0).all()
    with torch.no_grad():
        module.kernel_slopes.copy_(torch.tensor([-0.75, 0.5]))
    after = module(rows)
    assert not torch.equal(after, before)
    twin, fresh = copy.deepcopy(module), build()
    fresh.load_state_dict(module.state_dict())
    for other in (twin, fresh):
        assert torch.equal(other(rows), after)
        assert other.kernel.slopes is other.kernel_slopes
        assert other.kernel.slopes is not module.kernel.slopes


@pytest.mark.parametrize("backend", ["sorted", "tiled"])
@pytest.mark.parametrize("way", ["load", "assign", "call"])
def test_parameters_of_a_kernel_may_be_replaced(way, backend, rows, device):
    """A spline that vanishes outside becomes one that does not, though it needs no gradient."""

    def module(slopes):
        kernel = sortattn.Spline([-1.0, 0.0, 1.0], torch.nn.Parameter(slopes, requires_grad=False))
        torch.manual_seed(0)
        return sortattn.KernelAttention(12, 3, kernel, backend=backend).to(rows)

    before, after = (torch.tensor(slopes, dtype=torch.float64) for slopes in ([0, 1, -1, 0], [2, 1, -1, -3]))
    wanted, changed = module(after)(rows), module(before)
    state = {**changed.state_dict(), "kernel_slopes": after.clone().to(rows)}
    if way == "call":
        found = torch.func.functional_call(changed, state, (rows,))
    else:
        changed.load_state_dict(state, assign=way == "assign")
        found = changed(rows)
    assert_close(found, wanted, FORWARD[torch.float64])


def test_without_biases_there_are_none(device):
    module = sortattn.KernelAttention(12, 3, bias=False, device=device)
    assert all(not name.endswith("bias") for name, _ in module.named_parameters())


def test_its_text_says_what_it_is(device):
    text = str(sortattn.KernelAttention(12, 4, kernel="add_bump", kv_heads=2, device=device))
    assert "(12, num_heads=4, kv_heads=2, kernel='add_bump', bandwidth=1.5" in text.replace("\n  ", "")
    options = {"learn_bandwidth": True, "is_causal": True, "backend": "sorted"}
    text = str(sortattn.KernelAttention(12, 4, **options, device=device))
    assert "bandwidth=0.5, learn_bandwidth=True, is_causal=True, backend='sorted'" in text


def test_training_lowers_the_loss(device):
    torch.manual_seed(0)
    module = sortattn.KernelAttention(8, 2, kernel="add_laplace", learn_bandwidth=True).to(device)
    rows = torch.randn(4, 30, 8, device=device)
    wanted = rows.roll(1, 1)
    optimiser = torch.optim.Adam(module.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        optimiser.zero_grad()
        loss = (module(rows) - wanted).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 10, "num_heads": 3}, "embed_dim must be a multiple of num_heads, got 10 and 3"),
        ({"embed_dim": 12, "num_heads": 0}, "num_heads must be a whole number from 1, got 0"),
        ({"embed_dim": -12, "num_heads": 4}, "embed_dim must be a whole number from 1, got -12"),
        ({"embed_dim": "12", "num_heads": 4}, "embed_dim must be a whole number from 1, got '12'"),
        ({"embed_dim": 12.0, "num_heads": 4}, "embed_dim must be a whole number from 1, got 12.0"),
        ({"embed_dim": 12, "num_heads": 4, "key_dim": 0}, "key_dim must be a whole number from 1, got 0"),
        ({"embed_dim": 12, "num_heads": 4, "value_dim": 2.5}, "value_dim must be a whole number from 1, got 2.5"),
        ({"embed_dim": 12, "num_heads": 4, "kv_heads": 3}, "num_heads must be a multiple of kv_heads, got 4 and 3"),
        ({"embed_dim": 12, "num_heads": 4, "kv_heads": 0}, "kv_heads must be a whole number from 1, got 0"),
        ({"embed_dim": 12, "num_heads": 4, "bandwidth": -1.0}, "bandwidth must be positive, got -1.0"),
        ({"embed_dim": 12, "num_heads": 4, "kernel": "cosine"}, "unknown kernel 'cosine', expected one of softmax, "),
        ({"embed_dim": 12, "num_heads": 4, "backend": "cuda"}, "unknown backend 'cuda', expected one of auto, "),
    ],
)
def test_wrong_sizes_are_told(arguments, message):
    with pytest.raises(ValueError, match=message):
        sortattn.KernelAttention(**arguments)


def test_what_is_neither_true_nor_false_is_told():
    with pytest.raises(TypeError, match="is_causal must be True or False, got str"):
        sortattn.KernelAttention(8, 2, is_causal="no")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"query": torch.ones(2, 5, 7)}, r"query must be a tensor of shape \(..., length, 8\), got \(2, 5, 7\)"),
        ({"query": torch.ones(8)}, r"query must be a tensor of shape \(..., length, 8\), got \(8,\)"),
        ({"query": [[1.0] * 8]}, r"query must be a tensor of shape \(..., length, 8\), got list"),
        ({"key": torch.ones(2, 5, 8)}, r"key must be a tensor of shape \(..., length, 6\), got \(2, 5, 8\)"),
        ({"value": torch.ones(2, 5, 8)}, r"value must be a tensor of shape \(..., length, 3\), got \(2, 5, 8\)"),
        ({"key_mask": torch.ones(2, 6) > 0}, r"\(B, N\) = \(2, 5\), .*, got shape \(2, 6\)"),
    ],
)
def test_wrong_inputs_are_told(inputs, message):
    module = sortattn.KernelAttention(8, 2, key_dim=6, value_dim=3)
    good = {"query": torch.ones(2, 4, 8), "key": torch.ones(2, 5, 6), "value": torch.ones(2, 5, 3)}
    with pytest.raises(ValueError, match=message):
        module(**{**good, **inputs})
