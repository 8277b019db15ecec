"""Command R (Cohere 2024): attention and feed-forward side by side under one norm, adjacent pairs, scaled logits."""

from __future__ import annotations

from leftward.formats.families.llama import ATTENTION, DEFAULTS, FEED_FORWARD, without
from leftward.formats.family import Family, Row, Setting
from leftward.formats.rules import rotary, times

COHERE = Family(
    model_type="cohere",
    architecture="CohereForCausalLM",
    settings=(
        *without("rms_norm_eps", "head_dim"),
        Setting("layer_norm_eps", "norm_eps"),
        rotary(base=500_000.0),
        times("logit_scale", "logit_scale", 0.0625),
    ),
    fixed={
        "qk_norm": "none",
        "norm": "layernorm",
        "norm_bias": False,
        "block": "parallel_shared",
        "rope_pairing": "adjacent",
    },
    constants={"use_qk_norm": False},
    defaults={**DEFAULTS, "layer_norm_eps": 1e-5, "tie_word_embeddings": True},
    dropouts=("attention_dropout",),
    rows=(*ATTENTION, Row("blocks.{i}.attn_norm", ("model.layers.{i}.input_layernorm",)), *FEED_FORWARD),
    prefix="model.",
)
