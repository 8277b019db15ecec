"""Gemma 3 (arXiv 2503.19786), its text model: five local layers to a global one, each kind with its own angles."""

from __future__ import annotations

from leftward.formats.families.gemma import GEMMA_DEFAULTS
from leftward.formats.families.gemma2 import GEMMA_SETTINGS, SANDWICH
from leftward.formats.families.llama import ATTENTION, FEED_FORWARD, QK_NORMS
from leftward.formats.family import Family, Json
from leftward.formats.rules import rotary, windows_by_layer


def _pattern(given: Json) -> str:
    every = min(given.get("sliding_window_pattern", 6), given["num_hidden_layers"] + 1)
    return "L" * (every - 1) + "G"


GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    settings=(*GEMMA_SETTINGS, rotary(base=1e6, local_base=1e4), windows_by_layer(_pattern)),
    fixed={"norm_weight": "one_plus", "block": "sandwich"},
    constants={"use_bidirectional_attention": False},
    defaults={**GEMMA_DEFAULTS, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096},
    dropouts=("attention_dropout",),
    rows=(*ATTENTION, *QK_NORMS, *SANDWICH, *FEED_FORWARD),
    prefix="model.",
)
