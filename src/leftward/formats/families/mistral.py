"""Mistral (Jiang et al. 2023, arXiv 2310.06825): Llama with a sliding window in every layer, or none."""

from __future__ import annotations

from leftward.formats.families.llama import DEFAULTS, ROWS, SETTINGS
from leftward.formats.family import Family
from leftward.formats.rules import WINDOW_EVERYWHERE, rotary

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    settings=(*SETTINGS, rotary(), WINDOW_EVERYWHERE),
    fixed={"qk_norm": "none"},
    constants={"attention_bias": False},  # the class has none, whatever is said
    defaults=DEFAULTS,
    dropouts=("attention_dropout",),
    rows=ROWS,
    prefix="model.",
)
