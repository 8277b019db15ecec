"""GPT-NeoX (Black et al. 2022, arXiv 2204.06745) and Pythia: attention and feed-forward side by side."""

from __future__ import annotations

from leftward.formats.families.gpt2 import ACTIVATIONS
from leftward.formats.families.llama import SHAPE
from leftward.formats.family import QKV_GROUPED, VOCABULARY, Family, Row, Rule, Setting
from leftward.formats.rules import choice, rotary

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    settings=(
        *SHAPE,
        Setting("layer_norm_eps", "norm_eps"),
        Setting("hidden_act", "feed_forward", ACTIVATIONS),
        Setting("attention_bias", ("qkv_bias", "attn_out_bias")),
        choice("use_parallel_residual", ((True, {"block": "parallel"}), (False, {"block": "pre"})), True),
        rotary(fraction=0.25),
        Rule(lambda given: {}, lambda c: {"rotary_pct": c.rope_fraction, "rotary_emb_base": c.rope_base}),
    ),
    fixed={"qk_norm": "none", "norm": "layernorm", "ff_bias": True},
    defaults={
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "attention_bias": True,
        "tie_word_embeddings": False,
        # under the names of files of version 4
        "partial_rotary_factor": lambda given: given.get("rotary_pct", 0.25),
        "rope_theta": lambda given: given.get("rotary_emb_base", 10_000.0),
    },
    dropouts=("attention_dropout", "hidden_dropout"),
    rows=(
        Row("embed", ("gpt_neox.embed_in",), VOCABULARY),
        Row("blocks.{i}.attn_norm", ("gpt_neox.layers.{i}.input_layernorm",)),
        Row("blocks.{i}.ff_norm", ("gpt_neox.layers.{i}.post_attention_layernorm",)),
        Row("blocks.{i}.attn.qkv", ("gpt_neox.layers.{i}.attention.query_key_value",), QKV_GROUPED),
        Row("blocks.{i}.attn.o", ("gpt_neox.layers.{i}.attention.dense",)),
        Row("blocks.{i}.ff.up", ("gpt_neox.layers.{i}.mlp.dense_h_to_4h",)),
        Row("blocks.{i}.ff.down", ("gpt_neox.layers.{i}.mlp.dense_4h_to_h",)),
        Row("norm", ("gpt_neox.final_layer_norm",)),
        Row("head", ("embed_out",), VOCABULARY),
    ),
    prefix="gpt_neox.",
    head="embed_out.",
    buffers=(".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
)
