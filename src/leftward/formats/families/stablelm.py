"""StableLM (Stability AI 2024, arXiv 2402.17834): LayerNorm, a quarter of each head rotated."""

from __future__ import annotations

from leftward.formats.families.llama import DEFAULTS, ROWS, without
from leftward.formats.family import Family, Setting
from leftward.formats.rules import choice, rotary

STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    settings=(
        *without("rms_norm_eps", "head_dim", "attention_bias"),
        Setting("layer_norm_eps", "norm_eps"),
        Setting("use_qkv_bias", "qkv_bias"),
        choice("use_parallel_residual", ((False, {"block": "pre"}), (True, {"block": "parallel_shared"})), False),
        rotary(fraction=0.25),
    ),
    fixed={"qk_norm": "none", "norm": "layernorm"},
    constants={"qk_layernorm": False},
    defaults={**DEFAULTS, "layer_norm_eps": 1e-5, "use_qkv_bias": False},
    dropouts=("attention_dropout",),
    rows=ROWS,
    prefix="model.",
)
