"""Config: every architectural choice of a decoder-only model, as plain, validated data. No torch in here.

An architecture is a value, not a class: GPT-2 and Llama differ in the fields below, and one `Decoder` reads them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from leftward.errors import UserError, nearest

Positions = Literal["rotary", "learned", "sinusoidal", "alibi", "alibi_mpt", "none"]
RopePairing = Literal["halves", "adjacent"]
RopeScalingKind = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
Norm = Literal["rmsnorm", "layernorm"]
NormWeight = Literal["plain", "one_plus", "none"]
QKNorm = Literal["per_head", "whole", "none"]
Block = Literal["pre", "post", "sandwich", "output", "parallel", "parallel_shared"]
FeedForward = Literal["swiglu", "geglu", "geglu_tanh", "swiglu_clamped", "gelu", "gelu_tanh", "relu", "relu2"]


# A field left at None is derived from the others when the Config is made: a Config that exists holds a number there.
_DERIVED: Any = None


class ConfigError(UserError):
    """A Config that cannot be built; the message lists every problem found."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the angles of rotary positions change for contexts longer than those first trained on.

    A rule is settled by max_seq_len once and for all, never by the length of a text so far: rules that are (Hugging
    Face's "dynamic" and "longrope") turn keys that are already cached, and outputs that were already given, into those
    of another model.
    """

    kind: RopeScalingKind
    """linear: every position divided by `factor` (Chen et al. 2023, arXiv 2306.15595). dynamic: a larger base, by
    max_seq_len over the original length (NTK-aware scaling). llama3: low frequencies only (arXiv 2407.21783). yarn:
    Peng et al. 2023, arXiv 2309.00071. longrope: a factor a frequency (Ding et al. 2024, arXiv 2402.13753)."""
    factor: float = 1.0
    original_max_seq_len: int = _DERIVED
    """The context that the model was first trained on. None: the Config's max_seq_len."""
    low_freq_factor: float = 1.0
    """llama3 only, and the next."""
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    """yarn only, and the next two: turns within the original context from which on a pair is left as it was."""
    beta_slow: float = 1.0
    """Turns up to which a pair is scaled whole."""
    truncate: bool = True
    """Whether the two borders are rounded to whole pairs."""
    attention_factor: float | None = None
    """yarn and longrope only: what queries and keys are multiplied by. None: the paper's formula."""
    short_factors: tuple[float, ...] = ()
    """longrope only: a divisor a pair, where max_seq_len is no longer than the original context."""
    long_factors: tuple[float, ...] = ()
    """The same where it is."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of a `Decoder`. The defaults are the family that we train from scratch (Qwen 3's layout).

    Raises:
        ConfigError: listing all problems at once.
    """

    vocab_size: int
    vocab_multiple: int = 1
    """The embedding and the head have rows up to the next multiple of it. The rows beyond vocab_size have no logit, so
    that no loss counts them and they can't be sampled."""
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
    causal: bool = True
    """False drops the mask: every position sees every other. Such a model can't write; it is here to show why."""
    window: int | None = None
    """Local layers see the last `window` positions, the query's own among them (Beltagy et al. 2020, arXiv 2004.05150;
    Mistral, arXiv 2310.06825)."""
    attention_pattern: str = _DERIVED
    """Which layers are local (L) and which see all of the past (G), repeated over the layers: Gemma 3 has LLLLLG,
    GPT-3 GL. None: L where a window is given, otherwise G."""
    attn_scale: float = _DERIVED
    """What scores are multiplied by. None: 1 / √head_dim."""
    attn_softcap: float | None = None
    """c: scores become c · tanh(score / c) (Gemma 2, arXiv 2408.00118)."""
    attn_sinks: bool = False
    """A learned logit a head that takes part in the softmax and adds nothing to the result (gpt-oss; cf. Xiao et al.
    2023, arXiv 2309.17453)."""
    qk_norm: QKNorm = "per_head"
    """An RMSNorm of queries and keys before the rotation (Henry et al. 2020, arXiv 2010.04245). per_head: over each
    head (Qwen 3). whole: over all heads together (OLMo 2)."""
    qkv_bias: bool = False
    attn_out_bias: bool = False

    positions: Positions = "rotary"
    """rotary: Su et al. 2021, arXiv 2104.09864. learned: one vector a position, as in GPT-2. sinusoidal: fixed vectors
    (Vaswani et al. 2017, arXiv 1706.03762, section 3.5). alibi: Press et al. 2021, arXiv 2108.12409; alibi_mpt: the
    same with MPT's order of slopes. none: Kazemnejad et al. 2023, arXiv 2305.19466."""
    alibi_scale: float = 1.0
    """What ALiBi's slopes are multiplied by (Falcon: 1 / √head_dim, as scores are)."""
    position_pattern: str = "P"
    """In which layers attention knows positions (P) and in which it doesn't (N), repeated over the layers, for rotary
    and alibi: SmolLM3 has PPPN."""
    position_offset: int = 0
    """Rows of the learned table before that of position 0 (OPT: 2)."""
    rope_base: float = 10_000.0
    rope_local_base: float = _DERIVED
    """The base in local layers. Where it is another than rope_base, their angles are not scaled (Gemma 3). None: as
    rope_base."""
    rope_fraction: float = 1.0
    """The part of each head that is rotated (GPT-NeoX: 0.25)."""
    rope_pairing: RopePairing = "halves"
    """Which two of the n rotated numbers turn together. halves: i and i + n/2. adjacent: 2i and 2i + 1 (GPT-J)."""
    rope_scaling: RopeScaling | None = None

    block: Block = "pre"
    """Where a block's norms are. pre: x + f(norm(x)) (Xiong et al. 2020, arXiv 2002.04745). post: norm(x + f(x)), and
    no norm before the head (the original; GPT-1). sandwich: x + norm(f(norm(x))) (Gemma 2). output: x + norm(f(x))
    (OLMo 2, arXiv 2501.00656). parallel: x + attention(norm(x)) + feed_forward(norm(x)) with a norm each (GPT-NeoX);
    parallel_shared: with one (GPT-J)."""
    residual_scale: float = 1.0
    """What each sublayer's output is multiplied by before it adds to the stream (Granite)."""
    norm: Norm = "rmsnorm"
    """rmsnorm: Zhang and Sennrich 2019, arXiv 1910.07467. layernorm: Ba et al. 2016, arXiv 1607.06450."""
    norm_weight: NormWeight = "plain"
    """plain: times w. one_plus: times 1 + w (Gemma). none: the norm has no weights (OLMo, arXiv 2402.00838)."""
    norm_bias: bool = _DERIVED
    """layernorm only. None: where it has weights."""
    norm_eps: float = 1e-6
    embed_norm: bool = False
    """A norm right after the embedding (BLOOM)."""

    feed_forward: FeedForward = "swiglu"
    """swiglu and geglu are gated: Shazeer 2020, arXiv 2002.05202. gelu: exact; _tanh: GPT-2's approximation.
    relu2: So et al. 2021, arXiv 2109.08668. swiglu_clamped: gpt-oss (arXiv 2508.10925)."""
    d_ff: int = _DERIVED
    """Hidden width of the feed-forward, or of each expert. None: 4 d_model, or 2/3 of that where the feed-forward is
    gated, rounded up to a multiple of 32, which keeps the parameter count (Shazeer 2020, section 3)."""
    ff_bias: bool = False
    n_experts: int = 0
    """Above 0, a mixture of that many feed-forwards (Shazeer et al. 2017, arXiv 1701.06538; Mixtral, arXiv 2401.04088);
    ff_bias gives the router one too."""
    n_experts_per_token: int = 2
    """How many of them each token is sent to."""
    d_shared: int = 0
    """Hidden width of the expert that every token passes beside (DeepSeekMoE, arXiv 2401.06066). 0: none."""
    router_normalised: bool = True
    """Whether the weights of a token's experts are made to sum to 1."""

    tie_embeddings: bool = True
    """The head shares the embedding's weights (Press and Wolf 2017, arXiv 1608.05859)."""
    head_bias: bool = False
    embed_scale: float = 1.0
    """What token embeddings are multiplied by (Gemma: √d_model)."""
    logit_scale: float = 1.0
    """What logits are multiplied by, before the cap."""
    logit_softcap: float | None = None
    """c: logits become c · tanh(logit / c)."""
    dropout: float = 0.0
    """Probability of zeroing, in training, an element of the embedding, of an attention row and of each sublayer's
    output (GPT-2's three places)."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        given: Any = self.rope_scaling
        if isinstance(given, dict):  # plain data, from YAML or JSON
            object.__setattr__(self, "rope_scaling", _scaling_of(given, problems))
        mistyped = {name: problem for name in _TYPES if (problem := _type_problem(self, name, _TYPES[name]))}
        problems += mistyped.values()
        wrong = set(mistyped)
        for names, is_right, message in _RULES:
            if not wrong & set(names) and not is_right(self):  # a rule may reckon with what it reads
                problems.append(message.format(**vars(self)))
                wrong |= set(names) if len(names) == 1 else set()
        if isinstance(self.rope_scaling, RopeScaling):
            problems += _scaling_problems(self, self.rope_scaling, wrong)
        if problems:
            raise ConfigError("; ".join(problems))
        self._derive()

    def _derive(self) -> None:
        width = 8 * self.d_model / 3 if self.is_gated else 4 * self.d_model
        head_dim = self.head_dim or self.d_model // self.n_heads
        derived = {
            "n_kv_heads": self.n_heads,
            "head_dim": head_dim,
            "d_ff": -int(-width // 32) * 32,
            "attention_pattern": "G" if self.window is None else "L",
            "attn_scale": head_dim**-0.5,
            "rope_local_base": self.rope_base,
            "norm_bias": self.norm == "layernorm" and self.norm_weight != "none",
        }
        for name, value in derived.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.rope_scaling is not None and not _is_given(self.rope_scaling.original_max_seq_len):
            settled = dataclasses.replace(self.rope_scaling, original_max_seq_len=self.max_seq_len)
            object.__setattr__(self, "rope_scaling", settled)

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward has a third matrix that gates its hidden layer."""
        return self.feed_forward in ("swiglu", "geglu", "geglu_tanh", "swiglu_clamped")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def rope_dim(self) -> int:
        """How many numbers of each head are rotated."""
        return round(self.head_dim * self.rope_fraction)

    def is_local(self, layer: int) -> bool:
        """Whether a layer sees only the last `window` positions."""
        return self.attention_pattern[layer % len(self.attention_pattern)] == "L"

    def knows_positions(self, layer: int) -> bool:
        """Whether a layer's attention is told positions, where they are its business (rotary, alibi)."""
        return self.position_pattern[layer % len(self.position_pattern)] == "P"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """Build from plain data (YAML, JSON, overrides), refusing unknown keys.

        Raises:
            ConfigError: unknown or missing keys, or values that don't fit.
        """
        if not isinstance(values, dict):
            raise ConfigError(f"the fields of a Config are {values!r}: they must be a mapping")
        valid = {f.name for f in dataclasses.fields(cls)}
        problems = [f"unknown key {key}: {nearest(str(key), valid)}" for key in values if key not in valid]
        known = {key: value for key, value in values.items() if key in valid}
        if "vocab_size" not in known:
            problems.append("vocab_size is missing")
        try:
            config = cls(**{"vocab_size": 1, **known})
        except ConfigError as error:
            problems.append(str(error))
        if problems:
            raise ConfigError("; ".join(problems))
        return config


def shortest_pattern(letters: str) -> str:
    """The shortest pattern of layers that, repeated, begins with `letters`."""
    repeats = (n for n in range(1, len(letters)) if (letters[:n] * (len(letters) // n + 1))[: len(letters)] == letters)
    return letters[: next(repeats, len(letters))]


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


def _type_problem(holder: Config | RopeScaling, name: str, wanted: Any) -> str | None:
    """What is wrong with the type of a field, or None. An int is accepted (and stored) where a float is asked."""
    value = getattr(holder, name)
    kinds = typing.get_args(wanted) if typing.get_origin(wanted) in (typing.Union, types.UnionType) else (wanted,)
    if typing.get_origin(wanted) is Literal:
        choices = typing.get_args(wanted)
        return None if value in choices else f"{name} is {value!r}: {nearest(str(value), choices)}"
    if float in kinds and type(value) is int and abs(value) < 2**63:
        object.__setattr__(holder, name, float(value))
        return None
    may_be_none = type(None) in kinds or type(holder).__dataclass_fields__[name].default is None
    if type(value) in kinds or (value is None and may_be_none):
        return None
    if wanted == tuple[float, ...] and isinstance(value, list | tuple):
        numbers = tuple(value)
        if all(type(number) in (int, float) and 0 < number < math.inf for number in numbers):
            object.__setattr__(holder, name, tuple(map(float, numbers)))
            return None
        return f"{name} must be a list of numbers above 0"
    names = {type(None): "null", RopeScaling: "a mapping (kind, factor …)"}
    described = " or ".join(names.get(kind) or kind.__name__ for kind in kinds)
    return f"{name} is {value!r}: it must be {described}"


_TYPES: dict[str, Any] = typing.get_type_hints(Config)
_SCALING_TYPES: dict[str, Any] = typing.get_type_hints(RopeScaling)


def _scaling_of(values: dict[str, Any], problems: list[str]) -> RopeScaling | None:
    """A RopeScaling from plain data; None, and what is wrong added to `problems`, where it can't be."""
    unknown = [key for key in values if key not in _SCALING_TYPES]
    problems += [f"unknown key rope_scaling.{key}: {nearest(str(key), _SCALING_TYPES)}" for key in unknown]
    if "kind" not in values:
        problems.append(f"rope_scaling.kind is missing: {', '.join(typing.get_args(RopeScalingKind))}")
    return None if unknown or "kind" not in values else RopeScaling(**values)


_LEAST = sys.float_info.min
_LIMIT = 2**31  # no tensor of any model is longer, and sizes computed from these stay integers that torch can hold
_POSITIVE = (
    *("vocab_size", "vocab_multiple", "max_seq_len", "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim"),
    *("window", "d_ff", "n_experts_per_token"),
)
_NOT_NEGATIVE = ("position_offset", "n_experts", "d_shared")
_POSITIVE_FLOATS = (
    *("attn_scale", "attn_softcap", "alibi_scale", "embed_scale", "residual_scale", "logit_scale", "logit_softcap"),
)


def _is_within(name: str, least: float, limit: float) -> Callable[[Config], bool]:
    return lambda config: getattr(config, name) is None or least <= getattr(config, name) < limit


def _is_given(value: Any) -> bool:
    """Whether a derived field was set by the user, to something that a rule can reckon with."""
    return value is not None and value > 0


def _head_dim(config: Config) -> int:
    """As it will be derived; 0 where it can't be."""
    return config.head_dim or (config.d_model // config.n_heads if config.n_heads > 0 else 0)


def _heads_divide_width(config: Config) -> bool:
    return _is_given(config.head_dim) or config.n_heads < 1 or config.d_model % config.n_heads == 0


def _kv_heads_divide_heads(config: Config) -> bool:
    return not _is_given(config.n_kv_heads) or config.n_heads % config.n_kv_heads == 0


def _rotary_pairs_up(config: Config) -> bool:
    rotated = round(_head_dim(config) * config.rope_fraction)
    return config.positions != "rotary" or (rotated > 0 and rotated % 2 == 0)


def _scaling_problems(config: Config, scaling: RopeScaling, wrong: set[str]) -> list[str]:
    """Args: wrong: fields of the Config that nothing can be reckoned with."""
    mistyped = {name: p for name, wanted in _SCALING_TYPES.items() if (p := _type_problem(scaling, name, wanted))}
    problems = list(mistyped.values())
    for names, is_right, message in _SCALING_RULES:
        if not mistyped.keys() & set(names) and not is_right(scaling):
            problems.append(message.format(**vars(scaling)))
    problems = [f"rope_scaling.{problem}" for problem in problems]
    if "positions" not in wrong and config.positions != "rotary":
        problems.append(f"rope_scaling is for rotary positions, and these are {config.positions}")
    factors = {"short_factors", "long_factors"} - mistyped.keys()
    if scaling.kind == "longrope" and not wrong & {"d_model", "n_heads", "head_dim", "rope_fraction"}:
        pairs = round(_head_dim(config) * config.rope_fraction) // 2
        for name in sorted(factors):
            if len(getattr(scaling, name)) != pairs:
                problems.append(
                    f"rope_scaling.{name} has {len(getattr(scaling, name))} numbers: longrope needs one for each of "
                    f"the {pairs} rotated pairs"
                )
    return problems


_SCALING_RULES: list[tuple[tuple[str, ...], Callable[[RopeScaling], bool], str]] = [
    (("factor",), lambda s: 1 <= s.factor <= 1e6, "factor is {factor}: it must be at least 1 and at most a million"),
    (
        ("original_max_seq_len",),
        lambda s: s.original_max_seq_len is None or 0 < s.original_max_seq_len < _LIMIT,
        "original_max_seq_len is {original_max_seq_len}: it must be at least 1 and below 2^31",
    ),
    (
        ("low_freq_factor", "high_freq_factor"),
        lambda s: 0 < s.low_freq_factor < s.high_freq_factor < math.inf,
        "low_freq_factor {low_freq_factor} must be above 0 and below high_freq_factor {high_freq_factor}",
    ),
    (
        ("beta_slow", "beta_fast"),
        lambda s: 1e-6 <= s.beta_slow < s.beta_fast <= 1e6,
        "beta_slow {beta_slow} must be a millionth or more and below beta_fast {beta_fast}, and that a million or less",
    ),
    (
        ("attention_factor",),
        lambda s: s.attention_factor is None or 0 < s.attention_factor < math.inf,
        "attention_factor is {attention_factor}: it must be above 0 and finite",
    ),
]

# (fields that the rule reads, the rule, what to say when it is broken)
_RULES: list[tuple[tuple[str, ...], Callable[[Config], bool], str]] = [
    *(
        ((name,), _is_within(name, 1, _LIMIT), f"{name} is {{{name}}}: it must be at least 1 and below 2^31")
        for name in _POSITIVE
    ),
    (
        ("vocab_multiple",),
        lambda c: c.vocab_multiple <= 65_536,
        "vocab_multiple is {vocab_multiple}: it must be at most 65536",
    ),
    *(
        ((name,), _is_within(name, 0, _LIMIT), f"{name} is {{{name}}}: it must be at least 0 and below 2^31")
        for name in _NOT_NEGATIVE
    ),
    *(
        ((name,), _is_within(name, _LEAST, math.inf), f"{name} is {{{name}}}: it must be above 0 and finite")
        for name in _POSITIVE_FLOATS
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
        ("attention_pattern",),
        lambda c: c.attention_pattern is None or re.fullmatch("[LG]+", c.attention_pattern) is not None,
        "attention_pattern is {attention_pattern!r}: it must be made of L (local) and G (global)",
    ),
    (
        ("attention_pattern", "window"),
        lambda c: c.attention_pattern is None or (c.window is None) == ("L" not in c.attention_pattern),
        "window is {window} and attention_pattern {attention_pattern!r}: local layers (L) need a window, and a window "
        "needs local layers",
    ),
    (
        ("position_pattern",),
        lambda c: re.fullmatch("[PN]+", c.position_pattern) is not None,
        "position_pattern is {position_pattern!r}: it must be made of P (knows positions) and N (doesn't)",
    ),
    (
        ("position_pattern", "positions"),
        lambda c: "N" not in c.position_pattern or c.positions in ("rotary", "alibi", "alibi_mpt"),
        "position_pattern {position_pattern!r} is for rotary and alibi, and positions are {positions}",
    ),
    (
        ("positions", "position_offset"),
        lambda c: c.position_offset == 0 or c.positions == "learned",
        "position_offset {position_offset} is for learned positions, and these are {positions}",
    ),
    (
        ("positions", "alibi_scale"),
        lambda c: c.alibi_scale == 1.0 or c.positions in ("alibi", "alibi_mpt"),
        "alibi_scale {alibi_scale} is for alibi, and positions are {positions}",
    ),
    *(
        (
            (name,),
            _is_within(name, math.nextafter(1, 2), math.inf),
            f"{name} is {{{name}}}: it must be above 1 and finite",
        )
        for name in ("rope_base", "rope_local_base")
    ),
    (
        ("rope_fraction",),
        lambda c: 0 < c.rope_fraction <= 1,
        "rope_fraction is {rope_fraction}: it must be above 0 and at most 1",
    ),
    (
        ("positions", "d_model", "n_heads", "head_dim", "rope_fraction"),
        _rotary_pairs_up,
        "head_dim (d_model / n_heads unless set) times rope_fraction must be even: rotary positions rotate pairs",
    ),
    (
        ("norm", "norm_weight", "norm_bias"),
        lambda c: not c.norm_bias or (c.norm == "layernorm" and c.norm_weight != "none"),
        "norm_bias is true: only a layernorm with weights has one (norm {norm}, norm_weight {norm_weight})",
    ),
    (("norm_eps",), lambda c: 0 < c.norm_eps < 1, "norm_eps is {norm_eps}: it must be between 0 and 1"),
    (("n_experts",), lambda c: c.n_experts != 1, "n_experts is 1: a mixture has at least 2, and 0 means none"),
    (
        ("n_experts", "n_experts_per_token", "router_normalised"),
        lambda c: c.n_experts == 0 or c.n_experts_per_token > 1 or not c.router_normalised,
        "router_normalised with n_experts_per_token 1 makes every weight 1, and no router can learn: set it to false",
    ),
    (
        ("n_experts", "n_experts_per_token"),
        lambda c: c.n_experts == 0 or c.n_experts_per_token <= c.n_experts,
        "n_experts_per_token {n_experts_per_token} is more than n_experts {n_experts}",
    ),
    (
        ("n_experts", "d_shared"),
        lambda c: c.d_shared == 0 or c.n_experts > 0,
        "d_shared {d_shared} is for a mixture of experts, and n_experts is 0",
    ),
    (("dropout",), lambda c: 0 <= c.dropout < 1, "dropout is {dropout}: it must be at least 0 and below 1"),
]
