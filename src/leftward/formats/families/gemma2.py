"""Gemma 2 (arXiv 2408.00118): norms around the sublayers, soft caps, every second layer local."""

from __future__ import annotations

from leftward.formats.families.gemma import EMBED_SCALE, GEMMA_DEFAULTS
from leftward.formats.families.llama import ATTENTION, FEED_FORWARD, GATED, without
from leftward.formats.family import Family, Row, Rule, Setting
from leftward.formats.rules import attention_scalar, maybe, rotary, windows_by_layer

GEMMA_SETTINGS: tuple[Setting | Rule, ...] = (
    *without("hidden_act"),
    Setting("hidden_activation", "feed_forward", GATED),
    EMBED_SCALE,
    attention_scalar(),
    maybe("attn_logit_softcapping", "attn_softcap"),
    maybe("final_logit_softcapping", "logit_softcap"),
)
SANDWICH = (
    Row("blocks.{i}.attn_norm", ("model.layers.{i}.input_layernorm",)),
    Row("blocks.{i}.attn_out_norm", ("model.layers.{i}.post_attention_layernorm",)),
    Row("blocks.{i}.ff_norm", ("model.layers.{i}.pre_feedforward_layernorm",)),
    Row("blocks.{i}.ff_out_norm", ("model.layers.{i}.post_feedforward_layernorm",)),
)

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    settings=(*GEMMA_SETTINGS, rotary(), windows_by_layer(lambda given: "LG")),
    fixed={"qk_norm": "none", "norm_weight": "one_plus", "block": "sandwich"},
    defaults={**GEMMA_DEFAULTS, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096},
    dropouts=("attention_dropout",),
    rows=(*ATTENTION, *SANDWICH, *FEED_FORWARD),
    prefix="model.",
)
