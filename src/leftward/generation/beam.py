"""Beam search: of the likeliest continuations, several at a time, the best whole ones. Equal to transformers' generate
with num_beams: the same candidates, lengths, scores and ends.

Every step continues the beams in the likeliest ways that there are. One that ends goes to the finished, of which the
best by score, the sum of log-probabilities over length^length_penalty, are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leftward.errors import UserError
from leftward.generation.program import Reader
from leftward.generation.rules import Bans, Row, apply_rules
from leftward.generation.sampling import NOT_NUMBERS, NOTHING_LEFT
from leftward.generation.settings import Sampling
from leftward.model.cache import KVCache
from leftward.model.decoder import Decoder

USED = (
    *("max_tokens", "min_tokens", "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("bad_words", "stop_ids", "sampler", "n"),
)
"""The settings of `Sampling` that a beam search looks at: all but those of draws, texts that stop and constraints."""


@dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """How to search. Raises: UserError, listing all problems."""

    num_beams: int = 4
    """Continuations at a time."""
    length_penalty: float = 1.0
    """Above 0 long outputs gain, below 0 short ones: the power of the length that a score is divided by."""
    early_stopping: bool | Literal["never"] = False
    """When a prompt's search ends. True: as soon as num_beams are finished. False: when the best that goes on, scored
    at its present length, is below all of these. "never": when it would be at any length that it can still have."""

    def __post_init__(self) -> None:
        problems = []
        if type(self.num_beams) is not int or not 1 <= self.num_beams <= 1000:
            problems.append(f"num_beams is {self.num_beams!r}: it must be a whole number from 1 to 1000")
        if type(self.length_penalty) not in (int, float) or not abs(self.length_penalty) <= 100:
            problems.append(f"length_penalty is {self.length_penalty!r}: it must be a number between -100 and 100")
        stopping: object = self.early_stopping
        if type(stopping) is not bool and stopping != "never":
            problems.append(f"early_stopping is {self.early_stopping!r}: it must be True, False or 'never'")
        if problems:
            raise UserError("; ".join(problems))


@dataclass(frozen=True)
class Beam:
    """A finished continuation."""

    ids: tuple[int, ...]
    """What ended it included."""
    score: float
    error: str | None = None
    """Why there is none, in one line: its prompt's search could not go on."""


class _Prompt:
    """The search behind one prompt."""

    def __init__(self, number: int, ids: Sequence[int], limit: int, how: BeamSearch) -> None:
        self.number, self.ids, self.limit, self.how = number, ids, limit, how
        self.beams: list[tuple[int, ...]] = [()]  # that go on, the best first
        self.scores = [0.0]  # sums of log-probabilities
        self.finished: list[Beam] = []  # the best first
        self.error: str | None = None

    def best(self, n: int) -> list[Beam]:
        """Of a search that has ended. One that could not go on has n errors, as so many samples would."""
        if self.error is not None:
            return [Beam((), -math.inf, self.error)] * n
        return self.finished[:n] or [Beam((), 0.0)]

    def advance(self, logprobs: Tensor, end_ids: tuple[int, ...]) -> list[int]:
        """Go on with the best of the next tokens, [beams, V]. Gives which beams those that go on continue; at the end
        none.

        Raises: UserError: nothing has ended and nothing goes on.
        """
        how, vocab_size = self.how, logprobs.shape[1]
        totals = logprobs + torch.tensor(self.scores, device=logprobs.device)[:, None]
        # With as many for each id that ends, and one: enough that do not end.
        n_candidates = min((len(end_ids) + 1 if end_ids else 2) * how.num_beams, totals.numel())
        best = totals.flatten().topk(n_candidates)
        length = len(self.beams[0]) + 1
        parents: list[int] = []
        beams: list[tuple[int, ...]] = []
        scores: list[float] = []
        for rank, (total, place) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            parent, token_id = divmod(place, vocab_size)
            if total == -math.inf:
                break
            ids = (*self.beams[parent], token_id)
            if token_id not in end_ids and length < self.limit:
                if len(beams) < how.num_beams:
                    parents.append(parent)
                    beams.append(ids)
                    scores.append(total)
            elif rank < how.num_beams:  # an end that is not among the best is none
                self.finished.append(Beam(ids, total / length**how.length_penalty))
        self.finished = sorted(self.finished, key=lambda beam: -beam.score)[: how.num_beams]
        self.beams, self.scores = beams, scores
        if not beams and not self.finished:
            raise UserError(NOTHING_LEFT)
        return [] if not beams or self._is_decided(length) else parents

    def _is_decided(self, length: int) -> bool:
        how = self.how
        if len(self.finished) < how.num_beams:
            return False
        if how.early_stopping is True:
            return True
        at = self.limit if how.early_stopping == "never" and how.length_penalty > 0 else length
        return self.scores[0] / at**how.length_penalty <= self.finished[-1].score


@torch.inference_mode()
def beam_search(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    how: BeamSearch,
    bans: Bans,
    *,
    excluded: Tensor | None = None,
) -> list[list[Beam]]:
    """The best `sampling.n` continuations of each prompt, the best first. A prompt's don't depend on other prompts, but
    for the rounding of bf16's large products (docs/generation.md). Where one's logits are no numbers, or the rules
    leave it nothing to choose, it has errors in their place.

    Args:
        decoder: in evaluation mode.
        prompts: token ids, each at least one and at most as many as the context has.
        sampling: what is in USED counts.
        bans: `Bans.of` it.
        excluded: [V], True for ids that must not be chosen.

    Raises:
        UserError: n is more than num_beams.
    """
    if sampling.n > how.num_beams:
        raise UserError(f"n is {sampling.n}: of {how.num_beams} beams (num_beams) there can't be more")
    context = decoder.config.max_seq_len
    searches = [_Prompt(i, ids, min(sampling.max_tokens, context - len(ids)), how) for i, ids in enumerate(prompts)]
    active = [search for search in searches if search.limit]
    reader = Reader(decoder)
    if active:
        cache, logits = _prefill(reader, active)
    while active:
        places, first, going_on = list[int](), 0, []
        of_searches = logits.float().log_softmax(dim=-1).split([len(search.beams) for search in active])
        for search, logprobs in zip(active, of_searches, strict=True):
            try:
                parents = search.advance(_ruled(logprobs, search, sampling, bans, excluded), bans.end_ids)
            except UserError as error:  # its own: the others go on
                parents, search.error = [], str(error)
            if parents:
                going_on.append(search)
                places += [first + parent for parent in parents]
            first += len(logprobs)
        active = going_on
        if active:
            if places != list(range(len(cache.lengths))):
                cache = cache.fork(places)
            last = [[ids[-1]] for search in active for ids in search.beams]
            logits = reader.logits(reader.hidden(last, [cache]))
    return [search.best(sampling.n) for search in searches]


def _prefill(reader: Reader, searches: Sequence[_Prompt]) -> tuple[KVCache, Tensor]:
    """Read the prompts. Gives the cache and the next token's logits, [B, V]."""
    decoder, prompts = reader.decoder, [search.ids for search in searches]
    capacity = max(len(search.ids) + search.limit for search in searches)
    cache = KVCache(decoder.config, len(prompts), capacity, decoder.kv_dtype, decoder.device, rewindable=0)
    hidden = reader.hidden(prompts, [cache])  # [tokens, D]
    return cache, reader.logits(hidden[[end - 1 for end in itertools.accumulate(map(len, prompts))]])


def _ruled(logprobs: Tensor, search: _Prompt, sampling: Sampling, bans: Bans, excluded: Tensor | None) -> Tensor:
    """Rules look at log-probabilities here, [beams, V], as in transformers, so that a sum of them stays one.

    Raises: UserError: they are no numbers, before the rules or behind them, or the sampler's answer is none.
    """
    if not logprobs.amax(dim=-1).isfinite().all():
        raise UserError(NOT_NUMBERS)
    if excluded is not None:
        logprobs = logprobs.masked_fill(excluded.to(logprobs.device), -torch.inf)
    for of_beam, ids in zip(logprobs, search.beams, strict=True):
        row = Row(sampling=sampling, ids=[*search.ids, *ids], n_prompt=len(search.ids), bans=bans)
        if row.has_rules and (token_id := apply_rules(of_beam, row)) is not None:
            kept = of_beam[token_id].clone()
            of_beam.fill_(-torch.inf)
            of_beam[token_id] = kept
    if not (logprobs.amax(dim=-1) < torch.inf).all():  # a beam without a next token is just no beam any more
        raise UserError(NOTHING_LEFT)
    return logprobs
