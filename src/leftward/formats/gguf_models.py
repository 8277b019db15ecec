"""Metadata and tensor names of a GGUF model ↔ our Config and a Decoder's state, both ways. The container is
gguf.py's business, its tokenizer that of text/.

The tables are in gguf_architectures.py. What a file says beyond its row there is refused by name; what a Config says
beyond every row can't be written. Writing reads back what it wrote, so that no table can lose a field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leftward.config import Config, RopeScaling
from leftward.errors import UserError
from leftward.formats.cores import one_thread_an_operation
from leftward.formats.family import Op, Row
from leftward.formats.gguf import GGUF
from leftward.formats.gguf_architectures import (
    ARCHITECTURES,
    BY_TENSOR,
    DENSE,
    EXPERTS,
    FUSED_QKV,
    GATED,
    IGNORED,
    INTERLEAVED_QKV,
    KEYS,
    NEUTRAL,
    NORM_EPS,
    QKV,
    ROPE_BASE,
    ROWS,
    Architecture,
    Key,
    Values,
    head_dim_of,
)
from leftward.formats.hf import meta_state
from leftward.formats.kinds import KINDS
from leftward.formats.packing import pack_tensors
from leftward.formats.quants import WRITABLE, dequantise
from leftward.kernels.packed import Packed
from leftward.model.positions import frequencies
from leftward.text.gguf_metadata import with_padding

Shapes = Mapping[str, tuple[int, ...]]

OWN_KEY = "leftward.config"
"""Fields, as JSON, that GGUF has no key for, or keeps with fewer digits: `_means_the_same` says which may stand there.
llama.cpp looks no further."""

# ---- reading


def from_gguf(gguf: GGUF, dtype: torch.dtype | None = torch.float32) -> tuple[Config, dict[str, Tensor]]:
    """The Config and a Decoder's state dict, a tied head left out. Plain numbers of `dtype` stay in the mapped file.
    `dtype` None: floats as they are stored, quantised ones in fp32.

    Raises:
        UserError: the architecture is none of ARCHITECTURES, a setting is not supported, or the tensors are not those
            that the metadata describes.
    """
    config, state, _ = _from_gguf(gguf, dtype, packs=False)
    return config, state


def from_gguf_packed(gguf: GGUF) -> tuple[Config, dict[str, Tensor], dict[str, list[Packed]]]:
    """The same, but that quantised matrices are not in the state dict: they stay quantised, as the parts of packed
    ones. Other numbers are fp32. A model with experts has no packed ones. Raises: UserError, as `from_gguf`."""
    return _from_gguf(gguf, torch.float32, packs=True)


def _from_gguf(
    gguf: GGUF, dtype: torch.dtype | None, packs: bool
) -> tuple[Config, dict[str, Tensor], dict[str, list[Packed]]]:
    state: dict[str, Tensor] = {}
    packed: dict[str, list[Packed]] = {}
    try:
        shapes = {name: info.shape for name, info in gguf.tensors.items()}
        architecture, config = _config_of(gguf.metadata, shapes, gguf.tensor)
        meta = meta_state(config)
        _check_shapes(_tensors_of(architecture, config, meta), shapes)
        if config.tie_embeddings and "output.weight" in shapes:
            _check_tied(gguf)
        with one_thread_an_operation():
            for ours, theirs, op in _pairs(architecture, config, meta):
                if packs and not config.n_experts and all(map(partial(_is_packable, gguf), theirs)):
                    packed[ours] = pack_tensors(config, op, [_raw_rows(gguf, name) for name in theirs])
                else:
                    state[ours] = _read(gguf, config, ours, theirs, op, dtype)
    except UserError as error:
        message = str(error)
        raise UserError(message if message.startswith(str(gguf.path)) else f"{gguf.path}: {message}") from None
    return config, state, packed


def config_of(gguf: GGUF) -> Config:
    """The Config alone. Raises: UserError, as `from_gguf`, where the metadata is at fault."""
    shapes = {name: info.shape for name, info in gguf.tensors.items()}
    return _config_of(gguf.metadata, shapes, gguf.tensor)[1]


class _Settings:
    """The metadata of one architecture. What is never taken is left over, and not ignored."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any]) -> None:
        self.prefix = f"{architecture}."
        self.left = {
            key.removeprefix(self.prefix): value for key, value in metadata.items() if key.startswith(self.prefix)
        }

    def take(self, key: str, default: Any = ...) -> Any:
        """A value; one of a list where all layers have the same; a float as the shortest decimal that is the same in
        fp32, so that 1e-6 is 1e-6 again."""
        if key not in self.left:
            if default is ...:
                raise UserError(f"metadata {self.prefix}{key} is missing")
            return default
        value = self.left.pop(key)
        if isinstance(value, list) and value and all(element == value[0] for element in value):
            value = value[0]
        if isinstance(value, float):
            return float(str(np.float32(value)))
        if not isinstance(value, int | str):
            raise UserError(f"metadata {self.prefix}{key} differs from layer to layer, which is not supported yet")
        return value

    def count(self, key: str, default: Any = ...) -> Any:
        """A whole number that sizes can be reckoned from."""
        value = self.take(key, default)
        if value != default and (type(value) is not int or not 0 < value < 1 << 31):
            raise UserError(f"metadata {self.prefix}{key}: expected a whole number from 1 to 2^31, found {value!r:.40}")
        return value

    def number(self, key: str, default: Any = ...) -> Any:
        value = self.take(key, default)
        if value is not default and (type(value) not in (int, float) or not 0 < value < math.inf):
            raise UserError(f"metadata {self.prefix}{key}: expected a number above 0, found {value!r:.40}")
        return value

    def field(self, key: Key) -> Any:
        if key.values is None:
            is_count = Config.__dataclass_fields__[key.ours].type == "int"
            value = self.count(key.theirs, key.default) if is_count else self.number(key.theirs, key.default)
            return 1 / value if key.is_divisor else value
        value = self.take(key.theirs, None)
        if value is None and key.default is not ...:
            return key.default
        if value not in key.values:
            raise UserError(
                f"metadata {self.prefix}{key.theirs}: expected one of {list(key.values)}, found {value!r:.40}"
            )
        return key.values[value]

    def refuse_what_is_left(self) -> None:
        for key in [key for key in self.left if key not in IGNORED]:
            if isinstance(self.left[key], list):
                raise UserError(f"metadata {self.prefix}{key} is a list, which is not supported yet")
            if (value := self.take(key)) not in NEUTRAL.get(key, ()):
                raise UserError(f"metadata {self.prefix}{key} is {value!r:.40}, which is not supported yet")


def _architecture_named(name: Any) -> Architecture:
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    known = ", ".join(architecture.name for architecture in ARCHITECTURES)
    if name is None:
        raise UserError("general.architecture is missing, so this describes no model")
    raise UserError(f"general.architecture {name!r:.60} is not supported yet: {known} are")


def _config_of(
    metadata: Mapping[str, Any], shapes: Shapes, read: Callable[[str], Tensor]
) -> tuple[Architecture, Config]:
    architecture = _architecture_named(metadata.get("general.architecture"))
    settings = _Settings(architecture.name, metadata)
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise UserError("tensor token_embd.weight is missing; expected with shape [vocab_size, d_model]")
    values: Values = {"vocab_size": shapes["token_embd.weight"][0]}
    values |= {key.ours: settings.field(key) for key in (*KEYS, *architecture.keys)}
    if values["n_layers"] > len(shapes):  # before anything of that size is built
        raise UserError(f"{values['n_layers']} layers are said, but the file has only {len(shapes)} tensors")
    values["head_dim"] = settings.count("attention.key_length", None)
    if settings.count("attention.value_length", head_dim_of(values)) != head_dim_of(values):
        raise UserError(
            f"values of another width than keys ({settings.prefix}attention.value_length) are not supported"
        )
    by_tensor = {
        name: of(shapes) for name, of in BY_TENSOR.items() if name in ("tie_embeddings", *architecture.optional)
    }
    values |= by_tensor
    for name, value in architecture.fixed.items():
        values[name] = value(values, shapes) if callable(value) else value
    eps = NORM_EPS[values.get("norm", "rmsnorm")]
    values[eps.ours] = settings.field(eps)
    for key, constant in architecture.constants.items():
        if (found := settings.take(key, constant)) != constant:
            raise UserError(f"metadata {settings.prefix}{key}: expected {constant}, found {found!r:.40}")
    if values.get("positions", "rotary") == "rotary":
        values["rope_base"] = settings.field(ROPE_BASE)
        rotated = settings.count("rope.dimension_count", head_dim_of(values))
        values["rope_fraction"] = rotated / head_dim_of(values)
        if architecture.interleaved and rotated != head_dim_of(values):
            raise UserError(f"rotary positions on a part of each head are not supported for {architecture.name}")
    values |= _window(settings, architecture, values["n_layers"])
    if (scale := settings.number("attention.scale", None)) is not None:
        values["attn_scale"] = scale
    config = Config(**values)
    config = replace(config, rope_scaling=_scaling(settings, architecture, config, shapes, read))
    settings.refuse_what_is_left()
    return architecture, _with_own(config, metadata)


def _window(settings: _Settings, architecture: Architecture, n_layers: int) -> Values:
    default = architecture.default_window
    window = settings.take("attention.sliding_window", ... if default is None else default)
    pattern = settings.left.pop("attention.sliding_window_pattern", None)
    if not window:
        return {}
    letters = architecture.pattern or "L"
    if isinstance(pattern, list):  # whether each layer is local
        if len(pattern) != n_layers:
            raise UserError(f"{settings.prefix}attention.sliding_window_pattern is not one value for each layer")
        letters = "".join("L" if is_local else "G" for is_local in pattern)
        letters = next(letters[:n] for n in range(1, n_layers + 1) if _repeated(letters[:n], n_layers) == letters)
    elif pattern is not None:  # one layer in so many is not
        if type(pattern) is not int or not 0 <= pattern <= n_layers:
            raise UserError(
                f"{settings.prefix}attention.sliding_window_pattern is {pattern!r:.40}, which means nothing"
            )
        letters = "L" * (pattern - 1) + "G" if pattern else "L"
    return {"window": window, "attention_pattern": letters} if "L" in letters else {}


def _repeated(pattern: str, n_layers: int) -> str:
    return (pattern * -(-n_layers // len(pattern)))[:n_layers]


def _scaling(
    settings: _Settings, architecture: Architecture, config: Config, shapes: Shapes, read: Callable[[str], Tensor]
) -> RopeScaling | None:
    if config.positions != "rotary":
        return None
    kind = settings.take("rope.scaling.type", "none")
    factor = settings.number("rope.scaling.factor", settings.number("rope.scale_linear", 1.0))
    original = settings.count("rope.scaling.original_context_length", None)
    if "rope_factors_long.weight" in shapes:
        long, short = (_divisors(f"rope_factors_{name}.weight", config, shapes, read) for name in ("long", "short"))
        scaling = RopeScaling(kind="longrope", original_max_seq_len=original, long_factors=long, short_factors=short)
        return _with_attention_factor(config, scaling, settings.number("rope.scaling.attn_factor", None))
    if "rope_freqs.weight" in shapes:
        return _scaling_by_divisors(config, original, _divisors("rope_freqs.weight", config, shapes, read))
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind != "yarn":
        raise UserError(f"metadata {settings.prefix}rope.scaling.type {kind!r:.40} is not supported yet")
    scaling = RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_seq_len=original,
        beta_fast=settings.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=settings.number("rope.scaling.yarn_beta_slow", 1.0),
        truncate=architecture.truncate,
    )
    times = settings.number("rope.scaling.attn_factor", 1.0)
    return scaling if times == 1 else replace(scaling, attention_factor=times * _yarn_factor(factor))


def _yarn_factor(factor: float) -> float:
    """The paper's formula, which llama.cpp multiplies by rope.scaling.attn_factor."""
    return 0.1 * math.log(factor) + 1


def _divisors(name: str, config: Config, shapes: Shapes, read: Callable[[str], Tensor]) -> tuple[float, ...]:
    """What the frequency of each rotated pair is divided by."""
    if shapes.get(name) != (config.rope_dim // 2,):
        found = list(shapes[name]) if name in shapes else "nothing"
        raise UserError(f"tensor {name}: expected shape {[config.rope_dim // 2]}, found {found}")
    return tuple(float(str(divisor)) for divisor in read(name).numpy())


def _with_attention_factor(config: Config, scaling: RopeScaling, factor: float | None) -> RopeScaling:
    """None where `factor` is what the formula gives."""
    formula = frequencies(replace(config, rope_scaling=scaling))[1]
    is_formula = factor is None or math.isclose(factor, formula, rel_tol=1e-6)
    return scaling if is_formula else replace(scaling, attention_factor=factor)


def _scaling_by_divisors(config: Config, original: int | None, divisors: tuple[float, ...]) -> RopeScaling:
    """Llama 3's rule where it gives these divisors; otherwise as they are."""
    as_they_are = RopeScaling(
        kind="longrope",
        original_max_seq_len=config.max_seq_len,
        short_factors=divisors,
        long_factors=divisors,
        attention_factor=1.0,
    )
    config = replace(config, rope_scaling=as_they_are)
    if (factor := max(divisors)) < 1:
        return as_they_are
    rule = RopeScaling(kind="llama3", factor=factor, original_max_seq_len=original or 8192)
    return rule if _same_angles(config, replace(config, rope_scaling=rule)) else as_they_are


def _same_angles(one: Config, other: Config) -> bool:
    for local in (False, True):
        (ours, factor), (theirs, other_factor) = frequencies(one, local), frequencies(other, local)
        pairs = zip((*ours, factor), (*theirs, other_factor), strict=True)
        if not all(math.isclose(a, b, rel_tol=1e-5) for a, b in pairs):
            return False
    return True


def _with_own(config: Config, metadata: Mapping[str, Any]) -> Config:
    """With the fields that we wrote ourselves, if they are another way to say what the file says."""
    if OWN_KEY not in metadata:
        return config
    try:
        own = json.loads(metadata[OWN_KEY])
        said = Config.from_dict({**config.to_dict(), **own})
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"metadata {OWN_KEY} is damaged ({error})") from None
    for name in own:
        if not _means_the_same(name, said, config):
            raise UserError(
                f"metadata {OWN_KEY} says {name} {own[name]!r:.40}, and the file {getattr(config, name)!r:.40}"
            )
    return said


def _means_the_same(name: str, said: Config, read: Config) -> bool:
    """Whether a field of two Configs is one thing for a finished model, or within llama.cpp's rounding of it."""
    ours, theirs = getattr(said, name), getattr(read, name)
    if ours == theirs or name == "dropout":
        return True
    if name == "vocab_multiple":  # no more rows than a file of this size may ask for
        return said.padded_vocab_size <= 2 * said.vocab_size
    if name == "feed_forward":  # llama.cpp has the approximation only
        return {ours, theirs} == {"gelu", "gelu_tanh"}
    if name == "tie_embeddings":  # the head is there, and compared when it is read
        return bool(ours)
    if name == "rope_scaling":
        return said.positions == "rotary" and _same_angles(said, read)
    if name in ("window", "attention_pattern") and not any(_hides(config) for config in (said, read)):
        return True
    if name in ("attention_pattern", "position_pattern"):
        return _repeated(ours, said.n_layers) == _repeated(theirs, said.n_layers)
    return isinstance(ours, float) and isinstance(theirs, float) and math.isclose(ours, theirs, rel_tol=1e-6)


def _hides(config: Config) -> bool:
    """Whether a window is shorter than the text."""
    return config.window is not None and config.window < config.max_seq_len


def _check_shapes(expected: Mapping[str, Tensor], found: Shapes) -> None:
    """One line for the first tensor that is missing, of another shape, or not asked for."""
    for name, meta in expected.items():
        if name not in found:
            raise UserError(f"tensor {name} is missing; expected with shape {list(meta.shape)}")
        if found[name] != tuple(meta.shape):
            raise UserError(f"tensor {name} has shape {list(found[name])}; expected {list(meta.shape)}")
    if unexpected := found.keys() - expected.keys() - set(_ANGLES):
        more = f" (and {len(unexpected) - 1} more)" if len(unexpected) > 1 else ""
        raise UserError(f"tensor {min(unexpected)}{more} is not expected in a model of this metadata")


_ANGLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are a part of the Config."""


def _check_tied(gguf: GGUF) -> None:
    if not torch.equal(*(gguf.tensor(name, torch.float32) for name in ("output.weight", "token_embd.weight"))):
        raise UserError("the head is said to be tied, but tensor output.weight is not token_embd.weight")


def _read(gguf: GGUF, config: Config, ours: str, theirs: list[str], op: Op, dtype: torch.dtype | None) -> Tensor:
    """One tensor of ours. Operations move whole rows, so where these are of one kind it is their bytes that are moved,
    which are fewer than the numbers."""
    kinds = {gguf.tensors[name].kind for name in theirs}
    kind = kinds.pop()
    if kinds or KINDS[kind].block == 1 or len(gguf.tensors[theirs[0]].shape) == 1:
        tensor = op.read(config, [gguf.tensor(name, dtype) for name in theirs])
    else:
        rows = op.read(config, [gguf.raw(name).view(*gguf.tensors[name].shape[:-1], -1) for name in theirs])
        columns = gguf.tensors[theirs[0]].shape[-1]
        tensor = dequantise(kind, rows.flatten(), dtype).view(*rows.shape[:-1], columns)
    return (tensor.float() - 1).to(tensor.dtype) if _is_one_plus(config, ours) else tensor


def _is_packable(gguf: GGUF, name: str) -> bool:
    info = gguf.tensors[name]
    return len(info.shape) == 2 and KINDS[info.kind].block > 1


def _raw_rows(gguf: GGUF, name: str) -> tuple[str, Tensor]:
    """The kind of a matrix and its bytes, [rows, bytes]."""
    info = gguf.tensors[name]
    return info.kind, gguf.raw(name).view(info.shape[0], -1)


def _is_one_plus(config: Config, ours: str) -> bool:
    """A file has what a norm multiplies by, 1 + w; Gemma's classes have w."""
    return config.norm_weight == "one_plus" and ours.endswith("norm.weight")


def _pairs(architecture: Architecture, config: Config, names: Collection[str]) -> Iterator[tuple[str, list[str], Op]]:
    """Each of our tensor names with theirs and what is done on the way."""
    rows = {row.ours: row for row in ROWS}
    qkv = FUSED_QKV if architecture.fused else INTERLEAVED_QKV if architecture.interleaved else QKV
    feed_forward = EXPERTS if config.n_experts else (*DENSE, *([GATED] if config.is_gated else []))
    rows |= {row.ours: row for row in (qkv, *feed_forward)}
    renamed = architecture.renamed(config) if callable(architecture.renamed) else architecture.renamed
    rows |= {ours: Row(ours, (theirs,)) for ours, theirs in renamed.items()}
    for name in names:
        module, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):  # a parameter of a module
            module, kind = name, "weight"
        layer = re.search(r"\.(\d+)\.", module)
        row = rows.get(module if layer is None else module.replace(layer[0], ".{i}.", 1))
        if row is not None:  # otherwise the architecture can't say it, which the Config read back shows
            number = "" if layer is None else layer[1]
            yield name, [f"{theirs.replace('{i}', number)}.{kind}" for theirs in row.theirs], row.op


# ---- writing


def to_gguf(
    config: Config,
    state: Mapping[str, Tensor],
    *,
    kind: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, tuple[str, Tensor]]]:
    """What `write_gguf` takes: the metadata, and the tensors with the kinds to store them as.

    Args:
        state: a Decoder's state dict.
        kind: of the matrices; None: as they are. Vectors, the router of experts and learned positions stay fp32, as
            in llama.cpp; the embedding and the head are Q8_0 at the least; rows that don't divide into blocks are of
            the next kind that they divide into.
        metadata: what else to write: the tokenizer's, general.name … A vocabulary that is smaller than the model's gets
            tokens that no text has.

    Raises:
        UserError: no architecture of llama.cpp is this model; the kind is none; or the tokenizer has more tokens than
            the model's vocabulary.
    """
    if kind is not None and kind not in WRITABLE:
        raise UserError(f"weights can't be written as {kind!r}: {', '.join(WRITABLE)} are possible")
    if kind is None:
        kind = {torch.float32: "F32", torch.float16: "F16"}.get(state["embed.weight"].dtype, "BF16")
    state = {name: tensor for name, tensor in state.items() if not (config.tie_embeddings and name == "head.weight")}
    architecture, described = _described(config)
    tensors = _tensors_of(architecture, config, state)
    stored = {name: (_kind_of(name, tensor, kind), tensor) for name, tensor in tensors.items()}
    written = {
        "general.architecture": architecture.name,
        "general.type": "model",
        "general.file_type": _FILE_TYPES.get(kind, 0),
        "general.quantization_version": 2,
    }
    return written | described | with_padding(metadata or {}, config.vocab_size), stored


def _described(config: Config) -> tuple[Architecture, dict[str, Any]]:
    """The architecture that says `config`, and the metadata that say it."""
    meta = meta_state(config)
    reasons = []
    for architecture in ARCHITECTURES:
        metadata = _metadata_of(architecture, config)
        tensors = _tensors_of(architecture, config, meta)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        try:
            _, back = _config_of({"general.architecture": architecture.name} | metadata, shapes, tensors.__getitem__)
        except UserError:
            continue
        said, read = config.to_dict(), back.to_dict()
        unsaid = {name: value for name, value in said.items() if read[name] != value}
        if config.padded_vocab_size > 2 * config.vocab_size:
            unsaid.pop("vocab_multiple", None)
        lost = [name for name in unsaid if not _means_the_same(name, config, back)]
        lost += _unmet(architecture, config)
        if not lost:
            return architecture, metadata | ({OWN_KEY: json.dumps(unsaid)} if unsaid else {})
        reasons.append((len(lost), f"{architecture.name}, but for {', '.join(lost)}"))
    nearest = min(reasons, key=lambda reason: reason[0])[1] if reasons else "none"
    hint = f" (with max_seq_len {config.window} the window hides nothing)" if config.window is not None else ""
    raise UserError(f"llama.cpp has no architecture that computes this model; the nearest is {nearest}{hint}")


def _unmet(architecture: Architecture, config: Config) -> list[str]:
    """The fields by which llama.cpp would refuse a model that its metadata can say."""
    met = {
        "head_dim": architecture.wide_heads or config.n_heads * config.head_dim == config.d_model,
        "rope_fraction": architecture.partial_rotary or config.positions != "rotary" or config.rope_fraction == 1,
    }
    met |= {name: holds(config) for name, holds in architecture.demands.items()}
    return [name for name, is_met in met.items() if not is_met]


def _metadata_of(architecture: Architecture, config: Config) -> dict[str, Any]:
    """All that the architecture can say about a Config, true or not: it is read back."""
    keys = [*KEYS, *architecture.keys, NORM_EPS[config.norm]]
    described: dict[str, Any] = {"vocab_size": config.vocab_size, **architecture.constants}
    if config.positions == "rotary":
        keys.append(ROPE_BASE)
        described["rope.dimension_count"] = config.rope_dim
    for key in keys:
        value = getattr(config, key.ours)
        if key.values is not None:
            value = next((theirs for theirs, ours in key.values.items() if ours == value), None)
        if key.is_divisor:
            value = 1 / value
        if value is not None and (config.n_experts or not key.ours.startswith("n_experts")):
            described[key.theirs] = value
    described |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    # One that is as long as the text hides nothing.
    window = config.window or (0 if architecture.default_window == 0 else config.max_seq_len)
    if window and architecture.pattern is not None:
        described["attention.sliding_window"] = window
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind in architecture.scalings:
        described["rope.scaling.original_context_length"] = scaling.original_max_seq_len
        if scaling.kind in ("linear", "yarn"):
            described |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}
        if scaling.kind == "yarn":
            described["rope.scaling.yarn_beta_fast"] = scaling.beta_fast
            described["rope.scaling.yarn_beta_slow"] = scaling.beta_slow
            if scaling.attention_factor is not None:
                described["rope.scaling.attn_factor"] = scaling.attention_factor / _yarn_factor(scaling.factor)
        if scaling.kind == "longrope":
            described["rope.scaling.attn_factor"] = frequencies(config)[1]
    return {f"{architecture.name}.{key}": value for key, value in described.items()}


def _tensors_of(architecture: Architecture, config: Config, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Decoder's tensors under the architecture's names, and those that say its angles."""
    tensors: dict[str, Tensor] = {}
    for ours, theirs, op in _pairs(architecture, config, state):
        tensor = state[ours].float() + 1 if _is_one_plus(config, ours) else state[ours]
        tensors |= zip(theirs, op.write(config, tensor), strict=True)
    if config.tie_embeddings and architecture.needs_head:
        tensors["output.weight"] = tensors["token_embd.weight"]
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind in architecture.scalings:
        if scaling.kind == "llama3":
            plain, scaled = frequencies(replace(config, rope_scaling=None))[0], frequencies(config)[0]
            tensors["rope_freqs.weight"] = torch.tensor(plain) / torch.tensor(scaled)
        elif scaling.kind == "longrope":
            tensors["rope_factors_long.weight"] = torch.tensor(scaling.long_factors)
            tensors["rope_factors_short.weight"] = torch.tensor(scaling.short_factors)
    return tensors


_FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q4_K": 14,
    "Q5_K": 16,
    "Q6_K": 18,
    "BF16": 32,
}
"""What llama.cpp calls a file by (enum llama_ftype in llama.h); nothing is read by it."""
_NEXT = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Where rows don't divide into blocks of 256, as llama.cpp's quantiser has it."""


def _kind_of(name: str, tensor: Tensor, kind: str) -> str:
    if tensor.ndim == 1 or name.endswith(".bias") or "ffn_gate_inp" in name or name.startswith("position_embd"):
        return "F32"
    if KINDS[kind].block == 1:
        return kind
    if name in ("token_embd.weight", "output.weight"):
        kind = "Q8_0"
    if tensor.shape[-1] % KINDS[kind].block:
        kind = _NEXT.get(kind, kind)
    return "F16" if tensor.shape[-1] % KINDS[kind].block else kind
