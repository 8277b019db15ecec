"""Falcon (Almazrouei et al. 2023, arXiv 2311.16867): side by side, with one key/value head or a few.

Its generations name the norms of a block differently: 7B has one norm, 40B two. The RW models (Penedo et al. 2023,
arXiv 2306.01116) have ALiBi, with slopes that are scaled as scores are. transformers rounds a slope and its product
with the key's place to bf16, in models of any dtype: a score then depends on where in the sequence its two tokens are,
and keys far from the beginning share one. Here, as in vLLM, only their distance counts. Both say the same where nothing
is rounded: up to 8 heads and 256 tokens.
"""

from __future__ import annotations

from typing import Any

from leftward.config import Config
from leftward.errors import UserError
from leftward.formats.families.gpt2 import ACTIVATIONS
from leftward.formats.family import QKV_GROUPED, VOCABULARY, Family, Json, Row, Rule, Setting
from leftward.formats.rules import rotary

_LAYER = "transformer.h.{i}."
_ROTARY = rotary()


def _read(given: Json) -> dict[str, Any]:
    is_new = given.get("new_decoder_architecture", False)
    n_heads = given["num_attention_heads"]
    one = 1 if given.get("multi_query", True) else n_heads
    block = "parallel" if given.get("num_ln_in_parallel_attn", 2) == 2 else "parallel_shared"
    if not is_new:
        block = "parallel_shared" if given.get("parallel_attn", True) else "pre"
    return {
        "n_kv_heads": given.get("num_kv_heads", n_heads) if is_new else one,
        "block": block,
        "d_ff": given.get("ffn_hidden_size", 4 * given["hidden_size"]),
        **_positions(given),
    }


def _positions(given: Json) -> dict[str, Any]:
    rotary = _ROTARY.read(given)  # which the class writes and ignores, where there is ALiBi
    alibi = given.get("alibi", False)
    if not isinstance(alibi, bool):
        raise UserError(f"alibi is {alibi!r}: it must be true or false")
    if not alibi:
        return rotary
    return {"positions": "alibi", "alibi_scale": (given["hidden_size"] // given["num_attention_heads"]) ** -0.5}


def _write(config: Config) -> dict[str, Any]:
    is_new = config.block == "parallel" or config.n_kv_heads not in (1, config.n_heads)
    return {
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": (2 if config.block == "parallel" else 1) if is_new else None,
        "multi_query": config.n_kv_heads == 1,
        "num_kv_heads": config.n_kv_heads,
        "parallel_attn": config.block != "pre",
        "ffn_hidden_size": config.d_ff,
        "alibi": config.positions == "alibi",
        **_ROTARY.write(config),
    }


def _falcon(norms: tuple[Row, ...], suits: tuple[str, ...]) -> Family:
    return Family(
        model_type="falcon",
        architecture="FalconForCausalLM",
        settings=(
            Setting("vocab_size", "vocab_size"),
            Setting("max_position_embeddings", "max_seq_len"),
            Setting("num_hidden_layers", "n_layers"),
            Setting("hidden_size", "d_model"),
            Setting("num_attention_heads", "n_heads"),
            Setting("layer_norm_epsilon", "norm_eps"),
            Setting("activation", "feed_forward", ACTIVATIONS),
            Setting("bias", ("qkv_bias", "attn_out_bias", "ff_bias")),
            Setting("tie_word_embeddings", "tie_embeddings"),
            Rule(_read, _write),
        ),
        fixed={"qk_norm": "none", "norm": "layernorm"},
        suits=lambda config: config.block in suits,
        defaults={
            "max_position_embeddings": 2048,
            "layer_norm_epsilon": 1e-5,
            "activation": "gelu",
            "bias": False,
            "tie_word_embeddings": True,
        },
        dropouts=("hidden_dropout", "attention_dropout"),
        rows=(
            Row("embed", ("transformer.word_embeddings",), VOCABULARY),
            *norms,
            Row("blocks.{i}.attn.qkv", (_LAYER + "self_attention.query_key_value",), QKV_GROUPED),
            Row("blocks.{i}.attn.o", (_LAYER + "self_attention.dense",)),
            Row("blocks.{i}.ff.up", (_LAYER + "mlp.dense_h_to_4h",)),
            Row("blocks.{i}.ff.down", (_LAYER + "mlp.dense_4h_to_h",)),
            Row("norm", ("transformer.ln_f",)),
            Row("head", ("lm_head",), VOCABULARY),
        ),
        prefix="transformer.",
    )


FALCON = _falcon(
    (
        Row("blocks.{i}.attn_norm", (_LAYER + "input_layernorm",)),
        Row("blocks.{i}.ff_norm", (_LAYER + "post_attention_layernorm",)),
    ),
    suits=("pre", "parallel_shared"),
)
FALCON_40B = _falcon(
    (
        Row("blocks.{i}.attn_norm", (_LAYER + "ln_attn",)),
        Row("blocks.{i}.ff_norm", (_LAYER + "ln_mlp",)),
    ),
    suits=("parallel",),
)
