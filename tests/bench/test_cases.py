import pytest
import torch

from sortattn.bench.cases import BOTH, FORWARD, Case, Settings, make_call, make_groups, make_inputs


def test_groups_hold_softmax_first_and_sizes_ascend():
    groups = make_groups(["relu", "elu"], ["auto", "linear"], ["float32"], [64, 16, 64], backward=True)
    assert [(group.cases[0].passes, group.cases[0].n) for group in groups] == [
        (FORWARD, 16),
        (FORWARD, 64),
        (BOTH, 16),
        (BOTH, 64),
    ]
    for group in groups:
        assert [(case.kernel, case.backend) for case in group.cases] == [
            ("softmax", "sdpa"),
            ("relu", "auto"),
            ("relu", "linear"),
            ("elu", "auto"),
            ("elu", "linear"),
        ]
        assert len({(case.dtype, case.passes, case.n) for case in group.cases}) == 1


def test_the_ways_of_softmax_are_not_crossed_with_kernels():
    (group,) = make_groups(["relu", "elu"], ["cudnn", "auto"], ["float16"], [16])
    pairs = [(case.kernel, case.backend) for case in group.cases]
    assert pairs == [("softmax", "sdpa"), ("softmax", "cudnn"), ("relu", "auto"), ("elu", "auto")]


def test_inputs_have_the_shapes_of_the_settings_and_are_the_same_for_every_kernel():
    settings = Settings(batch=2, heads=3, head_dim=8, value_dim=5)
    case = Case("elu", "auto", "float16", BOTH, 7)
    inputs = make_inputs(case, settings)
    assert [tuple(part.shape) for part in inputs] == [(2, 3, 7, 8), (2, 3, 7, 8), (2, 3, 7, 5)]
    assert all(part.dtype == torch.float16 and part.requires_grad and part.is_leaf for part in inputs)
    others = make_inputs(Case("softmax", "sdpa", "float16", FORWARD, 7), settings)
    assert all(torch.equal(one, other) for one, other in zip(inputs, others, strict=True))
    assert not any(part.requires_grad for part in others)


@pytest.mark.parametrize("passes", [FORWARD, BOTH])
@pytest.mark.parametrize(("kernel", "backend"), [("softmax", "sdpa"), ("elu", "reference")])
@pytest.mark.parametrize("causal", [False, True])
def test_a_call_runs_what_the_case_says(monkeypatch, passes, kernel, backend, causal):
    seen = []
    if kernel == "softmax":
        module, name = torch.nn.functional, "scaled_dot_product_attention"
    else:
        import sortattn.bench.cases as module

        name = "kernel_attention"
    honest = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: seen.append((args, options)) or honest(*args, **options))
    differentiate = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args: seen.append("grad") or differentiate(*args))
    settings = Settings(heads=1, head_dim=4, value_dim=4, causal=causal)
    case = Case(kernel, backend, "float64", passes, 6)
    make_call(case, settings, make_inputs(case, settings))()
    arguments, options = seen[0]
    assert arguments[3:] == (() if kernel == "softmax" else (kernel,))
    assert options["is_causal"] is causal
    assert options.get("backend", "sdpa") == backend
    assert seen[1:] == ([] if passes == FORWARD else ["grad"])
