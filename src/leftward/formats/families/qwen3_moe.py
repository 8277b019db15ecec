"""Qwen 3 with a mixture of experts (arXiv 2505.09388)."""

from __future__ import annotations

from typing import Any

from leftward.formats.families.llama import ATTENTION, DEFAULTS, NORMS, QK_NORMS, without
from leftward.formats.family import EXPERTS_APART, EXPERTS_HALVES_APART, Family, Json, Row, Rule, Setting
from leftward.formats.rules import WINDOW_EVERYWHERE, rotary

_EXPERT = "model.layers.{i}.mlp.experts.{e}."


def _read_window(given: Json) -> dict[str, Any]:
    """Where windows are not used, sliding_window means nothing."""
    window = WINDOW_EVERYWHERE.read(given)
    return window if given.get("use_sliding_window", False) else {}


_WINDOW = Rule(
    _read_window, lambda config: WINDOW_EVERYWHERE.write(config) | {"use_sliding_window": config.window is not None}
)
_N_EXPERTS = Rule(
    lambda given: {"n_experts": given.get("num_local_experts", given.get("num_experts", 128))},
    lambda config: {"num_experts": config.n_experts, "num_local_experts": config.n_experts},
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    settings=(
        *without("intermediate_size"),
        Setting("moe_intermediate_size", "d_ff"),
        Setting("num_experts_per_tok", "n_experts_per_token"),
        Setting("norm_topk_prob", "router_normalised"),
        _N_EXPERTS,
        rotary(),
        _WINDOW,
        Rule(lambda given: {}, lambda config: {"intermediate_size": config.d_ff}),
    ),
    fixed={},
    constants={"decoder_sparse_step": 1, "mlp_only_layers": []},
    defaults={
        **DEFAULTS,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    dropouts=("attention_dropout",),
    rows=(
        *ATTENTION,
        *NORMS,
        *QK_NORMS,
        Row("blocks.{i}.ff.router", ("model.layers.{i}.mlp.gate",)),
        Row("blocks.{i}.ff.up", (_EXPERT + "gate_proj", _EXPERT + "up_proj"), EXPERTS_HALVES_APART),
        Row("blocks.{i}.ff.down", (_EXPERT + "down_proj",), EXPERTS_APART),
    ),
    prefix="model.",
)
