"""GPT-J (Wang and Komatsuzaki 2021): attention and feed-forward side by side under one norm, adjacent pairs."""

from __future__ import annotations

from leftward.formats.families.gpt2 import ACTIVATIONS
from leftward.formats.family import QKV_APART, VOCABULARY, Family, Row, Rule, Setting

_ROTARY_DIM = Rule(
    lambda given: {"rope_fraction": given.get("rotary_dim", 64) / (given["n_embd"] / given["n_head"])},
    lambda config: {"rotary_dim": config.rope_dim},
)

GPTJ = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    settings=(
        Setting("vocab_size", "vocab_size"),
        Setting("n_positions", "max_seq_len"),
        Setting("n_layer", "n_layers"),
        Setting("n_embd", "d_model"),
        Setting("n_head", "n_heads"),
        Setting("n_inner", "d_ff"),
        Setting("layer_norm_epsilon", "norm_eps"),
        Setting("activation_function", "feed_forward", ACTIVATIONS),
        Setting("tie_word_embeddings", "tie_embeddings"),
        _ROTARY_DIM,
    ),
    fixed={
        "qk_norm": "none",
        "norm": "layernorm",
        "block": "parallel_shared",
        "rope_pairing": "adjacent",
        "ff_bias": True,
        "head_bias": True,
    },
    defaults={
        "n_inner": lambda given: 4 * given.get("n_embd", 0),
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": False,
    },
    dropouts=("embd_pdrop", "attn_pdrop", "resid_pdrop"),
    rows=(
        Row("embed", ("transformer.wte",), VOCABULARY),
        Row("blocks.{i}.attn_norm", ("transformer.h.{i}.ln_1",)),
        Row("blocks.{i}.attn.qkv", tuple(f"transformer.h.{{i}}.attn.{name}_proj" for name in "qkv"), QKV_APART),
        Row("blocks.{i}.attn.o", ("transformer.h.{i}.attn.out_proj",)),
        Row("blocks.{i}.ff.up", ("transformer.h.{i}.mlp.fc_in",)),
        Row("blocks.{i}.ff.down", ("transformer.h.{i}.mlp.fc_out",)),
        Row("norm", ("transformer.ln_f",)),
        Row("head", ("lm_head",), VOCABULARY),
    ),
    prefix="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias"),
)
