"""Qwen 3 (Yang et al. 2025, arXiv 2505.09388): Llama with an RMSNorm over each query and key. Our default layout."""

from __future__ import annotations

from leftward.formats.families.llama import DEFAULTS, ROWS, SETTINGS
from leftward.formats.family import Family, Row

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    settings=SETTINGS,
    fixed={"positions": "rotary", "norm": "rmsnorm", "qk_norm": "per_head", "ff_bias": False},
    # A window is in force only where use_sliding_window says so.
    constants={"use_sliding_window": False},
    defaults={**DEFAULTS, "head_dim": 128, "use_sliding_window": False},
    dropouts=("attention_dropout",),
    rows=(
        *ROWS,
        Row("blocks.{i}.attn.q_norm", ("model.layers.{i}.self_attn.q_norm",)),
        Row("blocks.{i}.attn.k_norm", ("model.layers.{i}.self_attn.k_norm",)),
    ),
    prefix="model.",
)
