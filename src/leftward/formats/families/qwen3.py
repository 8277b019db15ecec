"""Qwen 3 (Yang et al. 2025, arXiv 2505.09388): Llama with an RMSNorm over each query and key. Our default layout."""

from __future__ import annotations

from leftward.formats.families.llama import DEFAULTS, QK_NORMS, ROWS, SETTINGS
from leftward.formats.family import Family
from leftward.formats.rules import QWEN_WINDOWS, rotary

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    settings=(*SETTINGS, rotary(), QWEN_WINDOWS),
    fixed={},
    defaults={**DEFAULTS, "head_dim": 128},
    dropouts=("attention_dropout",),
    rows=(*ROWS, *QK_NORMS),
    prefix="model.",
)
