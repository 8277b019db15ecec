"""OPT (Zhang et al. 2022, arXiv 2205.01068): GPT-3 in the open, with ReLU and two unused rows of positions."""

from __future__ import annotations

from leftward.formats.families.gpt2 import ACTIVATIONS
from leftward.formats.families.llama import SHAPE
from leftward.formats.family import QKV_APART, VOCABULARY, Family, Row, Rule, Setting
from leftward.formats.rules import choice

_LAYER = "model.decoder.layers.{i}."

OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    settings=(
        *(s for s in SHAPE if s.theirs != "intermediate_size"),
        Setting("ffn_dim", "d_ff"),
        Setting("activation_function", "feed_forward", ACTIVATIONS),
        Setting("enable_bias", ("qkv_bias", "attn_out_bias", "ff_bias")),
        choice("layer_norm_elementwise_affine", ((True, {"norm_bias": True}), (False, {"norm_weight": "none"})), True),
        Rule(lambda given: {}, lambda config: {"word_embed_proj_dim": config.d_model}),
    ),
    fixed={"qk_norm": "none", "norm": "layernorm", "norm_eps": 1e-5, "positions": "learned", "position_offset": 2},
    constants={"do_layer_norm_before": True, "_remove_final_layer_norm": False},
    defaults={"activation_function": "relu", "enable_bias": True, "tie_word_embeddings": True},
    dropouts=("dropout", "attention_dropout"),
    rows=(
        Row("embed", ("model.decoder.embed_tokens",), VOCABULARY),
        Row("position_embed", ("model.decoder.embed_positions",)),
        Row("blocks.{i}.attn_norm", (_LAYER + "self_attn_layer_norm",)),
        Row("blocks.{i}.attn.qkv", tuple(f"{_LAYER}self_attn.{name}_proj" for name in "qkv"), QKV_APART),
        Row("blocks.{i}.attn.o", (_LAYER + "self_attn.out_proj",)),
        Row("blocks.{i}.ff_norm", (_LAYER + "final_layer_norm",)),
        Row("blocks.{i}.ff.up", (_LAYER + "fc1",)),
        Row("blocks.{i}.ff.down", (_LAYER + "fc2",)),
        Row("norm", ("model.decoder.final_layer_norm",)),
        Row("head", ("lm_head",), VOCABULARY),
    ),
    prefix="model.",
)
