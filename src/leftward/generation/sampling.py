"""From logits to the next token: the settings, and each of them as a pure function on logits.

The order is the field's (transformers, vLLM): repetition penalty, temperature, top_k, top_p, min_p, then a draw. Every
sequence draws from random numbers of its own, so its neighbours in a batch never change what it says.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leftward.errors import UserError, nearest


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
            if kind is float and type(value) is int:
                object.__setattr__(self, name, value := float(value))
            if name == "seed" and value is None:
                continue
            if type(value) is not kind or not is_right(value):
                problems.append(f"{name} is {value!r}: it must be {demand}")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            problems.append(f"stop is {self.stop!r}: it must hold texts that are not empty")
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
    "repetition_penalty": (float, lambda v: 0 < v < math.inf, "above 0 (1: off)"),
    "seed": (int, lambda v: v >= 0, "a whole number, at least 0"),
}


# Each of the following takes logits [B, V] in fp32 and gives new ones, −inf for a token that is out.


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """`seen` [B, V] is True for tokens of the prompt and the output."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide, after moving the largest logit to 0: the same distribution, and no temperature overflows."""
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return shifted / max(temperature, torch.finfo(torch.float32).tiny)


def keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    """Tokens as likely as the k-th stay too."""
    smallest = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < smallest, -torch.inf)


def keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    ascending, order = logits.sort(dim=-1)
    out = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    out[..., -1] = False  # the most likely token always stays
    return logits.masked_fill(out.scatter(-1, order, out), -torch.inf)


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    probabilities = logits.softmax(dim=-1)
    return logits.masked_fill(probabilities < min_p * probabilities.amax(dim=-1, keepdim=True), -torch.inf)


def choose(logits: Tensor, sampling: Sampling, draws: list[float], seen: Tensor | None = None) -> list[int]:
    """The next token of each row.

    Args:
        logits: [B, V]
        draws: a random number in [0, 1) for each row.
        seen: [B, V], where there is a repetition penalty.

    Raises:
        UserError: the logits are not numbers.
    """
    logits = logits.float()
    # A NaN anywhere makes the maximum NaN.
    if not logits.amax(dim=-1).isfinite().all():
        raise UserError("the model's logits are not finite numbers: its weights are damaged or its training diverged")
    if seen is not None:
        logits = penalise_repetition(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits.argmax(dim=-1).tolist()
    logits = apply_temperature(logits, sampling.temperature)
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p:
        logits = keep_min_p(logits, sampling.min_p)
    return _draw(logits, draws)


def _draw(logits: Tensor, draws: list[float]) -> list[int]:
    """Where each draw falls on the row's cumulative probability: one random number a token, the same on any device."""
    # In fp64: an fp32 sum over 100,000 tokens would forget the unlikely ones.
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    at = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * total
    # Below the total, so that the token found has a probability above 0.
    at = torch.minimum(at, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, at, right=True)[:, 0].tolist()
