"""OLMo (Groeneveld et al. 2024, arXiv 2402.00838): LayerNorms without weights."""

from __future__ import annotations

from leftward.formats.families.llama import ATTENTION, DEFAULTS, FEED_FORWARD, without
from leftward.formats.family import Family
from leftward.formats.rules import rotary

OLMO = Family(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    settings=(*without("rms_norm_eps", "head_dim"), rotary()),
    fixed={"qk_norm": "none", "norm": "layernorm", "norm_weight": "none", "norm_eps": 1e-5},
    constants={"clip_qkv": None},
    defaults=DEFAULTS,
    dropouts=("attention_dropout",),
    rows=(*ATTENTION, *FEED_FORWARD),
    prefix="model.",
)
