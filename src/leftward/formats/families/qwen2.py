"""Qwen 2 and 2.5 (Yang et al. 2024, arXiv 2407.10671): Llama with biases of queries, keys and values."""

from __future__ import annotations

from leftward.formats.families.llama import DEFAULTS, ROWS, without
from leftward.formats.family import Family
from leftward.formats.rules import QWEN_WINDOWS, rotary

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    settings=(
        *without("attention_bias", "head_dim"),
        rotary(),
        QWEN_WINDOWS,
    ),
    fixed={"qk_norm": "none", "qkv_bias": True},
    defaults=DEFAULTS,
    dropouts=("attention_dropout",),
    rows=ROWS,
    prefix="model.",
)
