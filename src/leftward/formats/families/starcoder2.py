"""StarCoder 2 (Lozhkov et al. 2024, arXiv 2402.19173): rotary, LayerNorm, GELU without a gate, grouped heads; biases
all or none."""

from __future__ import annotations

from leftward.formats.families.gpt2 import ACTIVATIONS
from leftward.formats.families.llama import ATTENTION, NORMS, SHAPE
from leftward.formats.family import Family, Row, Setting
from leftward.formats.rules import WINDOW_EVERYWHERE, rotary

STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    settings=(
        *SHAPE,
        Setting("num_key_value_heads", "n_kv_heads"),
        Setting("norm_epsilon", "norm_eps"),
        Setting("hidden_act", "feed_forward", {"gelu_pytorch_tanh": "gelu_tanh"} | ACTIVATIONS),
        Setting("use_bias", ("qkv_bias", "attn_out_bias", "ff_bias")),
        rotary(),
        WINDOW_EVERYWHERE,
    ),
    fixed={"norm": "layernorm", "qk_norm": "none"},
    defaults={
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    dropouts=("embedding_dropout", "attention_dropout", "residual_dropout"),
    rows=(
        *ATTENTION,
        *NORMS,
        Row("blocks.{i}.ff.up", ("model.layers.{i}.mlp.c_fc",)),
        Row("blocks.{i}.ff.down", ("model.layers.{i}.mlp.c_proj",)),
    ),
    prefix="model.",
)
