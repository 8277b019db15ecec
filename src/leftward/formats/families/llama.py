"""Llama (Touvron et al. 2023, arXiv 2302.13971): rotary, RMSNorm, SwiGLU, grouped heads; biases all or none."""

from __future__ import annotations

from leftward.formats.family import HALVES_APART, QKV_APART, VOCABULARY, Family, Row, Setting
from leftward.formats.rules import rotary

# What most later classes took over.
SHAPE = (
    Setting("vocab_size", "vocab_size"),
    Setting("max_position_embeddings", "max_seq_len"),
    Setting("num_hidden_layers", "n_layers"),
    Setting("hidden_size", "d_model"),
    Setting("num_attention_heads", "n_heads"),
    Setting("intermediate_size", "d_ff"),
    Setting("tie_word_embeddings", "tie_embeddings"),
)
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
SETTINGS = (
    *SHAPE,
    Setting("num_key_value_heads", "n_kv_heads"),
    Setting("head_dim", "head_dim"),
    Setting("rms_norm_eps", "norm_eps"),
    Setting("hidden_act", "feed_forward", GATED),
    Setting("attention_bias", ("qkv_bias", "attn_out_bias")),
)


def without(*theirs: str) -> tuple[Setting, ...]:
    """SETTINGS but for the keys that a class lacks or means in another way."""
    return tuple(setting for setting in SETTINGS if setting.theirs not in theirs)


DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
ATTENTION = (
    Row("embed", ("model.embed_tokens",), VOCABULARY),
    Row("blocks.{i}.attn.qkv", tuple(f"model.layers.{{i}}.self_attn.{name}_proj" for name in "qkv"), QKV_APART),
    Row("blocks.{i}.attn.o", ("model.layers.{i}.self_attn.o_proj",)),
    Row("norm", ("model.norm",)),
    Row("head", ("lm_head",), VOCABULARY),
)
NORMS = (
    Row("blocks.{i}.attn_norm", ("model.layers.{i}.input_layernorm",)),
    Row("blocks.{i}.ff_norm", ("model.layers.{i}.post_attention_layernorm",)),
)
QK_NORMS = (
    Row("blocks.{i}.attn.q_norm", ("model.layers.{i}.self_attn.q_norm",)),
    Row("blocks.{i}.attn.k_norm", ("model.layers.{i}.self_attn.k_norm",)),
)
FEED_FORWARD = (
    Row("blocks.{i}.ff.up", ("model.layers.{i}.mlp.gate_proj", "model.layers.{i}.mlp.up_proj"), HALVES_APART),
    Row("blocks.{i}.ff.down", ("model.layers.{i}.mlp.down_proj",)),
)
ROWS = (*ATTENTION, *NORMS, *FEED_FORWARD)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    settings=(*SETTINGS, Setting("mlp_bias", "ff_bias"), rotary()),
    fixed={"qk_norm": "none"},
    suits=lambda config: config.d_model % config.n_heads == 0,  # transformers refuses others even if head_dim is given
    defaults={**DEFAULTS, "mlp_bias": False},
    dropouts=("attention_dropout",),
    rows=ROWS,
    prefix="model.",
)
