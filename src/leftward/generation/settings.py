"""Sampling: how to choose tokens and when to stop, as plain, validated data. No torch in here."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from leftward.errors import UserError, nearest

CHAT_MAX_TOKENS = 1024
"""Of an answer, if nothing else is said: it ends by itself, where a text goes on for ever."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose tokens and when to stop. The defaults are llama.cpp's temperature and top_p: a little sharper
    than the model itself, and without the tail in which small models are only noise.

    Raises:
        UserError: listing all problems at once.
    """

    max_tokens: int = 200
    """New tokens at most."""
    temperature: float = 0.8
    """Divides the logits; 1 is the model's own distribution, 0 always takes the most likely token (greedy)."""
    top_k: int = 0
    """Only the k most likely tokens; 0: all."""
    top_p: float = 0.95
    """Only the fewest tokens that together have this probability (Holtzman et al. 2019, arXiv 1904.09751); 1: all."""
    min_p: float = 0.0
    """Only tokens at least this likely as a share of the most likely one's probability; 0: all."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in prompt and output, multiplies the negative ones (Keskar et al. 2019,
    arXiv 1909.05858); 1: off."""
    seed: int | None = None
    """The same seed gives the same text. None: one is drawn."""
    stop: tuple[str, ...] = ()
    """Texts that end the output; they are not part of it."""

    def __post_init__(self) -> None:
        problems = []
        for name, (kind, is_right, demand) in _RULES.items():
            value = getattr(self, name)
            if kind is float and type(value) is int and abs(value) < 2**63:
                object.__setattr__(self, name, value := float(value))
            if name == "seed" and value is None:
                continue
            if type(value) is not kind or not is_right(value):
                problems.append(f"{name} is {value!r}: it must be {demand}")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            problems.append(f"stop is {self.stop!r}: it must be a tuple of texts that are not empty")
        if problems:
            raise UserError("; ".join(problems))

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Sampling:
        """From keyword arguments. `stop` may be one text or a list. Raises: UserError, also for unknown names."""
        valid = {field.name for field in dataclasses.fields(cls)}
        unknown = [f"unknown setting {name}: {nearest(name, valid)}" for name in settings if name not in valid]
        if unknown:
            raise UserError("; ".join(unknown))
        stop = settings.get("stop", ())
        stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop
        return cls(**{**settings, "stop": stop})

    def seeded(self, sample: int = 0) -> Sampling:
        """The settings of one of several samples of a prompt. Sample 0 has the seed itself, or one drawn now."""
        seed = secrets.randbits(32) if self.seed is None else self.seed
        if sample:
            digest = hashlib.blake2b(f"{seed} {sample}".encode(), digest_size=4)
            seed = int.from_bytes(digest.digest(), "big")
        return dataclasses.replace(self, seed=seed)


# setting → (type, what holds for a right value, the same in words)
_RULES: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "max_tokens": (int, lambda v: v >= 0, "a whole number, at least 0"),
    "temperature": (float, lambda v: 0 <= v < math.inf, "at least 0 (0: greedy)"),
    "top_k": (int, lambda v: v >= 0, "a whole number, at least 0 (0: off)"),
    "top_p": (float, lambda v: 0 < v <= 1, "above 0 and at most 1 (1: off)"),
    "min_p": (float, lambda v: 0 <= v <= 1, "between 0 and 1 (0: off)"),
    "repetition_penalty": (float, lambda v: 0.01 <= v <= 1e6, "between 0.01 and 1e6 (1: off)"),
    "seed": (int, lambda v: v >= 0, "a whole number, at least 0"),
}
