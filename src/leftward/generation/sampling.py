"""From logits to the next token. `choose` does it for the rows of a batch, and `distribution` says what it draws from.

The order is the field's (transformers, vLLM): masks, then the rules of rules.py, then temperature, top_k, top_p, min_p,
typical_p, then a draw. A row's choice follows from its own logits, tokens and random number, bit for bit, whatever
other rows are beside it: what is computed for several rows at once treats each by itself.

The vocabulary is sorted only where nothing less will do. Its largest are found by way of the maxima of blocks, and a
rule that keeps the fewest tokens with some probability looks at a few such blocks before it looks at all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leftward.errors import UserError
from leftward.generation.rules import Row, apply_rules
from leftward.generation.settings import Sampling

_BLOCK = 64  # tokens whose largest value stands for them
_FIRST_BLOCKS = 32  # that the fewest tokens with some probability are looked for in

NOT_NUMBERS = "the model's logits are not finite numbers: its weights are damaged or its training diverged"
NOTHING_LEFT = "the rules leave no token to choose: bad_words, logit_bias, min_tokens and constraints forbid all"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities of one token and of those beside it."""

    logprob: float
    """Of the token, in the model's own distribution: no temperature, no penalty."""
    top: tuple[tuple[int, float], ...]
    """The likeliest (id, log-probability) there, as many as were asked for."""
    ruled_logprob: float | None = None
    """Of the token in the distribution that it was drawn from, after all rules. None: of the prompt."""
    ruled_top: tuple[tuple[int, float], ...] = ()
    """The likeliest there; fewer where the rules leave fewer."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a row gets: a token or the reason why there is none."""

    token_id: int | None
    error: str | None = None
    """One line, where there is no token to choose: the row can't go on, the others can."""
    logprobs: TokenLogprobs | None = None
    """Where its sampling asks for them."""


def choose(
    logits: Tensor, rows: Sequence[Row], *, excluded: Tensor | None = None, allowed: Tensor | None = None
) -> list[Choice]:
    """The next token of each row.

    Args:
        logits: [B, V], the model's own. Unchanged.
        rows: B of them.
        excluded: [V], True for ids that no row may choose.
        allowed: [B, V], True for ids that the row may choose: a constraint's mask.
    """
    if logits.dtype != torch.float32 or logits.requires_grad:
        logits = logits.detach().float()
    assert len(logits) == len(rows)
    numbers = logits.numpy() if allowed is None and logits.device.type == "cpu" else None
    choices = []
    for i, row in enumerate(rows):
        if numbers is not None and row.is_greedy:  # most rows, for which making a tensor would take longest
            best, largest = _argmax_of(numbers[i])
            if math.isfinite(largest) and (excluded is None or not excluded[best]):
                choices.append(Choice(best))
                continue
        own = logits[i]
        choices.append(_choice(own, row, _left(own, row, excluded, None if allowed is None else allowed[i])))
    return choices


def distribution(logits: Tensor, row: Row, *, excluded: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
    """The probabilities that `choose` draws from: [V] in fp64, on the CPU. A greedy row's token has 1.

    Args:
        logits: [V], the model's own. Unchanged.
        excluded, allowed: [V], as for `choose`.

    Raises:
        UserError: there is nothing to choose.
    """
    left = _left(logits.detach().float(), row, excluded, allowed)
    if isinstance(left, str):
        raise UserError(left)
    probabilities = torch.zeros(logits.shape[-1], dtype=torch.float64)
    if isinstance(left, int):
        probabilities[left] = 1
        return probabilities
    weights = left.weights.double()
    probabilities[slice(None) if left.ids is None else left.ids] = weights / weights.sum()
    return probabilities


def draw_from(weights: Tensor, draw: float) -> int:
    """Where a random number in [0, 1) falls on the cumulative weights [C], which need not sum to 1."""
    # In fp64: an fp32 sum over 100,000 tokens would forget the unlikely ones.
    cumulative = weights.cumsum(0, dtype=torch.float64)
    total = cumulative[-1].item()
    # Below the total, so that the token found has a probability above 0.
    at = min(draw * total, math.nextafter(total, 0.0))
    return int(torch.searchsorted(cumulative, at, right=True))


def token_logprobs(logits: Tensor, ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Of each of the ids [T] in the model's own distribution, whose logits [T, V] are given."""
    logprobs = logits.float().log_softmax(dim=-1)
    of_ids = logprobs[range(len(ids)), list(ids)].tolist()
    best = logprobs.topk(min(top, logits.shape[-1]), dim=-1)
    beside = (tuple(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return [TokenLogprobs(of_id, around) for of_id, around in zip(of_ids, beside, strict=True)]


# ---- what the rules leave of a row


@dataclass(frozen=True, slots=True)
class _Left:
    """The tokens that a row may still choose, ascending, and how likely each is. What is not there has 0."""

    ids: Tensor | None
    """[C]; None: all."""
    weights: Tensor
    """[C] in fp32, on the CPU; they sum to about 1."""


def _left(logits: Tensor, row: Row, excluded: Tensor | None, allowed: Tensor | None) -> _Left | int | str:
    """Of the model's own logits [V] in fp32: what the row may choose, the only token, or why there is none."""
    ruled = logits
    if excluded is not None:
        ruled = ruled.masked_fill(excluded.to(logits.device), -torch.inf)
    if allowed is not None:
        ruled = ruled.masked_fill(~allowed.to(logits.device), -torch.inf)
    if row.has_rules:
        ruled = ruled.clone() if ruled is logits else ruled
        try:
            token_id = apply_rules(ruled, row)
        except UserError as error:
            return str(error)
        if token_id is not None:
            return token_id
    best, largest = _argmax(ruled)
    if not math.isfinite(largest):
        return NOTHING_LEFT if logits.amax().isfinite() else NOT_NUMBERS
    return best if row.sampling.temperature == 0 else _truncated(ruled.cpu(), largest, row.sampling)


def _argmax(logits: Tensor) -> tuple[int, float]:
    """The first of the largest of [V], and what it is: NaN, if there is one."""
    if logits.device.type == "cpu":
        return _argmax_of(logits.numpy())
    best = int(logits.argmax())
    return best, float(logits[best])


def _argmax_of(numbers: np.ndarray[Any, Any]) -> tuple[int, float]:
    """The same in a tenth of the time of torch's."""
    best = int(numbers.argmax())
    return best, float(numbers[best])


def _truncated(logits: Tensor, largest: float, sampling: Sampling) -> _Left:
    """Temperature, top_k, top_p, min_p, typical_p on one row [V]. On the CPU: a token's id goes there anyway."""
    ids: Tensor | None = None
    if sampling.top_k:
        ids, logits = _largest(logits, sampling.top_k)
    # The largest moves to 0: the same distribution, and no temperature overflows.
    scaled = (logits - largest).div_(max(sampling.temperature, torch.finfo(torch.float32).tiny))
    weights = scaled.softmax(dim=0)
    if sampling.top_p < 1:
        ids, weights = _fewest(ids, weights, weights, sampling.top_p)
    if sampling.min_p:
        ids, weights = _at(_at_least(weights, float(sampling.min_p * weights.amax())), ids, weights)
    if sampling.typical_p < 1:
        weights = weights / weights.sum()
        surprise = -weights.log()
        expected = (weights * surprise).nansum()  # 0 · ∞ is 0 here
        ids, weights = _fewest(ids, weights, -(surprise - expected).abs(), sampling.typical_p)
    return _Left(ids, weights)


def _largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of [V] and those equal to the k-th: ids, ascending, and values."""
    ids = _at_least(values, _bound(values, k))
    kth = values[ids].topk(min(k, len(ids)), sorted=False).values.amin()
    ids = ids[values[ids] >= kth]
    return ids, values[ids]


def _fewest(ids: Tensor | None, weights: Tensor, keys: Tensor, mass: float) -> tuple[Tensor | None, Tensor]:
    """The fewest of [C] with this share of the weights, those with the largest keys first, and those whose key equals
    the last one's: ids, ascending, and weights."""
    some = _at_least(keys, _bound(keys, _FIRST_BLOCKS))
    last = _last_needed(keys, weights, some, mass)
    if last is None and len(some) < len(keys):
        last = _last_needed(keys, weights, None, mass)
    return _at(None if last is None else _at_least(keys, last), ids, weights)


def _last_needed(keys: Tensor, weights: Tensor, some: Tensor | None, mass: float) -> float | None:
    """The key with which the sum of weights over [C], the largest keys first, reaches `mass`. None: it does not.
    `some` are the places of the largest, if these alone are to be looked at."""
    # numpy sorts in a tenth of torch's time, and values alone in a tenth of that.
    found = _at(some, None, keys)[1]
    if keys is weights:
        descending = torch.from_numpy(np.sort(found.numpy())).flip(0)
        summed = descending
    else:
        order = torch.from_numpy(np.argsort(found.numpy())).flip(0)
        descending, summed = found[order], _at(some, None, weights)[1][order]
    n_less = int(torch.searchsorted(summed.cumsum(0, dtype=torch.float64), mass))
    return float(descending[n_less]) if n_less < len(descending) else None


def _bound(values: Tensor, n: int) -> float:
    """What at least n of [V] are not below: the n-th largest maximum of a block."""
    n_blocks = len(values) // _BLOCK
    if n > n_blocks:
        return -math.inf
    largest = values[: n_blocks * _BLOCK].view(n_blocks, _BLOCK).amax(dim=1)
    return float(largest.topk(n, sorted=False).values.amin())


def _at_least(values: Tensor, bound: float) -> Tensor:
    """The places, ascending, of what is at least `bound` in [V]."""
    return torch.from_numpy(np.flatnonzero(values.numpy() >= np.float32(bound)))


def _at(places: Tensor | None, ids: Tensor | None, values: Tensor) -> tuple[Tensor | None, Tensor]:
    """What is at these places, None: all, of ids (None: the places themselves) and values."""
    if places is None:
        return ids, values
    return places if ids is None else ids[places], values[places]


# ---- and the choice


def _place(left: _Left, row: Row) -> int:
    """Which of the tokens that are left.

    A guess that was drawn from q is kept with probability min(1, p / q); otherwise a token is drawn from what p has
    more than q. Either way a token comes with probability p (Leviathan et al. 2023, arXiv 2211.17192).
    """
    if len(left.weights) == 1:
        return 0
    if row.guess is None or row.guess.probabilities is None:
        return draw_from(left.weights, row.draw)
    p = left.weights.double() / left.weights.sum(dtype=torch.float64)
    q = row.guess.probabilities if left.ids is None else row.guess.probabilities[left.ids]
    token_id = row.guess.token_id
    place = token_id if left.ids is None else int(torch.searchsorted(left.ids, token_id))
    is_left = left.ids is None or (place < len(left.ids) and int(left.ids[place]) == token_id)
    if is_left and row.guess.test * q[place] < p[place]:
        return place
    more = (p - q).clamp(min=0)
    # Nothing but rounding is more, where the two are one distribution.
    return draw_from(more if more.sum() > 0 else p, row.draw)


def _choice(logits: Tensor, row: Row, left: _Left | int | str) -> Choice:
    """`logits` [V] are the model's own."""
    if isinstance(left, str):
        return Choice(None, left)
    top = row.sampling.logprobs
    if isinstance(left, int):
        place, token_id = 0, left
    else:
        place = _place(left, row)
        token_id = place if left.ids is None else int(left.ids[place])
    if top is None:
        return Choice(token_id)
    (own,) = token_logprobs(logits[None], [token_id], top)
    if isinstance(left, int):
        certain = ((token_id, 0.0),) if top else ()
        return Choice(token_id, None, dataclasses.replace(own, ruled_logprob=0.0, ruled_top=certain))
    weights = left.weights.double()
    ruled = (weights / weights.sum()).log()
    best = ruled.topk(min(top, len(ruled)))
    ids = best.indices if left.ids is None else left.ids[best.indices]
    ruled_top = tuple(zip(ids.tolist(), best.values.tolist(), strict=True))
    return Choice(token_id, None, dataclasses.replace(own, ruled_logprob=ruled[place].item(), ruled_top=ruled_top))
