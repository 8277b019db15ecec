"""GPT-Neo (Black et al. 2021): GPT-2 with every second layer local, and scores that are not scaled."""

from __future__ import annotations

import itertools
from typing import Any

from leftward.config import Config, shortest_pattern
from leftward.errors import UserError
from leftward.formats.families.gpt2 import ACTIVATIONS
from leftward.formats.family import QKV_APART, VOCABULARY, Family, Json, Row, Rule, Setting


def _read(given: Json) -> dict[str, Any]:
    """attention_types is [[[kind, …], repeats], …]; attention_layers is the same spelled out."""
    layers = given.get("attention_layers")
    if layers is None:
        try:
            pairs = given.get("attention_types", [[["global", "local"], given["num_layers"] // 2]])
            spelled = (itertools.islice(itertools.cycle(kinds), repeats * len(kinds)) for kinds, repeats in pairs)
            layers = list(itertools.islice(itertools.chain.from_iterable(spelled), given["num_layers"]))
        except (TypeError, ValueError):
            raise UserError(
                f"attention_types is {str(given['attention_types'])[:200]}: not as GPT-Neo has it"
            ) from None
    if not isinstance(layers, list) or not all(kind in ("local", "global") for kind in layers):
        raise UserError(f"attention_layers is {str(layers)[:200]}: global and local are supported")
    letters = ("L" if kind == "local" else "G" for kind in layers[: given["num_layers"]])
    pattern = shortest_pattern("".join(letters)) or "G"
    return {"window": given.get("window_size", 256), "attention_pattern": pattern} if "L" in pattern else {}


def _write(config: Config) -> dict[str, Any]:
    kinds = ["local" if config.is_local(layer) else "global" for layer in range(config.n_layers)]
    window = config.window or config.max_seq_len
    return {"attention_layers": kinds, "attention_types": [[kinds, 1]], "window_size": window}


GPT_NEO = Family(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    settings=(
        Setting("vocab_size", "vocab_size"),
        Setting("max_position_embeddings", "max_seq_len"),
        Setting("num_layers", "n_layers"),
        Setting("hidden_size", "d_model"),
        Setting("num_heads", "n_heads"),
        Setting("intermediate_size", "d_ff"),
        Setting("layer_norm_epsilon", "norm_eps"),
        Setting("activation_function", "feed_forward", ACTIVATIONS),
        Setting("tie_word_embeddings", "tie_embeddings"),
        Rule(_read, _write),
    ),
    fixed={
        "qk_norm": "none",
        "norm": "layernorm",
        "positions": "learned",
        "attn_scale": 1.0,
        "attn_out_bias": True,
        "ff_bias": True,
    },
    defaults={
        "intermediate_size": lambda given: 4 * given.get("hidden_size", 0),
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    dropouts=("embed_dropout", "attention_dropout", "resid_dropout"),
    rows=(
        Row("embed", ("transformer.wte",), VOCABULARY),
        Row("position_embed", ("transformer.wpe",)),
        Row("blocks.{i}.attn_norm", ("transformer.h.{i}.ln_1",)),
        Row("blocks.{i}.attn.qkv", tuple(f"transformer.h.{{i}}.attn.attention.{n}_proj" for n in "qkv"), QKV_APART),
        Row("blocks.{i}.attn.o", ("transformer.h.{i}.attn.attention.out_proj",)),
        Row("blocks.{i}.ff_norm", ("transformer.h.{i}.ln_2",)),
        Row("blocks.{i}.ff.up", ("transformer.h.{i}.mlp.c_fc",)),
        Row("blocks.{i}.ff.down", ("transformer.h.{i}.mlp.c_proj",)),
        Row("norm", ("transformer.ln_f",)),
        Row("head", ("lm_head",), VOCABULARY),
    ),
    prefix="transformer.",
    buffers=(".attention.bias", ".attention.masked_bias"),
)
