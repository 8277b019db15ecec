"""MPT (MosaicML 2023): ALiBi with its own order of slopes, and no biases at all."""

from __future__ import annotations

from typing import Any

from leftward.config import Config
from leftward.errors import UserError
from leftward.formats.family import VOCABULARY, Family, Json, Row, Rule, Setting
from leftward.formats.rules import derived

_ONLY = {"attn_type": "multihead_attention", "alibi": True, "alibi_bias_max": 8, "prefix_lm": False, "qk_ln": False}


def _read(given: Json) -> dict[str, Any]:
    attention = given.get("attn_config", {})
    if not isinstance(attention, dict):
        raise UserError(f"attn_config is {attention!r}: it must be an object")
    for key, only in {**_ONLY, "clip_qkv": None}.items():
        if attention.get(key, only) != only:
            raise UserError(f"mpt with attn_config.{key} {attention[key]!r} is not supported yet, only with {only!r}")
    return {"attn_scale": float(attention["softmax_scale"])} if attention.get("softmax_scale") else {}


def _write(config: Config) -> dict[str, Any]:
    return {"attn_config": {**_ONLY, "clip_qkv": None, "softmax_scale": config.attn_scale, "attn_pdrop": 0}}


MPT = Family(
    model_type="mpt",
    architecture="MptForCausalLM",
    settings=(
        Setting("vocab_size", "vocab_size"),
        Setting("max_seq_len", "max_seq_len"),
        Setting("n_layers", "n_layers"),
        Setting("d_model", "d_model"),
        Setting("n_heads", "n_heads"),
        Setting("layer_norm_epsilon", "norm_eps"),
        Setting("tie_word_embeddings", "tie_embeddings"),
        derived("d_ff", lambda given: 4 * given["d_model"]),  # whatever expansion_ratio says
        Rule(_read, _write),
    ),
    fixed={
        "qk_norm": "none",
        "norm": "layernorm",
        "norm_bias": False,
        "positions": "alibi_mpt",
        "feed_forward": "gelu",
    },
    constants={"no_bias": True, "logit_scale": None, "expansion_ratio": 4},
    defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    rows=(
        Row("embed", ("transformer.wte",), VOCABULARY),
        Row("blocks.{i}.attn_norm", ("transformer.blocks.{i}.norm_1",)),
        Row("blocks.{i}.attn.qkv", ("transformer.blocks.{i}.attn.Wqkv",)),
        Row("blocks.{i}.attn.o", ("transformer.blocks.{i}.attn.out_proj",)),
        Row("blocks.{i}.ff_norm", ("transformer.blocks.{i}.norm_2",)),
        Row("blocks.{i}.ff.up", ("transformer.blocks.{i}.ffn.up_proj",)),
        Row("blocks.{i}.ff.down", ("transformer.blocks.{i}.ffn.down_proj",)),
        Row("norm", ("transformer.norm_f",)),
        Row("head", ("lm_head",), VOCABULARY),
    ),
    prefix="transformer.",
)
