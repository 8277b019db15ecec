"""StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173): rotary, LayerNorm, GELU without a gate, grouped heads; biases
all or none."""

from __future__ import annotations

from leftward.formats.families.gpt2 import ACTIVATIONS
from leftward.formats.family import QKV_APART, VOCABULARY, Family, Row, Setting
from leftward.formats.rules import WINDOW_EVERYWHERE, rotary

STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    settings=(
        Setting("vocab_size", "vocab_size"),
        Setting("max_position_embeddings", "max_seq_len"),
        Setting("num_hidden_layers", "n_layers"),
        Setting("hidden_size", "d_model"),
        Setting("num_attention_heads", "n_heads"),
        Setting("num_key_value_heads", "n_kv_heads"),
        Setting("intermediate_size", "d_ff"),
        Setting("norm_epsilon", "norm_eps"),
        Setting(
            "hidden_act",
            "feed_forward",
            {"gelu_pytorch_tanh": "gelu_tanh"} | ACTIVATIONS,
        ),
        Setting("use_bias", ("qkv_bias", "attn_out_bias", "ff_bias")),
        Setting("tie_word_embeddings", "tie_embeddings"),
        rotary(),
        WINDOW_EVERYWHERE,
    ),
    fixed={"norm": "layernorm", "qk_norm": "none"},
    defaults={
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    dropouts=("embedding_dropout", "attention_dropout", "residual_dropout"),
    rows=(
        Row("embed", ("model.embed_tokens",), VOCABULARY),
        Row("blocks.{i}.attn_norm", ("model.layers.{i}.input_layernorm",)),
        Row("blocks.{i}.attn.qkv", tuple(f"model.layers.{{i}}.self_attn.{name}_proj" for name in "qkv"), QKV_APART),
        Row("blocks.{i}.attn.o", ("model.layers.{i}.self_attn.o_proj",)),
        Row("blocks.{i}.ff_norm", ("model.layers.{i}.post_attention_layernorm",)),
        Row("blocks.{i}.ff.up", ("model.layers.{i}.mlp.c_fc",)),
        Row("blocks.{i}.ff.down", ("model.layers.{i}.mlp.c_proj",)),
        Row("norm", ("model.norm",)),
        Row("head", ("lm_head",), VOCABULARY),
    ),
    prefix="model.",
)
