"""BLOOM (Le Scao et al. 2022, arXiv 2211.05100): ALiBi, and a norm right after the embedding."""

from __future__ import annotations

from leftward.formats.family import QKV_GROUPED, VOCABULARY, Family, Row, Rule, Setting
from leftward.formats.rules import derived

_LAYER = "transformer.h.{i}."
# The class knows no longest sequence; BLOOM was trained on 2,048 tokens.
_LENGTH = Rule(lambda given: {"max_seq_len": given.get("seq_length", 2048)}, lambda c: {"seq_length": c.max_seq_len})

BLOOM = Family(
    model_type="bloom",
    architecture="BloomForCausalLM",
    settings=(
        Setting("vocab_size", "vocab_size"),
        Setting("n_layer", "n_layers"),
        Setting("hidden_size", "d_model"),
        Setting("n_head", "n_heads"),
        Setting("layer_norm_epsilon", "norm_eps"),
        Setting("tie_word_embeddings", "tie_embeddings"),
        derived("d_ff", lambda given: 4 * given["hidden_size"]),
        _LENGTH,
    ),
    fixed={
        "qk_norm": "none",
        "norm": "layernorm",
        "positions": "alibi",
        "embed_norm": True,
        "feed_forward": "gelu_tanh",
        "qkv_bias": True,
        "attn_out_bias": True,
        "ff_bias": True,
    },
    constants={"apply_residual_connection_post_layernorm": False},
    defaults={
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "hidden_size": lambda given: given.get("n_embed"),
        "n_layer": lambda given: given.get("num_hidden_layers"),
        "n_head": lambda given: given.get("num_attention_heads"),
    },
    dropouts=("hidden_dropout", "attention_dropout"),
    rows=(
        Row("embed", ("transformer.word_embeddings",), VOCABULARY),
        Row("embed_norm", ("transformer.word_embeddings_layernorm",)),
        Row("blocks.{i}.attn_norm", (_LAYER + "input_layernorm",)),
        Row("blocks.{i}.attn.qkv", (_LAYER + "self_attention.query_key_value",), QKV_GROUPED),
        Row("blocks.{i}.attn.o", (_LAYER + "self_attention.dense",)),
        Row("blocks.{i}.ff_norm", (_LAYER + "post_attention_layernorm",)),
        Row("blocks.{i}.ff.up", (_LAYER + "mlp.dense_h_to_4h",)),
        Row("blocks.{i}.ff.down", (_LAYER + "mlp.dense_4h_to_h",)),
        Row("norm", ("transformer.ln_f",)),
        Row("head", ("lm_head",), VOCABULARY),
    ),
    prefix="transformer.",
)
