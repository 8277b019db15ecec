"""Phi 1, 1.5 and 2 (Li et al. 2023, arXiv 2309.05463): attention and feed-forward side by side, every bias."""

from __future__ import annotations

from leftward.formats.families.gpt2 import ACTIVATIONS
from leftward.formats.families.llama import SHAPE
from leftward.formats.family import QKV_APART, VOCABULARY, Family, Row, Setting
from leftward.formats.rules import rotary

PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    settings=(
        *SHAPE,
        Setting("num_key_value_heads", "n_kv_heads"),
        Setting("layer_norm_eps", "norm_eps"),
        Setting("hidden_act", "feed_forward", ACTIVATIONS),
        rotary(fraction=0.5),
    ),
    fixed={
        "qk_norm": "none",
        "norm": "layernorm",
        "block": "parallel_shared",
        "qkv_bias": True,
        "attn_out_bias": True,
        "ff_bias": True,
        "head_bias": True,
    },
    constants={"qk_layernorm": False},
    defaults={
        "num_key_value_heads": None,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "tie_word_embeddings": False,
    },
    dropouts=("resid_pdrop", "embd_pdrop", "attention_dropout"),
    rows=(
        Row("embed", ("model.embed_tokens",), VOCABULARY),
        Row("blocks.{i}.attn_norm", ("model.layers.{i}.input_layernorm",)),
        Row("blocks.{i}.attn.qkv", tuple(f"model.layers.{{i}}.self_attn.{name}_proj" for name in "qkv"), QKV_APART),
        Row("blocks.{i}.attn.o", ("model.layers.{i}.self_attn.dense",)),
        Row("blocks.{i}.ff.up", ("model.layers.{i}.mlp.fc1",)),
        Row("blocks.{i}.ff.down", ("model.layers.{i}.mlp.fc2",)),
        Row("norm", ("model.final_layernorm",)),
        Row("head", ("lm_head",), VOCABULARY),
    ),
    prefix="model.",
)
