"""Our Config and weights ↔ config.json and the tensors of a Hugging Face class. Files: model_directory.py.

Reading refuses what a Config cannot say by name: a setting that is ignored in silence gives a model that almost works.
Writing takes a class only where reading what was written gives the Config back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from leftward.config import Config
from leftward.errors import UserError
from leftward.formats.families import FAMILIES, LEFTWARD
from leftward.formats.family import SAME, Family, Op, Rule, Setting
from leftward.model.decoder import Decoder

OWN_KEY = "leftward"
"""The key of config.json for what the class has no key for; transformers keeps it and looks no further."""
_NEUTRAL_FIELDS = ("dropout", "vocab_multiple", "attention_pattern", "position_pattern", "window")
"""The fields that may stand there, where they change nothing of what a finished model says: of a pattern, its letters
beyond what the layers spell out."""
_MOST_LAYERS = 4096  # which rules spell out


def family_of(config: Config) -> str | None:
    """The model_type under which transformers, vLLM and the like load what is saved from `config`; None: they can't."""
    family, _ = _best_table(config)
    return None if family is LEFTWARD else family.model_type


def to_hf(
    config: Config, state: Mapping[str, Tensor], model_type: str | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors under their names, from a Decoder's state dict.

    The tensors are views of ours where the class keeps them alike.

    Args:
        model_type: the class to prefer, of those that can say all of `config`: the one that a model came from.
    """
    family, config_json = _best_table(config, model_type)
    name = str(state["embed.weight"].dtype).removeprefix("torch.")
    config_json |= {"torch_dtype": name, "dtype": name}  # the name in transformers 4, and in 5
    return config_json, _write_tensors(family, config, state)


def places(config: Config, names: Iterable[str], model_type: str | None = None) -> Iterator[tuple[str, list[str], Op]]:
    """Where the class that `to_hf` takes has our tensors: each name with theirs, and what is done on the way."""
    return _pairs(_best_table(config, model_type)[0], config, names)


def from_hf(config_json: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Config, dict[str, Tensor]]:
    """The Config and a Decoder's state dict.

    Raises:
        UserError: config.json asks for what is not supported, or the tensors are not those that it describes.
    """
    config = config_from_hf(config_json)
    family = next(table for table in _tables_named(config_json["model_type"]) if _suits(table, config))
    tensors = _under_full_names(family, tensors)
    n_apart = config.n_experts if any("{e}" in row.theirs[0] for row in family.rows) else 1
    if config.n_layers * n_apart > len(tensors):  # before anything of that size is built
        experts = f" of {n_apart} experts" if n_apart > 1 else ""
        raise UserError(f"{config.n_layers} layers{experts} are said, but the file has only {len(tensors)} tensors")
    if config.tie_embeddings:
        tensors = _without_tied_head(family, config, tensors)
    meta = meta_state(config)
    _check_tensors(_write_tensors(family, config, meta), tensors)
    state = {
        ours: op.read(config, [tensors[name] for name in theirs]).contiguous()
        for ours, theirs, op in _pairs(family, config, meta)
    }
    return config, state


def config_from_hf(config_json: Mapping[str, Any]) -> Config:
    """The Config that `config_json` describes. Raises: UserError, naming the feature that is not supported."""
    if "model_type" not in config_json:
        raise UserError("no model_type is given, so this describes no model")
    tables = _tables_named(config_json["model_type"])
    config = _read_config(tables[0], config_json)
    if not any(_suits(table, config) for table in tables):
        variant = f"block {config.block}, {config.n_experts} experts or this head_dim"
        raise UserError(f"{config_json['model_type']} with {variant} is not supported")
    return config


def meta_state(config: Config) -> dict[str, Tensor]:
    """The names and shapes of a Decoder's weights, a tied head left out, without memory for their values."""
    try:
        with torch.device("meta"):
            state = Decoder(config).state_dict()
    except (RuntimeError, OverflowError) as error:
        raise UserError(f"the model described is too large to exist ({error})") from None
    return _without_head(config, state)


# ---- config.json


def _best_table(config: Config, preferred: str | None = None) -> tuple[Family, dict[str, Any]]:
    """The first family that says all of `config`, and its config.json: reading that gives `config` back."""
    for family in sorted(FAMILIES, key=lambda family: family.model_type != preferred):
        if (config_json := _write_config(family, config)) is not None:
            return family, config_json
    raise AssertionError("the last family is our own")


def _tables_named(model_type: Any) -> list[Family]:
    if tables := [family for family in FAMILIES if family.model_type == model_type]:
        return tables
    known = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES))
    raise UserError(f"model_type {model_type!r} is not supported yet: {known} are")


def _suits(family: Family, config: Config) -> bool:
    """Whether the class has a place for every weight."""
    is_mixture = any(row.ours.endswith(".router") for row in family.rows)
    return family is LEFTWARD or (family.suits(config) and is_mixture == (config.n_experts > 0))


def _read_config(family: Family, config_json: Mapping[str, Any]) -> Config:
    given = _Given({key: value for key, value in config_json.items() if value is not None})
    if family is LEFTWARD:
        return Config.from_dict({key: given[key] for key in Config.__dataclass_fields__ if key in given})
    try:
        return _read_settings(family, given)
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"no {error.args[0]} is given, which {family.model_type} needs") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UserError(f"its settings do not fit {family.model_type} ({error})") from None


class _Given(dict[str, Any]):
    """config.json, which remembers what it was asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def _read_settings(family: Family, given: _Given) -> Config:
    for key, default in family.defaults.items():
        if key not in given:
            given[key] = default(given) if callable(default) else default
    for key, only in family.constants.items():
        if given.get(key, only) != only:
            raise UserError(f"{family.model_type} with {key} {given[key]!r} is not supported yet, only with {only!r}")
    values: dict[str, Any] = dict(family.fixed)
    for setting in family.settings:
        if isinstance(setting, Setting):
            values.update(dict.fromkeys(setting.fields, _value_of(setting, given, family)))
    n_layers = values["n_layers"]
    if isinstance(n_layers, int) and n_layers > _MOST_LAYERS:
        raise UserError(f"{n_layers} layers are said, and no model has more than {_MOST_LAYERS}")
    for setting in family.settings:
        if isinstance(setting, Rule):
            values.update(setting.read(given))
    _refuse_unread(family, given)
    dropouts = {given.get(key, 0.0) for key in family.dropouts if isinstance(given.get(key, 0.0), float | int)}
    # Ours acts in three places; a class that knows fewer, or sets them apart, says something else.
    if len(family.dropouts) == 3 and len(dropouts) == 1:
        values["dropout"] = dropouts.pop()
    own = given.get(OWN_KEY)
    if isinstance(own, dict):
        values.update({key: value for key, value in own.items() if key in _NEUTRAL_FIELDS})
    return Config(**values)


def _value_of(setting: Setting, given: Mapping[str, Any], family: Family) -> Any:
    if setting.theirs not in given:
        raise UserError(f"no {setting.theirs} is given, which {family.model_type} needs")
    value = given[setting.theirs]
    if isinstance(value, list | dict):
        raise UserError(f"{setting.theirs} is {value!r}: it must be one value")
    if setting.values is None:
        return value
    if not isinstance(value, str) or value not in setting.values:
        raise UserError(f"{setting.theirs} {value!r} is not supported yet: {', '.join(setting.values)} are")
    return setting.values[value]


def _write_config(family: Family, config: Config) -> dict[str, Any] | None:
    """config.json as the class has it; None where it can't say all of `config`."""
    # Null where the tokenizer has not spoken yet: the classes' own defaults are ids of somebody else's vocabulary.
    config_json: dict[str, Any] = {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family is LEFTWARD:
        return config_json | config.to_dict()
    for setting in family.settings:
        if isinstance(setting, Rule):
            config_json |= setting.write(config)
            continue
        value = getattr(config, setting.fields[0])
        if setting.values is not None:
            value = next((theirs for theirs, ours in setting.values.items() if ours == value), None)
        config_json[setting.theirs] = value
    config_json |= family.constants
    config_json |= dict.fromkeys(family.dropouts, config.dropout)
    try:
        back = _read_config(family, config_json)
    except UserError:
        return None
    unsaid = {name: value for name, value in vars(config).items() if getattr(back, name) != value}
    if not _suits(family, config) or not all(_is_neutral(name, config, back) for name in unsaid):
        return None
    return config_json | {OWN_KEY: unsaid} if unsaid else config_json


def _is_neutral(name: str, config: Config, back: Config) -> bool:
    """Whether a difference in this field changes nothing of what a finished model says."""
    if name == "window":  # of layers of which there is none
        return not any(map(config.is_local, range(config.n_layers)))
    if name in ("attention_pattern", "position_pattern"):
        layers = range(config.n_layers)
        kinds = [[(c.is_local(layer), c.knows_positions(layer)) for layer in layers] for c in (config, back)]
        return kinds[0] == kinds[1]
    return name in _NEUTRAL_FIELDS


# Keys that change what a model says, in whichever class they stand.
_TELLING = ("sliding_window", "layer_types", "rope_scaling", "rope_parameters", "partial_rotary_factor")


def _refuse_unread(family: Family, given: _Given) -> None:
    for key in _TELLING:
        if key in given and key not in given.asked:
            raise UserError(f"{family.model_type} with {key} {str(given[key])[:100]} is not supported")
    if "quantization_config" in given:
        quantization = given["quantization_config"]
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UserError(f"weights quantised with {method} (quantization_config) are not supported yet")


# ---- tensors


def _pairs(family: Family, config: Config, names: Iterable[str]) -> Iterator[tuple[str, list[str], Op]]:
    """Each of our tensor names with theirs and what is done on the way."""
    rows = {row.ours: row for row in family.rows}
    for name in names:
        if family is LEFTWARD:
            yield name, [name], SAME
            continue
        layer = re.search(r"\.(\d+)\.", name)
        pattern = name if layer is None else name.replace(layer[0], ".{i}.", 1)
        module, _, kind = pattern.rpartition(".")
        row, ending = (rows[pattern], "") if pattern in rows else (rows[module], f".{kind}")
        number = "" if layer is None else layer[1]
        theirs = [their.replace("{i}", number) + ending for their in row.theirs]
        if "{e}" in theirs[0]:
            theirs = [their.replace("{e}", str(e)) for e in range(config.n_experts) for their in theirs]
        yield name, theirs, row.op


def _write_tensors(family: Family, config: Config, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = _without_head(config, state)
    tensors: dict[str, Tensor] = {}
    for ours, theirs, op in _pairs(family, config, state):
        tensors |= zip(theirs, op.write(config, state[ours]), strict=True)
    return tensors


def _without_head(config: Config, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if not (config.tie_embeddings and name == "head.weight")}


def _under_full_names(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the buffers of old files, and with the prefix that files of the bare model leave out."""
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(family.buffers)}
    if any(name.startswith(family.prefix) for name in tensors):
        return tensors
    return {name if name.startswith(family.head) else family.prefix + name: t for name, t in tensors.items()}


def _without_tied_head(family: Family, config: Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some files hold a tied head twice; one that differs from the embedding is not tied."""
    (_, (head,), _), (_, (embed,), _) = _pairs(family, config, ("head.weight", "embed.weight"))
    if head not in tensors or embed not in tensors:
        return tensors
    if not torch.equal(tensors[head], tensors[embed]):
        raise UserError(f"the head is said to be tied, but tensor {head} is not {embed}")
    return {name: tensor for name, tensor in tensors.items() if name != head}


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
