"""Gemma (arXiv 2403.08295): GeGLU, norms that multiply by 1 + w, embeddings times √d."""

from __future__ import annotations

from leftward.formats.families.llama import DEFAULTS, ROWS, without
from leftward.formats.family import Family, Setting
from leftward.formats.rules import derived, rotary

EMBED_SCALE = derived("embed_scale", lambda given: given["hidden_size"] ** 0.5)
GEMMA_DEFAULTS = {**DEFAULTS, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}

GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    settings=(
        *without("hidden_act"),
        # The first files say gelu and mean its approximation.
        Setting("hidden_act", "feed_forward", {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh"}),
        rotary(),
        EMBED_SCALE,
    ),
    fixed={"qk_norm": "none", "norm_weight": "one_plus"},
    defaults=GEMMA_DEFAULTS,
    dropouts=("attention_dropout",),
    rows=ROWS,
    prefix="model.",
)
