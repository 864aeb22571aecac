"""Small random models of transformers, built from their configs."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

VERSION = int(transformers.__version__.split(".")[0])
LENGTH = 12
VOCABULARY = 60
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SENTENCE = "a cat sat on the mat and slept all day : search document query"
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {**_SIZES, "vocab_size": VOCABULARY, "pad_token_id": 0}


def _bert(**options):
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**{**_TEXT, **dropouts, **options})
    return transformers.BertModel(config)


def _nomic(**options):
    return transformers.NomicBertModel(transformers.NomicBertConfig(**_TEXT, **options))


def _modern(**options):
    # every layer global: the other layers have a sliding window
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = transformers.ModernBertConfig(**_TEXT, **tokens, **{"global_attn_every_n_layers": 1, **options})
    return transformers.ModernBertModel(config)


def _vit(**options):
    config = transformers.ViTConfig(
        **_SIZES, image_size=8, patch_size=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **options
    )
    return transformers.ViTModel(config)


def _llama(**options):
    config = transformers.LlamaConfig(**_TEXT, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, **options)
    return transformers.LlamaForCausalLM(config)


def _qwen(**options):
    config = transformers.Qwen2Config(**_TEXT, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, **options)
    return transformers.Qwen2ForCausalLM(config)


def _deberta(**options):
    return transformers.DebertaV2Model(transformers.DebertaV2Config(**_TEXT, **options))


BART = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
_BUILDERS = {"bert": _bert, "nomic": _nomic, "modernbert": _modern, "vit": _vit, "llama": _llama, "qwen": _qwen}
_ODD = {"deberta": _deberta}
# in transformers 4 BERT and ModernBERT have attention of their own, and NomicBert is not there
NAMES = tuple(_BUILDERS) if VERSION >= 5 else ("vit", "llama", "qwen")
WITHOUT_INTERFACE = () if VERSION >= 5 else ("bert", "modernbert")
ENCODERS = tuple(name for name in NAMES if name in ("bert", "nomic", "modernbert"))
DECODERS = ("llama", "qwen")
TEXT = (*ENCODERS, *DECODERS)


def build(name: str, **options):
    """The model of this name with random weights, ready for evaluation."""
    torch.manual_seed(0)
    model = {**_BUILDERS, **_ODD}[name](**options).eval()
    # random models start with weights so small that attention is uniform, whatever the kernel
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 6.0
    return model


def tokenizer():
    """A tokenizer of a few words, the size of the models' vocabulary."""
    words = [*SPECIAL, *SENTENCE.split()]
    return transformers.BertTokenizerFast(vocab={word: place for place, word in enumerate(words)}, model_max_length=64)


def inputs(name: str, batch: int = 2, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """Random input without padding."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 8, 8, generator=generator)}
    tokens = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones(batch, length, dtype=torch.long)}


@torch.no_grad()
def output(model, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The last hidden state, or the logits."""
    return model(**given)[0]
