"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, multi-head attention, every bias."""

from __future__ import annotations

from leftward.formats.family import TRANSPOSED, VOCABULARY, Family, Row, Setting

# What classes without a gate know, by transformers' names.
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    settings=(
        Setting("vocab_size", "vocab_size"),
        Setting("n_ctx", "max_seq_len"),  # the class no longer reads it, llama.cpp does
        Setting("n_positions", "max_seq_len"),
        Setting("n_layer", "n_layers"),
        Setting("n_embd", "d_model"),
        Setting("n_head", "n_heads"),
        Setting("n_inner", "d_ff"),
        Setting("layer_norm_epsilon", "norm_eps"),
        Setting(
            "activation_function",
            "feed_forward",
            ACTIVATIONS,
        ),
        Setting("tie_word_embeddings", "tie_embeddings"),
    ),
    fixed={
        "positions": "learned",
        "norm": "layernorm",
        "qk_norm": "none",
        "qkv_bias": True,
        "attn_out_bias": True,
        "ff_bias": True,
    },
    constants={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    defaults={
        "n_ctx": lambda config_json: config_json.get("n_positions"),
        "n_inner": lambda config_json: 4 * config_json.get("n_embd", 0),
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    dropouts=("embd_pdrop", "attn_pdrop", "resid_pdrop"),
    rows=(
        Row("embed", ("transformer.wte",), VOCABULARY),
        Row("position_embed", ("transformer.wpe",)),
        Row("blocks.{i}.attn_norm", ("transformer.h.{i}.ln_1",)),
        Row("blocks.{i}.attn.qkv", ("transformer.h.{i}.attn.c_attn",), TRANSPOSED),
        Row("blocks.{i}.attn.o", ("transformer.h.{i}.attn.c_proj",), TRANSPOSED),
        Row("blocks.{i}.ff_norm", ("transformer.h.{i}.ln_2",)),
        Row("blocks.{i}.ff.up", ("transformer.h.{i}.mlp.c_fc",), TRANSPOSED),
        Row("blocks.{i}.ff.down", ("transformer.h.{i}.mlp.c_proj",), TRANSPOSED),
        Row("norm", ("transformer.ln_f",)),
        Row("head", ("lm_head",), VOCABULARY),
    ),
    prefix="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias"),  # the causal mask, in files of old versions
)
