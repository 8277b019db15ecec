"""The parts of config.json that take more than one key to say: rotary angles, windows by layer, scales.

Each `Rule` reads what any version of transformers wrote, and writes what versions 4 and 5, vLLM and llama.cpp read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from leftward.config import Config, RopeScaling, shortest_pattern
from leftward.errors import UserError
from leftward.formats.family import Json, Rule

# ---- rotary angles

# theirs → ours
_SCALING_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_seq_len",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "short_factor": "short_factors",
    "long_factor": "long_factors",
}
_OF_KIND = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        "attention_factor",
    ),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}
_OTHER_KEYS = ("type", "rope_type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim", "finetuned")


def rotary(base: float = 10_000.0, fraction: float | None = None, local_base: float | None = None) -> Rule:
    """rope_theta, partial_rotary_factor, rope_scaling (version 4) and rope_parameters (version 5).

    Args:
        base, fraction: what the class assumes where the keys are absent. No fraction: it always rotates whole heads.
        local_base: the same of local layers, where the class sets them apart (Gemma 3).
    """

    def read(given: Json) -> dict[str, Any]:
        said, local = _said(given)
        fields = {
            "rope_base": said.get("rope_theta", given.get("rope_theta", base)),
            "rope_fraction": said.get("partial_rotary_factor", given.get("partial_rotary_factor", fraction or 1.0)),
        }
        if local_base is not None:
            fields["rope_local_base"] = local.get("rope_theta", given.get("rope_local_base_freq", local_base))
        if fraction is None and fields["rope_fraction"] != 1.0:
            raise UserError(f"partial_rotary_factor {fields['rope_fraction']} is not supported in this class")
        kind = said.get("rope_type", said.get("type", "default"))
        if kind != "default":
            fields["rope_scaling"] = _scaling(kind, said, given)
        return fields

    def write(config: Config) -> dict[str, Any]:
        scaling = _written_scaling(config.rope_scaling)
        whole: dict[str, Any] = {"rope_type": "default", **scaling, "rope_theta": config.rope_base}
        keys: dict[str, Any] = {"rope_theta": config.rope_base, "rope_parameters": whole}
        if fraction is not None:
            keys["partial_rotary_factor"] = whole["partial_rotary_factor"] = config.rope_fraction
        if scaling:
            keys["rope_scaling"] = scaling
        if scaling.get("rope_type") == "longrope":  # where Phi 3 looks for it
            keys["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
        if local_base is not None:
            keys["rope_local_base_freq"] = config.rope_local_base
            local = {"rope_type": "default", "rope_theta": config.rope_local_base}
            keys["rope_parameters"] = {"full_attention": whole, "sliding_attention": local}
        return keys

    return Rule(read, write)


def _said(given: Json) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is said of the angles in general, and of those of local layers."""
    said: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(rotary := given.get(key, {}), dict):
            raise UserError(f"{key} is {rotary!r}: it must be an object")
        said |= {name: value for name, value in rotary.items() if value is not None}
    local = said.get("sliding_attention", {})
    if "full_attention" in said:
        said = said["full_attention"]
    if not isinstance(said, dict) or not isinstance(local, dict):
        raise UserError(f"rope_parameters are {given.get('rope_parameters')!r}: each kind of layer must have an object")
    return said, local


def _scaling(kind: Any, said: Json, given: Json) -> dict[str, Any]:
    kind = {"su": "longrope"}.get(kind, kind)
    if kind not in _OF_KIND:
        raise UserError(f"rotary positions scaled with {kind!r} are not supported yet: {', '.join(_OF_KIND)} are")
    if unknown := said.keys() - _SCALING_KEYS.keys() - set(_OTHER_KEYS):
        raise UserError(f"rotary positions scaled with {kind}: {min(unknown)} is not supported yet")
    fields = {
        ours: said[theirs] for theirs, ours in _SCALING_KEYS.items() if theirs in _OF_KIND[kind] and theirs in said
    }
    if kind not in ("linear", "dynamic"):  # Phi 3 has it outside
        fields.setdefault("original_max_seq_len", given.get("original_max_position_embeddings"))
    if kind == "yarn" and "factor" not in fields and fields["original_max_seq_len"]:
        fields["factor"] = given["max_position_embeddings"] / fields["original_max_seq_len"]
    if kind == "yarn" and "attention_factor" not in fields and said.get("mscale") and said.get("mscale_all_dim"):
        scale = math.log(max(1.0, fields["factor"]))  # DeepSeek's
        fields["attention_factor"] = (0.1 * said["mscale"] * scale + 1) / (0.1 * said["mscale_all_dim"] * scale + 1)
    return {"kind": kind, **{name: value for name, value in fields.items() if value is not None}}


def _written_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {}
    said: dict[str, Any] = {"rope_type": scaling.kind}
    for theirs in _OF_KIND[scaling.kind]:
        value = getattr(scaling, _SCALING_KEYS[theirs])
        if value is not None and not (scaling.kind == "longrope" and theirs == "factor" and value == 1.0):
            said[theirs] = list(value) if isinstance(value, tuple) else value
    return said


# ---- who is local, who knows positions


def _windows(letters: str, window: Any) -> dict[str, Any]:
    pattern = shortest_pattern(letters)
    return {"window": window, "attention_pattern": pattern} if "L" in pattern else {"attention_pattern": "G"}


def _read_everywhere(given: Json) -> dict[str, Any]:
    return {"window": given["sliding_window"], "attention_pattern": "L"} if "sliding_window" in given else {}


WINDOW_EVERYWHERE = Rule(_read_everywhere, lambda config: {"sliding_window": config.window})
"""sliding_window, in all layers or none: Mistral."""


def windows_by_layer(otherwise: Callable[[Json], str]) -> Rule:
    """layer_types and sliding_window: Gemma 2 and 3, gpt-oss, Qwen.

    Args:
        otherwise: the pattern where layer_types is absent, as in files of version 4.
    """

    def read(given: Json) -> dict[str, Any]:
        n_layers, kinds = given["num_hidden_layers"], given.get("layer_types")
        if kinds is None:
            pattern = otherwise(given)
            letters = (pattern * n_layers)[:n_layers]
        else:
            names = {"sliding_attention": "L", "full_attention": "G"}
            if not isinstance(kinds, list) or len(kinds) != n_layers or not all(kind in names for kind in kinds):
                raise UserError(
                    f"layer_types {str(kinds)[:200]} are not supported: {n_layers} of {' or '.join(names)} are"
                )
            letters = "".join(names[kind] for kind in kinds)
        return _windows(letters, given.get("sliding_window"))

    def write(config: Config) -> dict[str, Any]:
        kinds = [
            "sliding_attention" if config.is_local(layer) else "full_attention" for layer in range(config.n_layers)
        ]
        # Some classes want a number even where no layer looks at it.
        return {"sliding_window": config.window or config.max_seq_len, "layer_types": kinds}

    return Rule(read, write)


def _qwen_pattern(given: Json) -> str:
    if not given.get("use_sliding_window", False):
        return "G"
    n_layers, first = given["num_hidden_layers"], given.get("max_window_layers", 28)
    return ("G" * min(first, n_layers) + "L" * max(0, n_layers - first)) or "G"


def _write_qwen(config: Config) -> dict[str, Any]:
    keys = windows_by_layer(_qwen_pattern).write(config)
    first = next((layer for layer in range(config.n_layers) if config.is_local(layer)), None)
    last = config.n_layers if first is None else first
    return keys | {"use_sliding_window": first is not None, "max_window_layers": last}


QWEN_WINDOWS = Rule(windows_by_layer(_qwen_pattern).read, _write_qwen)


# ---- numbers that a class says in its own way


def inverse(theirs: str, ours: str) -> Rule:
    """A divisor that is a factor of ours."""
    return Rule(
        lambda given: {ours: 1.0 / given.get(theirs, 1.0)},
        lambda config: {theirs: _near_whole(1.0 / getattr(config, ours))},
    )


def times(theirs: str, ours: str, default: float = 1.0) -> Rule:
    """The same factor, which may be a whole number there."""
    return Rule(lambda given: {ours: float(given.get(theirs, default))}, lambda config: {theirs: getattr(config, ours)})


def attention_scalar() -> Rule:
    """query_pre_attn_scalar: the square of the scores' divisor (Gemma 2)."""
    return Rule(
        lambda given: {"attn_scale": given.get("query_pre_attn_scalar", 256) ** -0.5},
        lambda config: {"query_pre_attn_scalar": _near_whole(config.attn_scale**-2)},
    )


def derived(field: str, value: Callable[[Json], Any]) -> Rule:
    """A field that the class computes from other keys."""
    return Rule(lambda given: {field: value(given)})


def maybe(theirs: str, ours: str) -> Rule:
    """A number that may be absent, which means that there is no such thing."""
    return Rule(
        lambda given: {ours: float(given[theirs])} if theirs in given else {},
        lambda config: {theirs: getattr(config, ours)},
    )


def _near_whole(value: float) -> float:
    return round(value) if abs(value - round(value)) < 1e-6 * abs(value) else value


def choice(key: str, options: Sequence[tuple[Any, dict[str, Any]]], default: Any) -> Rule:
    """A key whose values stand for several fields at once: (value, fields) for each."""

    def read(given: Json) -> dict[str, Any]:
        value = given.get(key, default)
        for option, fields in options:
            if option == value:
                return fields
        raise UserError(f"{key} {value!r} is not supported: {', '.join(repr(option) for option, _ in options)} are")

    def write(config: Config) -> dict[str, Any]:
        for option, fields in options:
            if all(getattr(config, name) == value for name, value in fields.items()):
                return {key: option}
        return {key: default}

    return Rule(read, write)
