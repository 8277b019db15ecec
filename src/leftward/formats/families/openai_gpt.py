"""GPT-1 (Radford et al. 2018): GPT-2's ancestor, with norms after each sum and none at the end."""

from __future__ import annotations

from leftward.formats.family import TRANSPOSED, VOCABULARY, Family, Row, Setting
from leftward.formats.rules import derived

OPENAI_GPT = Family(
    model_type="openai-gpt",
    architecture="OpenAIGPTLMHeadModel",
    settings=(
        Setting("vocab_size", "vocab_size"),
        Setting("n_positions", "max_seq_len"),
        Setting("n_layer", "n_layers"),
        Setting("n_embd", "d_model"),
        Setting("n_head", "n_heads"),
        Setting("layer_norm_epsilon", "norm_eps"),
        Setting("afn", "feed_forward", {"gelu": "gelu_tanh", "relu": "relu"}),
        Setting("tie_word_embeddings", "tie_embeddings"),
        derived("d_ff", lambda given: 4 * given["n_embd"]),
    ),
    fixed={
        "qk_norm": "none",
        "norm": "layernorm",
        "positions": "learned",
        "block": "post",
        "qkv_bias": True,
        "attn_out_bias": True,
        "ff_bias": True,
    },
    defaults={"layer_norm_epsilon": 1e-5, "afn": "gelu", "tie_word_embeddings": True},
    dropouts=("embd_pdrop", "attn_pdrop", "resid_pdrop"),
    rows=(
        Row("embed", ("transformer.tokens_embed",), VOCABULARY),
        Row("position_embed", ("transformer.positions_embed",)),
        Row("blocks.{i}.attn.qkv", ("transformer.h.{i}.attn.c_attn",), TRANSPOSED),
        Row("blocks.{i}.attn.o", ("transformer.h.{i}.attn.c_proj",), TRANSPOSED),
        Row("blocks.{i}.attn_norm", ("transformer.h.{i}.ln_1",)),
        Row("blocks.{i}.ff.up", ("transformer.h.{i}.mlp.c_fc",), TRANSPOSED),
        Row("blocks.{i}.ff.down", ("transformer.h.{i}.mlp.c_proj",), TRANSPOSED),
        Row("blocks.{i}.ff_norm", ("transformer.h.{i}.ln_2",)),
        Row("head", ("lm_head",), VOCABULARY),
    ),
    prefix="transformer.",
    buffers=(".attn.bias", ".position_ids"),
)
