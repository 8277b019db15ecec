"""Our Config and weights ↔ the config.json and tensors of a Hugging Face class. Files are run.py's business.

Reading refuses what a Config cannot say (a sliding window, scaled rotary angles …) by name: a setting that is ignored
in silence gives a model that almost works.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from leftward.config import Config, ConfigError
from leftward.errors import UserError
from leftward.formats.families import FAMILIES, LEFTWARD
from leftward.formats.family import SAME, Family, Op
from leftward.model.decoder import Decoder

OWN_KEY = "leftward"
"""The key of config.json for what the class has no key for; transformers keeps it and looks no further."""
_NEUTRAL_FIELDS = ("dropout", "vocab_multiple")
"""The fields that may stand there: they change nothing of what a finished model says."""


def family_of(config: Config) -> str | None:
    """The model_type under which transformers, vLLM and the like load what is saved from `config`; None: they can't."""
    family = _table_of(config)
    return None if family is LEFTWARD else family.model_type


def to_hf(config: Config, state: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors under their names, from a Decoder's state dict.

    The tensors are views of ours where the class keeps them alike.
    """
    family = _table_of(config)
    return _write_config(family, config, state["embed.weight"].dtype), _write_tensors(family, config, state)


def from_hf(config_json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Config, dict[str, Tensor]]:
    """The Config and a Decoder's state dict.

    Raises:
        UserError: config.json asks for what is not supported, or the tensors are not those that it describes.
    """
    config = config_from_hf(config_json)
    family = _table_named(config_json["model_type"])
    tensors = _under_full_names(family, tensors)
    if config.n_layers > len(tensors):  # before anything of that size is built
        raise UserError(f"{config.n_layers} layers are said, but the file has only {len(tensors)} tensors")
    if config.tie_embeddings:
        tensors = _without_tied_head(family, tensors)
    meta = meta_state(config)
    _check_tensors(_write_tensors(family, config, meta), tensors)
    state = {
        ours: op.read(config, [tensors[name] for name in theirs]).contiguous()
        for ours, theirs, op in _pairs(family, meta)
    }
    return config, state


def config_from_hf(config_json: Mapping[str, Any]) -> Config:
    """The Config that `config_json` describes. Raises: UserError, naming the feature that is not supported."""
    if "model_type" not in config_json:
        raise UserError("no model_type is given, so this describes no model")
    family = _table_named(config_json["model_type"])
    given = {key: value for key, value in config_json.items() if value is not None}
    if family is LEFTWARD:
        return Config.from_dict({key: given[key] for key in Config.__dataclass_fields__ if key in given})
    for setting in family.settings:
        if isinstance(given.get(setting.theirs), list | dict):
            raise UserError(f"{setting.theirs} is {given[setting.theirs]!r}: it must be one value")
    given = _flatten_rotary(given)
    for key, default in family.defaults.items():
        given.setdefault(key, default(given) if callable(default) else default)
    _refuse_features(given)
    for key, only in family.constants.items():
        if given.get(key, only) != only:
            raise UserError(f"{family.model_type} with {key} {given[key]!r} is not supported yet, only with {only!r}")
    values: dict[str, Any] = dict(family.fixed)
    for setting in family.settings:
        if setting.theirs not in given:
            raise UserError(f"no {setting.theirs} is given, which {family.model_type} needs")
        value = given[setting.theirs]
        if setting.values is not None:
            if not isinstance(value, str) or value not in setting.values:
                raise UserError(f"{setting.theirs} {value!r} is not supported yet: {', '.join(setting.values)} are")
            value = setting.values[value]
        values.update(dict.fromkeys(setting.fields, value))
    dropouts = {given.get(key, 0.0) for key in family.dropouts if isinstance(given.get(key, 0.0), float | int)}
    # Ours acts in three places; a class that knows fewer, or sets them apart, says something else.
    if len(family.dropouts) == 3 and len(dropouts) == 1:
        values["dropout"] = dropouts.pop()
    own = given.get(OWN_KEY)
    if isinstance(own, dict):
        values.update({key: value for key, value in own.items() if key in _NEUTRAL_FIELDS})
    return Config(**values)


def meta_state(config: Config) -> dict[str, Tensor]:
    """The names and shapes of a Decoder's weights, a tied head left out, without memory for their values."""
    try:
        with torch.device("meta"):
            state = Decoder(config).state_dict()
    except (RuntimeError, OverflowError) as error:
        raise UserError(f"the model described is too large to exist ({error})") from None
    return _without_head(config, state)


# ---- config.json


def _table_of(config: Config) -> Family:
    return next(family for family in FAMILIES if _expresses(family, config))


def _table_named(model_type: Any) -> Family:
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise UserError(f"model_type {model_type!r} is not supported yet: {known} are")


def _expresses(family: Family, config: Config) -> bool:
    """Whether what the class can say, and the defaults for all that it can't, is this Config."""
    if family is LEFTWARD:
        return True
    said = {name: getattr(config, name) for name in _NEUTRAL_FIELDS}
    for setting in family.settings:
        values = {getattr(config, name) for name in setting.fields}
        if len(values) > 1 or (setting.values is not None and not values <= set(setting.values.values())):
            return False
        said.update(dict.fromkeys(setting.fields, values.pop()))
    try:
        return Config(**{**said, **family.fixed}) == config and family.suits(config)
    except ConfigError:
        return False


def _write_config(family: Family, config: Config, dtype: torch.dtype) -> dict[str, Any]:
    # Null where the tokenizer has not spoken yet: the classes' own defaults are ids of somebody else's vocabulary.
    config_json: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family is LEFTWARD:
        config_json |= config.to_dict()
    for setting in family.settings:
        value = getattr(config, setting.fields[0])
        if setting.values is not None:
            value = next(theirs for theirs, ours in setting.values.items() if ours == value)
        config_json[setting.theirs] = value
    config_json |= family.constants
    config_json |= dict.fromkeys(family.dropouts, config.dropout)
    if "rope_theta" in config_json:  # where transformers 5 looks; version 4, vLLM and llama.cpp read rope_theta
        config_json["rope_parameters"] = {"rope_type": "default", "rope_theta": config_json["rope_theta"]}
    name = str(dtype).removeprefix("torch.")
    config_json |= {"torch_dtype": name, "dtype": name}  # the name in transformers 4, and in 5
    if (back := config_from_hf(config_json)) != config:
        unsaid = {key: value for key, value in config.to_dict().items() if getattr(back, key) != value}
        assert unsaid.keys() <= set(_NEUTRAL_FIELDS), f"the table of {family.model_type} loses {unsaid}"
        config_json[OWN_KEY] = unsaid
    return config_json


def _flatten_rotary(given: dict[str, Any]) -> dict[str, Any]:
    """rope_theta where transformers 4 has it, whichever version wrote the file. Refuses scaled angles."""
    given = dict(given)
    for key in ("rope_scaling", "rope_parameters"):
        rotary = given.pop(key, None) or {}
        if not isinstance(rotary, dict):
            raise UserError(f"{key} is {rotary!r}: it must be an object")
        kind = rotary.get("rope_type", rotary.get("type", "default"))
        if kind != "default":
            raise UserError(f"rotary positions scaled with {kind!r} ({key}) are not supported yet")
        if any(isinstance(value, dict) for value in rotary.values()):
            raise UserError(f"rotary positions that differ from layer to layer ({key}) are not supported yet")
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in rotary:
                given[name] = rotary[name]
    return given


def _refuse_features(given: Mapping[str, Any]) -> None:
    if "quantization_config" in given:
        quantization = given["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UserError(f"weights quantised with {method} (quantization_config) are not supported yet")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"rotary positions on a part of each head ({given['partial_rotary_factor']}) are not supported")
    window = given.get("sliding_window")
    if window is not None and given.get("use_sliding_window", True):
        # A window as long as the longest sequence hides nothing.
        longest = given.get("max_position_embeddings")
        if not (isinstance(window, int) and isinstance(longest, int) and window >= longest):
            raise UserError(f"a sliding window ({window!r} tokens) is not supported yet")
    layer_types = given.get("layer_types", [])
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise UserError(f"layers of several kinds (layer_types {layer_types}) are not supported yet")


# ---- tensors


def _pairs(family: Family, names: Iterable[str]) -> Iterator[tuple[str, list[str], Op]]:
    """Each of our tensor names with theirs and what is done on the way."""
    rows = {row.ours: row for row in family.rows}
    for name in names:
        if family is LEFTWARD:
            yield name, [name], SAME
            continue
        module, _, kind = name.rpartition(".")
        layer = re.search(r"\.(\d+)\.", module)
        row = rows[module if layer is None else module.replace(layer[0], ".{i}.", 1)]
        number = "" if layer is None else layer[1]
        yield name, [f"{theirs.replace('{i}', number)}.{kind}" for theirs in row.theirs], row.op


def _write_tensors(family: Family, config: Config, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = _without_head(config, state)
    tensors: dict[str, Tensor] = {}
    for ours, theirs, op in _pairs(family, state):
        tensors |= zip(theirs, op.write(config, state[ours]), strict=True)
    return tensors


def _without_head(config: Config, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if not (config.tie_embeddings and name == "head.weight")}


def _under_full_names(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the buffers of old files, and with the prefix that files of the bare model leave out."""
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(family.buffers)}
    if any(name.startswith(family.prefix) for name in tensors):
        return tensors
    return {name if name.startswith("lm_head.") else family.prefix + name: t for name, t in tensors.items()}


def _without_tied_head(family: Family, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some files hold a tied head twice; one that differs from the embedding is not tied."""
    names = {"head": "head.weight", "embed": "embed.weight"}  # LEFTWARD's
    names |= {row.ours: f"{row.theirs[0]}.weight" for row in family.rows}
    head, embed = tensors.get(names["head"]), tensors.get(names["embed"])
    if head is None or embed is None:
        return tensors
    if not torch.equal(head, embed):
        raise UserError(f"the head is said to be tied, but tensor {names['head']} is not {names['embed']}")
    return {name: tensor for name, tensor in tensors.items() if name != names["head"]}


def _check_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """One line for the first tensor that is missing, of another shape or no numbers, or not asked for."""
    for name, meta in expected.items():
        if name not in found:
            raise UserError(f"tensor {name} is missing; expected with shape {list(meta.shape)}")
        if found[name].shape != meta.shape:
            raise UserError(f"tensor {name} has shape {list(found[name].shape)}; expected {list(meta.shape)}")
        if not found[name].is_floating_point():
            raise UserError(f"tensor {name} holds {found[name].dtype}; expected floating-point numbers")
    if unexpected := found.keys() - expected.keys():
        more = f" (and {len(unexpected) - 1} more)" if len(unexpected) > 1 else ""
        raise UserError(f"tensor {min(unexpected)}{more} is not expected in a model of this config.json")
