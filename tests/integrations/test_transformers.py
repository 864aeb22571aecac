"""Hugging Face models with kernel attention, against the same models with the dense reference inside."""

import copy

import pytest
import torch

import sortattn

from . import tiny

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
KERNELS = ("add_laplace", "add_bump", "add_riesz", "elu", "gauss")
transformers = tiny.transformers


@pytest.fixture(autouse=True)
def registered():
    sortattn.register("auto")
    yield
    sortattn.register("auto")


def converted(name, kernel, **options):
    return sortattn.convert(tiny.build(name), kernel, **options)


def by_reference(model, given):
    """What the model gives with the dense definition inside."""
    sortattn.register(backend="reference")
    result = tiny.output(model, given)
    sortattn.register("auto")
    return result


def close(actual, expected, bound=1e-5):
    error = ((actual - expected).norm() / expected.norm()).item()
    assert error <= bound, f"relative error {error:.1e}"


def spread(actual, expected):
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", tiny.NAMES)
def test_converted_to_softmax_a_model_gives_the_same(name):
    model, given = tiny.build(name), tiny.inputs(name)
    before = tiny.output(model, given)
    close(tiny.output(sortattn.convert(model, "softmax"), given), before)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_model_runs_every_kind_of_kernel(name, kernel):
    model, given = tiny.build(name), tiny.inputs(name)
    before = tiny.output(model, given)
    after = tiny.output(sortattn.convert(model, kernel), given)
    close(after, by_reference(model, given))
    assert spread(after, before) > 1e-2, "the attention has not changed"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kernel", ["add_laplace", "softmax"])
@pytest.mark.parametrize("name", tiny.TEXT)
def test_padding_changes_nothing(name, kernel, side):
    model = converted(name, kernel)
    given = tiny.inputs(name)
    short = 7
    alone = {key: rows[1:, :short] for key, rows in given.items()}
    start = tiny.LENGTH - short if side == "left" else 0
    seen = slice(start, start + short)
    mask = torch.ones_like(given["attention_mask"])
    tokens = given["input_ids"].clone()
    mask[1] = 0
    mask[1, seen] = 1
    tokens[1] = 0
    tokens[1, seen] = given["input_ids"][1, :short]
    # positions are counted from the first token, as `generate` does with padding on the left
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    rows = tiny.output(model, padded)
    assert rows.isfinite().all()
    close(rows[1:, seen], tiny.output(model, alone))
    close(rows[:1], tiny.output(model, {key: part[:1] for key, part in given.items()}))
    close(rows[mask.bool()], by_reference(model, padded)[mask.bool()])


@pytest.mark.parametrize("name", tiny.TEXT)
def test_a_mask_that_hides_nothing_reaches_no_layer(name, monkeypatch):
    masks = []
    attend = sortattn.kernel_attention
    monkeypatch.setattr(
        "sortattn.integrations.transformers.kernel_attention",
        lambda *inputs, key_mask, **options: masks.append(key_mask) or attend(*inputs, key_mask=key_mask, **options),
    )
    model, given = converted(name, "add_laplace"), tiny.inputs(name)
    tiny.output(model, given)
    assert masks == [None, None]
    given["attention_mask"][1, 9:] = 0
    tiny.output(model, given)
    assert [tuple(mask.shape) for mask in masks[2:]] == [(2, tiny.LENGTH)] * 2


@pytest.mark.parametrize("name", ["vit", tiny.TEXT[0]])
def test_models_compile_with_one_graph(name):
    model, given = converted(name, "add_laplace", learn_bandwidth=True), tiny.inputs(name)
    if name != "vit":
        given["attention_mask"][1, 9:] = 0
    expected = tiny.output(model, given)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(tiny.output(compiled, given), expected)


@pytest.mark.parametrize("name", tiny.DECODERS)
def test_decoders_do_not_look_ahead(name):
    model, given = converted(name, "add_laplace"), tiny.inputs(name)
    before = tiny.output(model, given)
    given["input_ids"][:, 8:] = 5
    after = tiny.output(model, given)
    close(after[:, :8], before[:, :8])
    assert spread(after[:, 8:], before[:, 8:]) > 1e-2


@pytest.mark.parametrize("name", tiny.DECODERS)
def test_generation_with_a_cache_is_generation_without(name):
    model, given = converted(name, "add_laplace"), tiny.inputs(name)
    given["attention_mask"][1, :4] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(**given, use_cache=True, **options)
    assert cached.shape == (2, tiny.LENGTH + 5)
    assert cached.equal(model.generate(**given, use_cache=False, **options))


def test_a_prompt_in_two_parts_is_the_prompt():
    model, given = converted("llama", "add_laplace"), tiny.inputs("llama")
    tokens = given["input_ids"]
    with torch.no_grad():
        first = model(input_ids=tokens[:, :5], use_cache=True)
        second = model(input_ids=tokens[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    close(torch.cat([first.logits, second.logits], 1), tiny.output(model, given))


def test_a_static_cache_is_refused():
    model, given = converted("llama", "add_laplace"), tiny.inputs("llama")
    with pytest.raises(ValueError, match="a static cache"):
        model.generate(**given, max_new_tokens=3, do_sample=False, cache_implementation="static")


@pytest.mark.skipif(tiny.VERSION < 5, reason="in transformers 4 BART makes dense masks")
@pytest.mark.parametrize("kernel", ["softmax", "add_laplace"])
def test_cross_attention_sees_the_encoders_real_tokens(kernel):
    layers = {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in tiny.BART.items()}
    config = transformers.BartConfig(d_model=32, vocab_size=60, pad_token_id=0, decoder_start_token_id=1, **layers)
    model = transformers.BartModel(config).eval()
    given = {**tiny.inputs("llama"), "decoder_input_ids": torch.arange(3, 8).expand(2, 5)}
    given["attention_mask"][:, 9:] = 0
    before = tiny.output(model, given)
    after = tiny.output(sortattn.convert(model, kernel), given)
    if kernel == "softmax":
        close(after, before)
    close(after, by_reference(model, given))
    short = {**given, "input_ids": given["input_ids"][:, :9], "attention_mask": given["attention_mask"][:, :9]}
    close(after, tiny.output(model, short))


@pytest.mark.skipif(tiny.VERSION < 5, reason="transformers 4 has no such option")
def test_a_decoder_told_not_to_be_causal_is_not():
    model, given = converted("llama", "add_laplace"), tiny.inputs("llama")
    for config in {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }.values():
        config.is_causal = False
    before = tiny.output(model, given)
    given["input_ids"][:, 8:] = 5
    assert spread(tiny.output(model, given)[:, :8], before[:, :8]) > 1e-2
    given["attention_mask"] = None
    close(tiny.output(model, given), tiny.output(model, {**given, "attention_mask": torch.ones(2, tiny.LENGTH)}))


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_scale_of_the_model_is_kept(name):
    model, given = tiny.build(name), tiny.inputs(name)
    if name == "modernbert":
        pytest.skip("it has no scale of its own")
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling *= 2.0
    before = tiny.output(model, given)
    close(tiny.output(sortattn.convert(model, "softmax"), given), before)


@pytest.mark.parametrize("name", [n for n in ("bert", "vit", "llama") if n in tiny.NAMES])
def test_gradients_are_those_of_the_reference(name):
    def gradients():
        model.zero_grad()
        output = model(**given)[0]
        # not its squares, whose mean a normalisation at the end makes a constant
        (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(0))).mean().backward()
        return {key: part.grad.clone() for key, part in model.named_parameters() if part.grad is not None}

    model, given = converted(name, "add_laplace", learn_bandwidth=True), tiny.inputs(name)
    fast = gradients()
    sortattn.register(backend="reference")
    dense = gradients()
    assert any(key.endswith("log_bandwidth") for key in fast)
    for key, gradient in dense.items():
        assert (fast[key] - gradient).norm() <= 1e-4 * (gradient.norm() + 1e-6), key


# saving and loading


@pytest.mark.parametrize("name", tiny.NAMES)
def test_bandwidths_survive_saving_and_loading(name, tmp_path):
    table = torch.tensor([[0.3, 0.5, 0.7, 0.9], [0.4, 0.6, 0.8, 1.0]])
    model, given = converted(name, "add_laplace", bandwidth=table, learn_bandwidth=True), tiny.inputs(name)
    # as training would
    for module in model.modules():
        if hasattr(module, "log_bandwidth"):
            module.log_bandwidth.data += 0.25
    expected = tiny.output(model, given)
    assert spread(expected, tiny.output(converted(name, "add_laplace"), given)) > 1e-3
    for folder in (tmp_path / "once", tmp_path / "twice"):
        model.save_pretrained(folder)
        model = type(model).from_pretrained(folder, attn_implementation="sortattn_add_laplace").eval()
        close(tiny.output(model, given), expected, 1e-6)
    learned = [part for key, part in model.named_parameters() if key.endswith("log_bandwidth")]
    assert len(learned) == 2
    assert all(part.requires_grad for part in learned)


@pytest.mark.skipif(tiny.VERSION < 5, reason="transformers 4 reads no attention from a config")
def test_a_converted_model_is_loaded_with_its_kernel_unasked(tmp_path):
    model, given = converted("nomic", "add_bump", bandwidth=2.0), tiny.inputs("nomic")
    expected = tiny.output(model, given)
    for folder in (tmp_path / "once", tmp_path / "twice"):
        model.save_pretrained(folder)
        model = transformers.AutoModel.from_pretrained(folder).eval()
        close(tiny.output(model, given), expected, 1e-6)
    assert not any(part.requires_grad for key, part in model.named_parameters() if key.endswith("log_bandwidth"))


def test_a_converted_model_loaded_with_softmax_is_warned_of(tmp_path):
    converted("llama", "add_bump").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="was converted to 'sortattn_add_bump' and is loaded with 'sdpa'"):
        transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")


def test_from_pretrained_with_the_name_of_a_kernel(tmp_path):
    model, given = tiny.build("llama"), tiny.inputs("llama")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sortattn_add_riesz")
    close(tiny.output(loaded.eval(), given), tiny.output(sortattn.convert(model, "add_riesz"), given), 1e-6)


def test_a_copy_of_a_converted_model_keeps_its_bandwidths():
    model, given = converted("llama", "add_laplace", bandwidth=[0.2, 0.4, 0.6, 0.8]), tiny.inputs("llama")
    close(tiny.output(copy.deepcopy(model), given), tiny.output(model, given), 1e-6)


def test_converting_again_starts_anew():
    model, given = converted("llama", "add_laplace", learn_bandwidth=True), tiny.inputs("llama")
    sortattn.convert(model, "gauss")
    assert not [key for key, _ in model.named_parameters() if key.endswith("log_bandwidth")]
    close(tiny.output(model, given), tiny.output(converted("llama", "gauss"), given), 1e-6)


# refusals


@pytest.mark.parametrize("name", [*tiny.WITHOUT_INTERFACE, "deberta"])
def test_models_without_the_interface_are_refused(name):
    with pytest.raises(ValueError, match="does not use the attention interface"):
        sortattn.convert(tiny.build(name), "add_laplace")


def test_what_is_no_model_of_transformers_is_refused():
    with pytest.raises(TypeError, match="expected a model of transformers, got Linear"):
        sortattn.convert(torch.nn.Linear(2, 2), "add_laplace")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("laplac",), ValueError, "unknown kernel 'laplac', expected one of softmax, "),
        ((sortattn.KERNELS["elu"],), TypeError, "kernel must be a name"),
        (("elu", -1.0), ValueError, "bandwidth must be positive, got -1.0"),
        (("elu", float("inf")), ValueError, "bandwidth must be finite, got inf"),
        (("elu", "wide"), TypeError, "bandwidth must be numbers or a tensor, got 'wide'"),
        (("elu", [1.0, 2.0]), ValueError, r"one per head \(4,\) or one per layer and head \(2, 4\), got shape \(2,\)"),
    ],
)
def test_wrong_arguments_leave_the_model_alone(arguments, error, message):
    model, given = tiny.build("llama"), tiny.inputs("llama")
    before = tiny.output(model, given)
    with pytest.raises(error, match=message):
        sortattn.convert(model, *arguments)
    assert tiny.output(model, given).equal(before)


def test_converting_keeps_the_backend_that_was_registered():
    sortattn.register(backend="sorted")
    model = converted("llama", "riesz")
    with pytest.raises(RuntimeError, match="sorting sums additive kernels .*, not riesz"):
        tiny.output(model, tiny.inputs("llama"))


def test_a_registered_grid_has_its_nodes():
    model, given = converted("vit", "add_laplace"), tiny.inputs("vit")
    exact = tiny.output(model, given)
    for nodes, least, most in ((8, 1e-2, 1e-1), (128, 0, 1e-5)):
        sortattn.register(backend=f"grid:{nodes}")
        assert least <= spread(tiny.output(converted("vit", "add_laplace"), given), exact) < most


def test_unknown_backends_are_refused():
    for name in ("fast", "tiled:3", "grid:"):
        with pytest.raises(ValueError, match=f"unknown backend '{name}', expected one of auto"):
            sortattn.register(backend=name)


def test_sliding_windows_are_refused():
    model = tiny.build("qwen", use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.raises(ValueError, match="Qwen2Attention asks .* a sliding window"):
        tiny.output(sortattn.convert(model, "add_laplace"), tiny.inputs("qwen"))


@pytest.mark.skipif(tiny.VERSION < 5, reason="ModernBERT has no attention interface in transformers 4")
def test_a_window_in_some_layers_is_refused():
    model = tiny.build("modernbert", global_attn_every_n_layers=2)
    with pytest.raises(ValueError, match="a sliding window"):
        tiny.output(sortattn.convert(model, "add_laplace"), tiny.inputs("modernbert"))


def test_dense_masks_are_refused():
    model, given = converted("llama", "add_laplace"), tiny.inputs("llama")
    given["attention_mask"] = torch.zeros(2, 1, tiny.LENGTH, tiny.LENGTH)
    with pytest.raises(ValueError, match=r"a dense mask of shape \(2, 1, 12, 12\)"):
        tiny.output(model, given)


def test_packed_sequences_are_refused():
    model, given = converted("llama", "add_laplace"), tiny.inputs("llama", batch=1)
    positions = torch.tensor([[*range(5), *range(7)]])
    with pytest.raises(ValueError, match="packed sequences"), torch.no_grad():
        model(input_ids=given["input_ids"], position_ids=positions, use_cache=False)


def test_attention_dropout_in_training_is_refused_and_harmless_in_evaluation():
    model, given = sortattn.convert(tiny.build("llama", attention_dropout=0.1), "elu"), tiny.inputs("llama")
    tiny.output(model, given)
    with pytest.raises(ValueError, match=r"attention dropout \(0.1\); set it to zero in the config"):
        model.train()(**given)


def test_soft_caps_are_refused():
    config = transformers.Gemma2Config(
        **tiny._TEXT, num_key_value_heads=2, head_dim=8, layer_types=["full_attention"] * 2
    )
    model = sortattn.convert(transformers.Gemma2Model(config).eval(), "add_laplace")
    with pytest.raises(ValueError, match="Gemma2Attention asks .* a soft cap"):
        tiny.output(model, tiny.inputs("llama"))


@pytest.mark.skipif(tiny.VERSION < 5, reason="T5 has no attention interface in transformers 4")
def test_position_biases_are_refused():
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=60, dropout_rate=0.0
    )
    model = sortattn.convert(transformers.T5EncoderModel(config).eval(), "add_laplace")
    with pytest.raises(ValueError, match="T5Attention asks .* a position bias"):
        tiny.output(model, tiny.inputs("llama"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"position_bias": 0}, "a position bias"),
        ({"s_aux": 0}, "attention sinks"),
        ({"head_mask": 0}, "a head mask"),
        ({"output_attentions": True}, "output_attentions"),
    ],
)
def test_other_options_are_refused_by_name(option, message):
    forward = transformers.AttentionInterface._global_mapping["sortattn_elu"]
    rows = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=message):
        forward(torch.nn.Identity(), rows, rows, rows, None, **option)


def test_bandwidths_of_another_kernel_are_refused():
    model = converted("llama", "add_laplace", bandwidth=0.7)
    model.set_attn_implementation("sortattn_gauss")
    with pytest.raises(ValueError, match="are for the kernel 'add_laplace', but its attention is now 'gauss'"):
        tiny.output(model, tiny.inputs("llama"))
