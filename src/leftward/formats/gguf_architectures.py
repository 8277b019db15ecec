"""The architectures of llama.cpp as tables: how each names its settings and tensors, and what it leaves no choice
about. gguf_models.py reads them. Data, and what happens to a tensor on its way; nothing here opens a file.

A row says what llama.cpp's code for a value of general.architecture computes, and how its converter stores it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leftward.config import Config
from leftward.formats.family import HALVES_APART, QKV_APART, VOCABULARY, Op, Row

Values = dict[str, Any]


class Key(NamedTuple):
    """A metadata key, behind the architecture's name ↔ a field of Config."""

    theirs: str
    ours: str
    default: Any = ...
    """Where the key is absent: ours. `...`: the key must be there."""
    values: Mapping[Any, Any] | None = None
    """Their value → ours, where the two differ."""
    is_divisor: bool = False
    """Theirs divides what ours multiplies."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What llama.cpp computes for one value of general.architecture."""

    name: str
    fixed: Mapping[str, Any]
    """Fields of Config that it leaves no choice about; a function is given the fields so far and the tensors' names."""
    optional: tuple[str, ...] = ()
    """Fields of BY_TENSOR, beside a tied head: it knows the tensors, and does without."""
    keys: tuple[Key, ...] = ()
    """Keys that only some architectures know."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are written with one value, and mean nothing else."""
    pattern: str | None = None
    """Which layers are local where a window is given. None: llama.cpp knows no window here."""
    default_window: int | None = 0
    """The window where no key gives one; 0: none. None: a key must give one."""
    wide_heads: bool = False
    """The heads together may be of another width than d_model."""
    partial_rotary: bool = False
    """Rotary positions may turn a part of each head only."""
    scalings: tuple[str, ...] = ("linear", "yarn")
    """The kinds of scaled angles that it can be told."""
    truncate: bool = True
    """Whether yarn's two borders are rounded in the model as it was published. llama.cpp rounds them always."""
    fused: bool = False
    """q, k and v are one tensor."""
    interleaved: bool = False
    """The rows of q and k are in the order of rotary pairs (2i, 2i + 1), although the pairs are (i, i + n / 2) in the
    model as it was published."""
    needs_head: bool = False
    """A tied head has a tensor of its own."""
    renamed: Mapping[str, str] | Callable[[Config], Mapping[str, str]] = field(default_factory=dict)
    """Modules of ours whose tensors are called otherwise than in ROWS."""
    demands: Mapping[str, Callable[[Config], bool]] = field(default_factory=dict)
    """What else must be true of a Config to be written, and the field to name where it isn't."""


def _interleaved(config: Config, rows: Tensor, back: bool = False) -> Tensor:
    """The rows of each head [heads · head_dim, ...] from (first half, second half) to pairs, or back."""
    shape = (-1, config.head_dim // 2, 2) if back else (-1, 2, config.head_dim // 2)
    return rows.unflatten(0, shape).transpose(1, 2).flatten(0, 2)


def _write_interleaved(config: Config, tensor: Tensor) -> list[Tensor]:
    q, k, v = QKV_APART.write(config, tensor)
    return [_interleaved(config, q), _interleaved(config, k), v]


def _read_interleaved(config: Config, tensors: list[Tensor]) -> Tensor:
    q, k, v = tensors
    return torch.cat([_interleaved(config, q, back=True), _interleaved(config, k, back=True), v])


INTERLEAVE = Op(_write_interleaved, _read_interleaved)
EXPERT_HALVES_APART = Op(  # [n_experts, 2 d_ff, ...]
    lambda config, tensor: list(tensor.chunk(2, dim=1)), lambda config, tensors: torch.cat(tensors, dim=1)
)

_BLOCK = "blk.{i}."
ROWS = (
    Row("embed", ("token_embd",), VOCABULARY),
    Row("position_embed", ("position_embd",)),
    Row("embed_norm", ("token_embd_norm",)),
    Row("norm", ("output_norm",)),
    Row("head", ("output",), VOCABULARY),
    Row("blocks.{i}.attn_norm", (_BLOCK + "attn_norm",)),
    Row("blocks.{i}.attn.q_norm", (_BLOCK + "attn_q_norm",)),
    Row("blocks.{i}.attn.k_norm", (_BLOCK + "attn_k_norm",)),
    Row("blocks.{i}.attn.sinks", (_BLOCK + "attn_sinks",)),
    Row("blocks.{i}.attn.o", (_BLOCK + "attn_output",)),
    Row("blocks.{i}.attn_out_norm", (_BLOCK + "post_attention_norm",)),
    Row("blocks.{i}.ff_norm", (_BLOCK + "ffn_norm",)),
    Row("blocks.{i}.ff_out_norm", (_BLOCK + "post_ffw_norm",)),
)
FUSED_QKV = Row("blocks.{i}.attn.qkv", (_BLOCK + "attn_qkv",))
_APART = tuple(f"{_BLOCK}attn_{name}" for name in "qkv")
QKV = Row("blocks.{i}.attn.qkv", _APART, QKV_APART)
INTERLEAVED_QKV = Row("blocks.{i}.attn.qkv", _APART, INTERLEAVE)
DENSE = (Row("blocks.{i}.ff.up", (_BLOCK + "ffn_up",)), Row("blocks.{i}.ff.down", (_BLOCK + "ffn_down",)))
GATED = Row("blocks.{i}.ff.up", (_BLOCK + "ffn_gate", _BLOCK + "ffn_up"), HALVES_APART)
EXPERTS = (
    Row("blocks.{i}.ff.router", (_BLOCK + "ffn_gate_inp",)),
    Row("blocks.{i}.ff.up", (_BLOCK + "ffn_gate_exps", _BLOCK + "ffn_up_exps"), EXPERT_HALVES_APART),
    Row("blocks.{i}.ff.down", (_BLOCK + "ffn_down_exps",)),
)

# Fields of Config that no key says: they follow from which tensors there are.
BY_TENSOR: dict[str, Callable[[Collection[str]], bool]] = {
    "tie_embeddings": lambda names: "output.weight" not in names,
    "head_bias": lambda names: "output.bias" in names,
    "qkv_bias": lambda names: "blk.0.attn_q.bias" in names or "blk.0.attn_qkv.bias" in names,
    "attn_out_bias": lambda names: "blk.0.attn_output.bias" in names,
    "ff_bias": lambda names: "blk.0.ffn_up.bias" in names or "blk.0.ffn_up_exps.bias" in names,
    "norm_bias": lambda names: "output_norm.bias" in names,
}

KEYS = (
    Key("block_count", "n_layers"),
    Key("context_length", "max_seq_len"),
    Key("embedding_length", "d_model"),
    Key("attention.head_count", "n_heads"),
    Key("attention.head_count_kv", "n_kv_heads", None),
    Key("feed_forward_length", "d_ff"),
)
_EXPERT_KEYS = (Key("expert_count", "n_experts"), Key("expert_used_count", "n_experts_per_token"))
NORM_EPS = {
    "rmsnorm": Key("attention.layer_norm_rms_epsilon", "norm_eps"),
    "layernorm": Key("attention.layer_norm_epsilon", "norm_eps"),
}
ROPE_BASE = Key("rope.freq_base", "rope_base", 10_000.0)
_LOCAL_ROPE_BASE = Key("rope.freq_base_swa", "rope_local_base", 10_000.0)
_LOGIT_SCALE = Key("logit_scale", "logit_scale")
_LOGIT_SOFTCAP = Key("final_logit_softcapping", "logit_softcap", None)

# Keys that say nothing about what is computed.
IGNORED = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "interleave_moe_layer_step")
# Keys that say something only if they are none of these.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_gating_func": (1, 3),  # a softmax before the choice, or after it among those chosen: the same
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "use_parallel_residual": (False,),
}

# ---- the architectures; of those that can say a Config, the first is the one it is written as

_EVERY_BIAS = {"qkv_bias": True, "attn_out_bias": True, "ff_bias": True}
_PLAIN: dict[str, Any] = {"qk_norm": "none"}
_GPT: dict[str, Any] = {**_PLAIN, **_EVERY_BIAS, "norm": "layernorm", "feed_forward": "gelu_tanh"}
_GEMMA: dict[str, Any] = {
    **_PLAIN,
    "norm_weight": "one_plus",
    "feed_forward": "geglu_tanh",
    "embed_scale": lambda values, names: values["d_model"] ** 0.5,
}
_COHERE: dict[str, Any] = {
    **_PLAIN,
    "norm": "layernorm",
    "norm_bias": False,
    "block": "parallel_shared",
    "rope_pairing": "adjacent",
    "tie_embeddings": True,
}


def head_dim_of(values: Values) -> int:
    return values.get("head_dim") or values["d_model"] // values["n_heads"]


def _scale_of_largest(n_layers: int) -> Callable[[Values, Collection[str]], float]:
    """Of the largest model of a family, known by its layers, the scale of scores is that of d_model // n_heads."""
    return lambda values, names: (
        (values["d_model"] // values["n_heads"] if values["n_layers"] == n_layers else head_dim_of(values)) ** -0.5
    )


def _is_scaled_in_global_layers_alone(config: Config) -> bool:
    """As llama.cpp has it; but a factor of its own would multiply local ones too."""
    scaling = config.rope_scaling
    if scaling is None or config.window is None:
        return True
    return config.rope_local_base != config.rope_base and scaling.attention_factor is None


ARCHITECTURES = (
    Architecture(name="qwen3", fixed={"qk_norm": "per_head"}, wide_heads=True),
    Architecture(
        name="qwen3moe",
        fixed={"qk_norm": "per_head"},
        keys=(*_EXPERT_KEYS, Key("expert_feed_forward_length", "d_ff")),
        wide_heads=True,
    ),
    Architecture(name="qwen2", fixed={**_PLAIN, "qkv_bias": True}),
    Architecture(
        name="llama",  # Mistral, SmolLM 1 and 2, and Mixtral too
        fixed=_PLAIN,
        optional=("qkv_bias", "attn_out_bias", "ff_bias"),
        interleaved=True,
        keys=(Key("expert_count", "n_experts", 0), Key("expert_used_count", "n_experts_per_token", 2)),
        scalings=("linear", "yarn", "llama3"),
        wide_heads=True,
        demands={"ff_bias": lambda config: not (config.ff_bias and config.n_experts)},
    ),
    Architecture(
        name="smollm3",
        fixed={**_PLAIN, "position_pattern": "PPPN"},
        interleaved=True,
        wide_heads=True,
    ),
    Architecture(
        name="granite",
        fixed=_PLAIN,
        optional=("qkv_bias", "attn_out_bias", "ff_bias"),
        interleaved=True,
        keys=(
            Key("embedding_scale", "embed_scale", 1.0),
            Key("residual_scale", "residual_scale", 1.0),
            Key("attention.scale", "attn_scale", None),
            Key("logit_scale", "logit_scale", is_divisor=True),
        ),
        wide_heads=True,
    ),
    Architecture(name="gemma", fixed={**_GEMMA, "tie_embeddings": True}, wide_heads=True, partial_rotary=True),
    Architecture(
        name="gemma2",
        fixed={**_GEMMA, "block": "sandwich", "attn_scale": _scale_of_largest(46), "tie_embeddings": True},
        keys=(Key("attn_logit_softcapping", "attn_softcap", 50.0), _LOGIT_SOFTCAP._replace(default=30.0)),
        pattern="LG",
        wide_heads=True,
        partial_rotary=True,
        default_window=4096,
    ),
    Architecture(
        name="gemma3",
        fixed={**_GEMMA, "block": "sandwich", "qk_norm": "per_head", "attn_scale": _scale_of_largest(62)},
        keys=(_LOCAL_ROPE_BASE, _LOGIT_SOFTCAP),
        pattern="LLLLLG",
        wide_heads=True,
        partial_rotary=True,
        demands={"rope_scaling": _is_scaled_in_global_layers_alone},
    ),
    Architecture(name="olmo2", fixed={"block": "output", "qk_norm": "whole"}, needs_head=True),
    Architecture(
        name="olmo",
        fixed={**_PLAIN, "norm": "layernorm", "norm_weight": "none"},
        interleaved=True,
    ),
    Architecture(
        name="phi3",  # whose window llama.cpp ignores
        fixed=_PLAIN,
        fused=True,
        scalings=("linear", "yarn", "longrope"),
        renamed={"blocks.{i}.ff.up": _BLOCK + "ffn_up"},
        partial_rotary=True,
    ),
    Architecture(
        name="gpt-oss",
        fixed={
            **_PLAIN,
            **_EVERY_BIAS,
            "attn_sinks": True,
            "feed_forward": "swiglu_clamped",
        },
        keys=(*_EXPERT_KEYS, Key("expert_feed_forward_length", "d_ff")),
        pattern="LG",
        truncate=False,
        needs_head=True,
        renamed={"blocks.{i}.ff_norm": _BLOCK + "post_attention_norm"},
        wide_heads=True,
        default_window=None,
    ),
    Architecture(name="gpt2", fixed={**_GPT, "positions": "learned"}, fused=True),
    Architecture(name="starcoder2", fixed=_GPT),
    Architecture(
        name="gptneox",
        fixed={**_GPT, "feed_forward": "gelu"},
        keys=(Key("use_parallel_residual", "block", "parallel", {True: "parallel", False: "pre"}),),
        fused=True,
        needs_head=True,
        partial_rotary=True,
    ),
    Architecture(
        name="bloom",
        fixed={**_GPT, "positions": "alibi", "embed_norm": True},
        fused=True,
    ),
    Architecture(
        name="mpt",
        fixed={**_PLAIN, "norm": "layernorm", "feed_forward": "gelu", "positions": "alibi_mpt"},
        optional=("norm_bias", "qkv_bias", "attn_out_bias", "ff_bias"),
        constants={"attention.max_alibi_bias": 8.0},
        fused=True,
        # llama.cpp has the slopes in the other order, which for other numbers of heads are others.
        demands={"n_heads": lambda config: config.n_heads & (config.n_heads - 1) == 0},
    ),
    Architecture(
        name="falcon",
        fixed={
            **_PLAIN,
            "norm": "layernorm",
            "feed_forward": "gelu",
            "block": lambda values, names: "parallel" if "blk.0.attn_norm_2.weight" in names else "parallel_shared",
        },
        fused=True,
        renamed=lambda config: (
            {"blocks.{i}.attn_norm": _BLOCK + "attn_norm_2", "blocks.{i}.ff_norm": _BLOCK + "attn_norm"}
            if config.block == "parallel"
            else {}
        ),
    ),
    Architecture(
        name="phi2",
        fixed={**_GPT, "block": "parallel_shared", "head_bias": True},
        fused=True,
        needs_head=True,
        partial_rotary=True,
    ),
    Architecture(
        name="stablelm",
        fixed={
            **_PLAIN,
            "norm": "layernorm",
        },
        optional=("qkv_bias",),
        keys=(Key("use_parallel_residual", "block", ..., {True: "parallel_shared", False: "pre"}),),
        needs_head=True,
        partial_rotary=True,
    ),
    Architecture(
        name="command-r",
        fixed=_COHERE,
        keys=(_LOGIT_SCALE,),
        partial_rotary=True,
        demands={"n_layers": lambda config: config.n_layers < 64},
    ),
    Architecture(
        name="cohere2",
        fixed={**_COHERE, "position_pattern": "PPPN"},
        keys=(_LOGIT_SCALE,),
        pattern="LLLG",
        partial_rotary=True,
        default_window=None,
    ),
)
