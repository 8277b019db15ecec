"""Sampling: how to choose tokens and when to stop, as plain, validated data. No torch in here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from leftward.errors import UserError, nearest, printable

if TYPE_CHECKING:
    from torch import Tensor

CHAT_MAX_TOKENS = 1024
"""Of an answer, if nothing else is said: it ends by itself, where a text goes on for ever."""
MOST_SAMPLES = 4096
"""Of a prompt: each has its place in the cache at once."""
CONSTRAINTS = ("json_schema", "regex", "choice", "grammar")
"""What an output may have to follow: one of them."""
_MOST_CONSTRAINT = 200_000  # characters


class Sampler(Protocol):
    """A function of one's own in the choice of a token, as the setting `sampler`. It is called for each token of each
    sequence by itself, so that neighbours in a batch are none of its business."""

    def __call__(self, logits: Tensor, ids: Sequence[int], /) -> Tensor | int:
        """Look at one sequence's next token.

        Args:
            logits: [V] in fp32, after bias, penalties and bans and before temperature, top_k and what follows; −inf for
                a token that is out. A copy: it may be changed.
            ids: of the prompt and the output so far.

        Returns:
            New logits [V], which temperature, top_k and so on go on with; a token that was out stays out. Or an id,
            which is the choice.
        """


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose tokens and when to stop. The defaults are llama.cpp's temperature and top_p: a little sharper
    than the model itself, and without the tail in which small models are only noise.

    The rules are applied in the order of docs/generation.md: logit_bias, penalties, bad_words and min_tokens, sampler,
    temperature, top_k, top_p, min_p, typical_p.

    Raises:
        UserError: listing all problems at once.
    """

    max_tokens: int = 200
    """New tokens at most."""
    min_tokens: int = 0
    """Before so many new tokens nothing ends the output: end-of-text tokens and stop_ids are not chosen, and stop
    texts that are complete by then are text."""
    temperature: float = 0.8
    """Divides the logits; 1 is the model's own distribution, 0 always takes the most likely token (greedy)."""
    top_k: int = 0
    """Only the k most likely tokens, and those as likely as the k-th; 0: all."""
    top_p: float = 0.95
    """Only the fewest tokens that together have this probability (Holtzman et al. 2019, arXiv 1904.09751), and those
    as likely as the last of them; 1: all."""
    min_p: float = 0.0
    """Only tokens at least this likely as a share of the most likely one's probability; 0: all."""
    typical_p: float = 1.0
    """Only the tokens whose surprise is nearest to the expected one, as many as together have this probability
    (Meister et al. 2022, arXiv 2202.00666); 1: all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in prompt and output, multiplies the negative ones (Keskar et al. 2019,
    arXiv 1909.05858); 1: off."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that is in the output; 0: off."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time that it is in the output; 0: off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, number that is added to its logit), by id; −inf never lets it be chosen. `Sampling.of` takes a dict."""
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    """Texts, or token ids in a row, that the output must not have. Of several tokens the last is not chosen where it
    would follow the others. A text is tokenised as it is and with a space before it: another division into tokens
    is not seen."""
    stop: tuple[str, ...] = ()
    """Texts that end the output; they are not part of it."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the output as the end-of-text token does; they are not part of its text."""
    seed: int | None = None
    """The same seed gives the same text. None: one is drawn."""
    n: int = 1
    """Samples of a prompt."""
    best_of: int | None = None
    """So many samples are made, and the n with the highest log-probability per token under the model itself are
    kept, the best first. None: as many as n."""
    logprobs: int | None = None
    """Log-probabilities of each token that is chosen and of so many of the likeliest ones, in the model's own
    distribution and in the one that the rules make of it. None: they are not asked for."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens but the first, in the model's own distribution. None: not asked for."""
    sampler: Sampler | None = None
    """A function of one's own that sees the logits; see `Sampler`."""
    json_schema: str | None = None
    """The output is JSON that follows this schema, which is JSON text itself. `Sampling.of` takes a dict, True (any
    JSON) or a pydantic model too. docs/generation.md says which keywords there are."""
    regex: str | None = None
    """The whole output matches this regular expression, in the syntax of Rust's regex crate: no look-around and no
    references back; \\d is 0 to 9."""
    choice: tuple[str, ...] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """The output follows this grammar, in llguidance's dialect of Lark or in llama.cpp's GBNF."""

    def __post_init__(self) -> None:
        problems = []
        for name, (kind, is_right, demand) in _RULES.items():
            value = getattr(self, name)
            if kind is float and type(value) is int and abs(value) < 2**63:
                object.__setattr__(self, name, value := float(value))
            if name in _OPTIONAL and value is None:
                continue
            if type(value) is not kind or not is_right(value):
                problems.append(f"{name} is {printable(repr(value))}: it must be {demand}")
        sampler: object = self.sampler
        if sampler is not None and not callable(sampler):
            problems.append(f"sampler is {sampler!r}: it must be a function of logits and ids")
        if not problems and self.best_of is not None and self.best_of < self.n:
            problems.append(f"best_of is {self.best_of}: it must be at least n, which is {self.n}")
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            problems.append(f"{' and '.join(given)} are given: an output can follow one of {', '.join(CONSTRAINTS)}")
        if problems:
            raise UserError("; ".join(problems))

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Sampling:
        """From keyword arguments. Lists may stand for tuples, one text for a tuple of one, and a mapping for
        logit_bias. Raises: UserError, also for unknown names."""
        valid = {field.name for field in dataclasses.fields(cls)}
        unknown = [f"unknown setting {name}: {nearest(name, valid)}" for name in settings if name not in valid]
        if unknown:
            raise UserError("; ".join(unknown))
        return cls(**{name: _frozen(name, value) for name, value in settings.items()})

    def seeded(self, sample: int = 0) -> Sampling:
        """The settings of one of several samples of a prompt. Sample 0 has the seed itself, or one drawn now."""
        seed = secrets.randbits(32) if self.seed is None else self.seed
        if sample:
            digest = hashlib.blake2b(f"{seed} {sample}".encode(), digest_size=4)
            seed = int.from_bytes(digest.digest(), "big")
        return dataclasses.replace(self, seed=seed)


def _frozen(name: str, value: Any) -> Any:
    """What `Sampling` holds for a value that a person or a JSON file wrote."""
    if name == "logit_bias" and isinstance(value, Mapping):
        pairs = [(_id(key), float(v) if type(v) is int and abs(v) < 2**63 else v) for key, v in value.items()]
        return tuple(sorted(pairs) if all(map(_is_bias, pairs)) else pairs)
    if name in ("stop", "bad_words", "choice") and isinstance(value, str):
        return (value,)
    if name == "json_schema" and value is not None and not isinstance(value, str):
        of_pydantic = getattr(value, "model_json_schema", None)
        try:
            return json.dumps(value if of_pydantic is None else of_pydantic())
        except (TypeError, ValueError, RecursionError):  # it is not JSON
            return value
    if isinstance(value, list):
        return tuple(tuple(part) if isinstance(part, list) else part for part in value)
    return value


def _id(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key  # JSON's keys are texts


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_bias(pair: Any) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and _is_id(pair[0]) and type(pair[1]) is float and pair[1] <= 1e6


def _is_bad_word(word: Any) -> bool:
    return bool(word) and (isinstance(word, str) or (isinstance(word, tuple) and all(map(_is_id, word))))


def _is_source(text: str) -> bool:
    """Of a size that is compiled in no time, and without half a surrogate pair, which no output has."""
    return len(text) <= _MOST_CONSTRAINT and not any("\ud800" <= c <= "\udfff" for c in text)


def _is_schema(text: str) -> bool:
    try:
        return _is_source(text) and isinstance(json.loads(text), dict | bool)
    except (ValueError, RecursionError):
        return False


_PENALTY = (lambda v: -1e6 <= v <= 1e6, "between -1e6 and 1e6 (0: off)")
_COUNT = "a whole number, at least 0"
_SAMPLES = (lambda v: 1 <= v <= MOST_SAMPLES, f"a whole number from 1 to {MOST_SAMPLES}")
_SIZE = f"of at most {_MOST_CONSTRAINT:,} characters"
_OPTIONAL = ("seed", "best_of", "logprobs", "prompt_logprobs", *CONSTRAINTS)

# setting → (type, what holds for a right value, the same in words)
_RULES: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "max_tokens": (int, lambda v: v >= 0, _COUNT),
    "min_tokens": (int, lambda v: v >= 0, _COUNT),
    "temperature": (float, lambda v: 0 <= v < math.inf, "at least 0 (0: greedy)"),
    "top_k": (int, lambda v: v >= 0, f"{_COUNT} (0: off)"),
    "top_p": (float, lambda v: 0 < v <= 1, "above 0 and at most 1 (1: off)"),
    "min_p": (float, lambda v: 0 <= v <= 1, "between 0 and 1 (0: off)"),
    "typical_p": (float, lambda v: 0 < v <= 1, "above 0 and at most 1 (1: off)"),
    "repetition_penalty": (float, lambda v: 0.01 <= v <= 1e6, "between 0.01 and 1e6 (1: off)"),
    "presence_penalty": (float, *_PENALTY),
    "frequency_penalty": (float, *_PENALTY),
    "logit_bias": (tuple, lambda v: all(map(_is_bias, v)), "a mapping of token ids to numbers, at most 1e6"),
    "bad_words": (tuple, lambda v: all(map(_is_bad_word, v)), "texts, or lists of token ids, that are not empty"),
    "stop": (
        tuple,
        lambda v: all(isinstance(text, str) and text for text in v),
        "a tuple of texts that are not empty",
    ),
    "stop_ids": (tuple, lambda v: all(map(_is_id, v)), "token ids, each at least 0"),
    "seed": (int, lambda v: v >= 0, _COUNT),
    "n": (int, *_SAMPLES),
    "best_of": (int, *_SAMPLES),
    "logprobs": (int, lambda v: v >= 0, _COUNT),
    "prompt_logprobs": (int, lambda v: v >= 0, _COUNT),
    "json_schema": (str, _is_schema, f"a JSON schema (an object or true) {_SIZE}"),
    "regex": (str, _is_source, f"a regular expression {_SIZE}"),
    "choice": (
        tuple,
        lambda v: bool(v) and all(isinstance(text, str) for text in v) and _is_source("".join(v)),
        f"one or more texts, together {_SIZE}",
    ),
    "grammar": (str, _is_source, f"a grammar {_SIZE}"),
}
