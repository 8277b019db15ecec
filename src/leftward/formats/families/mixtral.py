"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): Mistral with a mixture of experts."""

from __future__ import annotations

from leftward.formats.families.llama import ATTENTION, DEFAULTS, NORMS, SETTINGS
from leftward.formats.family import EXPERTS_APART, EXPERTS_HALVES_APART, Family, Row, Setting
from leftward.formats.rules import WINDOW_EVERYWHERE, rotary

_EXPERT = "model.layers.{i}.block_sparse_moe.experts.{e}."

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    settings=(
        *SETTINGS,
        Setting("num_local_experts", "n_experts"),
        Setting("num_experts_per_tok", "n_experts_per_token"),
        rotary(base=1e6),
        WINDOW_EVERYWHERE,
    ),
    fixed={"qk_norm": "none"},
    constants={"attention_bias": False},
    defaults={**DEFAULTS, "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2},
    dropouts=("attention_dropout",),
    rows=(
        *ATTENTION,
        *NORMS,
        Row("blocks.{i}.ff.router", ("model.layers.{i}.block_sparse_moe.gate",)),
        Row("blocks.{i}.ff.up", (_EXPERT + "w1", _EXPERT + "w3"), EXPERTS_HALVES_APART),
        Row("blocks.{i}.ff.down", (_EXPERT + "w2",), EXPERTS_APART),
    ),
    prefix="model.",
)
