"""gpt-oss (OpenAI 2025, arXiv 2508.10925): experts with biases, sinks, every second layer local, YaRN."""

from __future__ import annotations

from leftward.formats.families.llama import ATTENTION, DEFAULTS, NORMS, without
from leftward.formats.family import (
    EXPERTS_INTERLEAVED,
    EXPERTS_INTERLEAVED_TRANSPOSED,
    EXPERTS_TRANSPOSED,
    Family,
    Row,
    Setting,
)
from leftward.formats.rules import rotary, windows_by_layer

_EXPERTS = "model.layers.{i}.mlp.experts."

GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    settings=(
        *without("hidden_act"),
        Setting("num_local_experts", "n_experts"),
        Setting("num_experts_per_tok", "n_experts_per_token"),
        rotary(base=150_000.0),
        windows_by_layer(lambda given: "LG"),
    ),
    fixed={"qk_norm": "none", "feed_forward": "swiglu_clamped", "ff_bias": True, "attn_sinks": True},
    constants={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    defaults={
        **DEFAULTS,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
    dropouts=("attention_dropout",),
    rows=(
        *ATTENTION,
        *NORMS,
        Row("blocks.{i}.attn.sinks", ("model.layers.{i}.self_attn.sinks",)),
        Row("blocks.{i}.ff.router", ("model.layers.{i}.mlp.router",)),
        Row("blocks.{i}.ff.up.weight", (_EXPERTS + "gate_up_proj",), EXPERTS_INTERLEAVED_TRANSPOSED),
        Row("blocks.{i}.ff.up.bias", (_EXPERTS + "gate_up_proj_bias",), EXPERTS_INTERLEAVED),
        Row("blocks.{i}.ff.down.weight", (_EXPERTS + "down_proj",), EXPERTS_TRANSPOSED),
        Row("blocks.{i}.ff.down.bias", (_EXPERTS + "down_proj_bias",)),
    ),
    prefix="model.",
)
