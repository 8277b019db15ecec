"""SmolLM 3 (Hugging Face 2025): Llama in which every fourth layer knows no positions."""

from __future__ import annotations

from typing import Any

from leftward.config import Config, shortest_pattern
from leftward.errors import UserError
from leftward.formats.families.llama import DEFAULTS, ROWS, without
from leftward.formats.family import Family, Json, Rule, Setting
from leftward.formats.rules import QWEN_WINDOWS, rotary


def _read(given: Json) -> dict[str, Any]:
    n_layers, every = given["num_hidden_layers"], given.get("no_rope_layer_interval", 4)
    rotated = given.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(n_layers)]
    if not isinstance(rotated, list) or len(rotated) != n_layers:
        raise UserError(f"no_rope_layers is {str(rotated)[:200]}: it must have a number for each of {n_layers} layers")
    return {"position_pattern": shortest_pattern("".join("P" if r else "N" for r in rotated))}


def _write(config: Config) -> dict[str, Any]:
    return {"no_rope_layers": [int(config.knows_positions(layer)) for layer in range(config.n_layers)]}


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    settings=(
        *without("head_dim"),
        Setting("mlp_bias", "ff_bias"),
        rotary(base=2e6),
        QWEN_WINDOWS,
        Rule(_read, _write),
    ),
    fixed={"qk_norm": "none"},
    defaults={**DEFAULTS, "num_key_value_heads": 4, "mlp_bias": False, "tie_word_embeddings": True},
    dropouts=("attention_dropout",),
    rows=ROWS,
    prefix="model.",
)
