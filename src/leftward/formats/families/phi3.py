"""Phi 3 (Abdin et al. 2024, arXiv 2404.14219) and 4: Llama with fused matrices, and LongRoPE."""

from __future__ import annotations

from leftward.formats.families.llama import DEFAULTS, NORMS, without
from leftward.formats.family import VOCABULARY, Family, Row
from leftward.formats.rules import WINDOW_EVERYWHERE, rotary

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    settings=(
        *without("head_dim", "attention_bias"),
        rotary(fraction=1.0),
        WINDOW_EVERYWHERE,
    ),
    fixed={"qk_norm": "none"},
    constants={"attention_bias": False},
    defaults={**DEFAULTS, "rms_norm_eps": 1e-5},
    dropouts=("resid_pdrop", "embd_pdrop", "attention_dropout"),
    rows=(
        Row("embed", ("model.embed_tokens",), VOCABULARY),
        *NORMS,
        Row("blocks.{i}.attn.qkv", ("model.layers.{i}.self_attn.qkv_proj",)),
        Row("blocks.{i}.attn.o", ("model.layers.{i}.self_attn.o_proj",)),
        Row("blocks.{i}.ff.up", ("model.layers.{i}.mlp.gate_up_proj",)),
        Row("blocks.{i}.ff.down", ("model.layers.{i}.mlp.down_proj",)),
        Row("norm", ("model.norm",)),
        Row("head", ("lm_head",), VOCABULARY),
    ),
    prefix="model.",
)
