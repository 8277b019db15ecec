"""OLMo 2 (arXiv 2501.00656): norms behind the sublayers, and one over all queries and one over all keys."""

from __future__ import annotations

from leftward.formats.families.llama import ATTENTION, DEFAULTS, FEED_FORWARD, QK_NORMS, without
from leftward.formats.family import Family, Row
from leftward.formats.rules import rotary

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    settings=(*without("head_dim"), rotary()),
    fixed={"qk_norm": "whole", "block": "output"},
    defaults={**DEFAULTS, "rms_norm_eps": 1e-5},
    dropouts=("attention_dropout",),
    rows=(
        *ATTENTION,
        *QK_NORMS,
        Row("blocks.{i}.attn_out_norm", ("model.layers.{i}.post_attention_layernorm",)),
        Row("blocks.{i}.ff_out_norm", ("model.layers.{i}.post_feedforward_layernorm",)),
        *FEED_FORWARD,
    ),
    prefix="model.",
)
