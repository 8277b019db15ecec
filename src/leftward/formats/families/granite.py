"""Granite 3 (IBM 2024): Llama with four multipliers."""

from __future__ import annotations

from leftward.formats.families.llama import DEFAULTS, ROWS, without
from leftward.formats.family import Family, Setting
from leftward.formats.rules import inverse, rotary, times

GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    settings=(
        *without("head_dim"),
        Setting("mlp_bias", "ff_bias"),
        rotary(),
        times("embedding_multiplier", "embed_scale"),
        times("residual_multiplier", "residual_scale"),
        times("attention_multiplier", "attn_scale"),
        inverse("logits_scaling", "logit_scale"),
    ),
    fixed={"qk_norm": "none"},
    defaults={**DEFAULTS, "mlp_bias": False},
    dropouts=("attention_dropout",),
    rows=ROWS,
    prefix="model.",
)
