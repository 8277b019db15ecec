"""Config: every architectural choice of a decoder-only model, as plain, validated data. No torch in here.

An architecture is a value, not a class: GPT-2 and Llama differ in the fields below, and one `Decoder` reads them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import textwrap
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from leftward.errors import UserError, nearest

Positions = Literal["rotary", "learned"]
Norm = Literal["rmsnorm", "layernorm"]
FeedForward = Literal["swiglu", "gelu", "gelu_tanh", "relu2"]


# A field left at None is derived from the others when the Config is made: a Config that exists holds a number there.
_DERIVED: Any = None


class ConfigError(UserError):
    """A Config that cannot be built; the message lists every problem found."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of a `Decoder`. The defaults are the family that we train from scratch (Qwen 3's layout).

    Raises:
        ConfigError: listing all problems at once.
    """

    vocab_size: int
    max_seq_len: int = 256
    """The longest sequence, in tokens: prompt and output together."""
    n_layers: int = 6
    d_model: int = 256
    """Width of the residual stream."""
    n_heads: int = 4
    n_kv_heads: int = _DERIVED
    """Key/value heads, each shared by n_heads / n_kv_heads query heads. None: n_heads (multi-head attention);
    1: multi-query (Shazeer 2019, arXiv 1911.02150); between: grouped-query (Ainslie et al. 2023, arXiv 2305.13245)."""
    head_dim: int = _DERIVED
    """Width of a head. None: d_model / n_heads."""
    d_ff: int = _DERIVED
    """Hidden width of the feed-forward. None: 4 d_model, or 2/3 of that where the feed-forward is gated, rounded up to
    a multiple of 32, which keeps the parameter count (Shazeer 2020, arXiv 2002.05202, section 3)."""

    positions: Positions = "rotary"
    """rotary: Su et al. 2021, arXiv 2104.09864. learned: one vector a position, as in GPT-2."""
    rope_base: float = 10_000.0
    norm: Norm = "rmsnorm"
    """rmsnorm: Zhang and Sennrich 2019, arXiv 1910.07467. layernorm: Ba et al. 2016, arXiv 1607.06450."""
    norm_eps: float = 1e-6
    qk_norm: bool = True
    """An RMSNorm over each head's query and key before the rotation (Henry et al. 2020, arXiv 2010.04245; Qwen 3)."""
    feed_forward: FeedForward = "swiglu"
    """swiglu: Shazeer 2020. gelu: exact; gelu_tanh: GPT-2's approximation. relu2: So et al. 2021, arXiv 2109.08668."""
    qkv_bias: bool = False
    attn_out_bias: bool = False
    ff_bias: bool = False
    tie_embeddings: bool = True
    """The head shares the embedding's weights (Press and Wolf 2017, arXiv 1608.05859)."""
    dropout: float = 0.0
    """Probability of zeroing, in training, an element of the embedding, of an attention row and of each sublayer's
    output (GPT-2's three places)."""

    def __post_init__(self) -> None:
        mistyped = {f.name: problem for f in dataclasses.fields(self) if (problem := _type_problem(self, f.name))}
        problems = list(mistyped.values())
        for names, is_right, message in _RULES:
            if not mistyped.keys() & set(names) and not is_right(self):
                problems.append(message.format(**dataclasses.asdict(self)))
        if problems:
            raise ConfigError("; ".join(problems))
        width = 8 * self.d_model / 3 if self.is_gated else 4 * self.d_model
        derived = {
            "n_kv_heads": self.n_heads,
            "head_dim": self.d_model // self.n_heads,
            "d_ff": -int(-width // 32) * 32,
        }
        for name, value in derived.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward has a third matrix that gates its hidden layer."""
        return self.feed_forward == "swiglu"

    @property
    def n_parameters(self) -> int:
        """Weights of the Decoder, a tied head counted once: arithmetic, before anything is built."""
        q_width, kv_width = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        norm = self.d_model * (2 if self.norm == "layernorm" else 1)
        up_width = self.d_ff * (2 if self.is_gated else 1)
        attention = (self.d_model + self.qkv_bias) * (q_width + 2 * kv_width) + 2 * self.head_dim * self.qk_norm
        output = (q_width + self.attn_out_bias) * self.d_model
        feed_forward = (self.d_model + self.ff_bias) * up_width + (self.d_ff + self.ff_bias) * self.d_model
        tables = self.vocab_size * (1 if self.tie_embeddings else 2)
        tables += self.max_seq_len if self.positions == "learned" else 0
        return tables * self.d_model + self.n_layers * (attention + output + feed_forward + 2 * norm) + norm

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """Build from plain data (YAML, JSON, overrides), refusing unknown keys.

        Raises:
            ConfigError: unknown or missing keys, or values that don't fit.
        """
        valid = {f.name for f in dataclasses.fields(cls)}
        unknown = [f"unknown key {key}: {nearest(key, valid)}" for key in values if key not in valid]
        if unknown:
            raise ConfigError("; ".join(unknown))
        if "vocab_size" not in values:
            raise ConfigError("vocab_size is missing")
        return cls(**values)


def field_meanings() -> dict[str, str]:
    """What the text under each field of Config says, for recipes to show. Fields without one are missing."""
    body = ast.parse(textwrap.dedent(inspect.getsource(Config))).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: text.value.value
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _type_problem(config: Config, name: str) -> str | None:
    """What is wrong with the type of a field, or None. An int is accepted (and stored) where a float is asked."""
    wanted, value = _TYPES[name], getattr(config, name)
    if typing.get_origin(wanted) is Literal:
        choices = typing.get_args(wanted)
        return None if value in choices else f"{name} is {value!r}: {nearest(str(value), choices)}"
    if wanted is float and type(value) is int and abs(value) < 2**63:
        object.__setattr__(config, name, float(value))
        return None
    if type(value) is wanted or (value is None and _DEFAULTS[name] is None):
        return None
    return f"{name} is {value!r}: it must be {wanted.__name__}"


_TYPES: dict[str, Any] = typing.get_type_hints(Config)
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Config)}

_LIMIT = 2**31  # no tensor of any model is longer, and sizes computed from these stay integers that torch can hold
_POSITIVE = ("vocab_size", "max_seq_len", "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff")


def _is_positive(name: str) -> Callable[[Config], bool]:
    return lambda config: getattr(config, name) is None or 0 < getattr(config, name) < _LIMIT


def _is_given(value: Any) -> bool:
    """Whether a derived field was set by the user, to something that a rule can reckon with."""
    return value is not None and value > 0


def _heads_divide_width(config: Config) -> bool:
    return _is_given(config.head_dim) or config.n_heads < 1 or config.d_model % config.n_heads == 0


def _kv_heads_divide_heads(config: Config) -> bool:
    return not _is_given(config.n_kv_heads) or config.n_heads % config.n_kv_heads == 0


def _rotary_pairs_up(config: Config) -> bool:
    head_dim = config.head_dim or (config.d_model // config.n_heads if config.n_heads > 0 else 0)
    return config.positions != "rotary" or head_dim % 2 == 0


# (fields that the rule reads, the rule, what to say when it is broken)
_RULES: list[tuple[tuple[str, ...], Callable[[Config], bool], str]] = [
    *(
        ((name,), _is_positive(name), f"{name} is {{{name}}}: it must be at least 1 and below 2^31")
        for name in _POSITIVE
    ),
    (
        ("d_model", "n_heads", "head_dim"),
        _heads_divide_width,
        "d_model {d_model} is not divisible by n_heads {n_heads}: change one, or set head_dim",
    ),
    (
        ("n_heads", "n_kv_heads"),
        _kv_heads_divide_heads,
        "n_heads {n_heads} is not divisible by n_kv_heads {n_kv_heads}: each key/value head serves equally many heads",
    ),
    (
        ("positions", "d_model", "n_heads", "head_dim"),
        _rotary_pairs_up,
        "head_dim (d_model / n_heads unless set) must be even: rotary positions rotate pairs",
    ),
    (("rope_base",), lambda c: 0 < c.rope_base < math.inf, "rope_base is {rope_base}: it must be above 0 and finite"),
    (("norm_eps",), lambda c: 0 < c.norm_eps < 1, "norm_eps is {norm_eps}: it must be between 0 and 1"),
    (("dropout",), lambda c: 0 <= c.dropout < 1, "dropout is {dropout}: it must be at least 0 and below 1"),
]
