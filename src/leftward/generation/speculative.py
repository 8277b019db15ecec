"""Guesses of the tokens that come next, several of which are then read in one pass and checked.

Two ways to guess: what followed the last tokens when they stood in the text before (prompt lookup, Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding), and what a smaller model of the same vocabulary would write (Leviathan
et al. 2023, arXiv 2211.17192). Guesses cost or save time, and never change how likely a text is: one of the first kind
is right where the sequence's own choice, with its own random number, is the same token; one that was drawn from a
draft's distribution is kept or replaced by Leviathan's rule (sampling.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from leftward.errors import UserError
from leftward.generation.program import Reader
from leftward.generation.rules import Guess, Row
from leftward.generation.sampling import choose, distribution, draw_from
from leftward.model.cache import KVCache, row_bytes
from leftward.model.decoder import Decoder

if TYPE_CHECKING:
    from leftward.generation.requests import Job, Request

Speculation = Literal["prompt_lookup", "draft"]

_MOST = 16  # guesses at once: where all are right, as many tokens more for one pass
_FIRST = 4
_SIZES = (4, 3, 2)  # of the last tokens that are looked up, the longest first
_CHUNK = 128  # tokens of a prompt that the draft reads together


class Lookup:
    """Where the last tokens of a growing sequence stood before."""

    def __init__(self) -> None:
        self._n_known = 0
        self._behind: dict[tuple[int, ...], int] = {}  # tokens in a row → the place behind them, the last one there is

    def guess(self, ids: Sequence[int], n: int, least: int = _SIZES[-1]) -> list[int]:
        """The n tokens that followed there; none, where the last `least` tokens stand nowhere else.

        `ids` are those of the last call, and more. Where what followed reaches the end, it goes on as a repetition.
        """
        for end in range(self._n_known + 1, len(ids)):  # the last tokens of all are looked up, not found
            for size in _SIZES:
                if size <= end:
                    self._behind[tuple(ids[end - size : end])] = end
        self._n_known = max(self._n_known, len(ids) - 1)
        for size in _SIZES:
            if least <= size < len(ids) and (start := self._behind.get(tuple(ids[-size:]))) is not None:
                period = len(ids) - start
                return [ids[start + i % period] for i in range(n)]
        return []


@dataclasses.dataclass(slots=True, eq=False)
class _State:
    """What is known of one sequence."""

    length: int
    """Guesses to make next: one more than were right last time, twice as many if all were."""
    random: random.Random
    """For the draft's choices and their tests: the sequence's own random numbers are for its own choices."""
    lookup: Lookup = dataclasses.field(default_factory=Lookup)
    cache: KVCache | None = None
    read: list[int] = dataclasses.field(default_factory=list)
    """The tokens that the draft's cache holds."""


class Speculator:
    """The guesses of an engine, for those of its requests that ask for some.

    Args:
        draft: a model in evaluation mode with the engine's vocabulary; ids that only one of the two has are not
            guessed, and nothing is behind those that the draft has not. Its keys and values are part of the engine's
            budget: of each sequence as many places as the engine has, for the draft's context at most.
        excluded: [V], True for ids that must not be chosen.
        most: guesses at once.
    """

    def __init__(
        self, vocab_size: int, draft: Decoder | None = None, *, excluded: Tensor | None = None, most: int = _MOST
    ) -> None:
        self.most = most
        self.kinds: tuple[Speculation, ...] = ("prompt_lookup",) if draft is None else ("prompt_lookup", "draft")
        self._vocab_size = vocab_size
        self._draft = None if draft is None else Reader(draft)
        # Found by a walk through the draft's modules, and asked for wherever memory is counted.
        self._draft_dtype = torch.float32 if draft is None else draft.kv_dtype
        self._excluded = excluded
        self._states: dict[Job, _State] = {}

    def propose(self, jobs: Sequence[Job]) -> list[list[Guess]]:
        """For each sequence, tokens that may follow; often none."""
        guesses: dict[Job, list[Guess]] = {}
        drafted = []
        for job in jobs:
            kind = job.request.speculative
            if kind == "prompt_lookup":
                state = self._state(job)
                # Where the last guess was wrong, a pair that stood there before says little.
                least = _SIZES[-1] if state.length > 1 else _SIZES[0]
                guesses[job] = [Guess(token_id) for token_id in state.lookup.guess(job.ids, state.length, least)]
            elif self.drafts(job.request):
                drafted.append(job)
        if self._draft is not None and drafted:
            guesses |= self._write(self._draft, drafted)
        return [guesses.get(job, []) for job in jobs]

    def settle(self, job: Job, n_proposed: int, n_accepted: int) -> None:
        """So many of the guesses that were read were right."""
        state = self._state(job)
        state.length = min(self.most, 2 * state.length if n_accepted == n_proposed else n_accepted + 1)

    def drafts(self, request: Request) -> bool:
        """Whether the draft reads it, so that it takes memory for that."""
        return self._draft is not None and request.speculative == "draft" and request.prefix_embeddings is None

    def row_bytes(self, n_places: int) -> int:
        """Of the draft's keys and values of a sequence for which the engine has so many places."""
        if self._draft is None:
            return 0
        draft = self._draft.decoder
        return row_bytes(draft.config, _capacity(draft, n_places), self._draft_dtype, self.most)

    def release(self, job: Job) -> None:
        """Give its memory back; how many guesses it gets stays known."""
        if job in self._states:
            self._states[job].cache = None

    def forget(self, job: Job) -> None:
        self._states.pop(job, None)

    def _state(self, job: Job) -> _State:
        if job not in self._states:
            seed = job.sampling.seed
            own = random.Random(None if seed is None else f"draft {seed}")
            self._states[job] = _State(min(_FIRST, self.most), own)
        return self._states[job]

    # ---- what the draft writes

    def _write(self, draft: Reader, jobs: Sequence[Job]) -> dict[Job, list[Guess]]:
        """Continue all of them, a token a pass."""
        guesses: dict[Job, list[Guess]] = {job: [] for job in jobs}
        walked = dict.fromkeys(jobs, 0)  # guesses that a constraint was told of
        lengths, known_ids = {}, draft.decoder.config.vocab_size
        for job in jobs:
            assert job.cache is not None
            room = _capacity(draft.decoder, job.cache.capacity) - len(job.context)
            knows = known_ids >= self._vocab_size or max(job.context) < known_ids
            lengths[job] = min(self._state(job).length, room) if knows else 0
        going = [job for job in jobs if lengths[job] > 0]
        new = [self._unread(draft, job) for job in going]
        try:
            while going:
                kept = []
                for job, logits in zip(going, self._read(draft, going, new), strict=True):
                    guess = self._guess(job, guesses[job], logits)
                    if guess is None:
                        continue
                    guesses[job].append(guess)
                    if len(guesses[job]) == lengths[job] or guess.token_id in job.bans.end_ids:
                        continue
                    if job.matcher is not None:
                        try:
                            job.matcher.accept(guess.token_id)
                        except UserError:  # the model itself may choose otherwise
                            continue
                        walked[job] += 1
                        if job.matcher.is_over:
                            continue
                    kept.append(job)
                going = kept
                new = [[guesses[job][-1].token_id] for job in going]
        finally:  # broken off, too
            for job in jobs:
                if job.matcher is not None:
                    job.matcher.rewind(walked[job])
        return guesses

    def _unread(self, draft: Reader, job: Job) -> list[int]:
        """What the draft is to read before it guesses. The first time, all of a prompt but its last chunk is read here;
        later, what was guessed wrongly is forgotten."""
        state, context = self._state(job), job.context
        assert job.cache is not None
        model = draft.decoder
        capacity = _capacity(model, job.cache.capacity)
        known = 0
        if state.cache is None:
            state.cache = KVCache(model.config, 1, capacity, self._draft_dtype, model.device, rewindable=self.most)
        else:
            if capacity > state.cache.capacity:
                state.cache.grow(capacity)
            limit = min(len(state.read), len(context) - 1)
            known = next((i for i in range(limit) if state.read[i] != context[i]), limit)
            try:
                state.cache.rewind([known])
            except ValueError:  # its windows have rolled on: the engine's context has, too
                known = 0
                state.cache.rewind([known])
        state.read = state.read[:known]
        while len(context) - len(state.read) > _CHUNK:
            self._read(draft, [job], [context[len(state.read) :][:_CHUNK]])
        return context[len(state.read) :]

    def _read(self, draft: Reader, jobs: Sequence[Job], new: Sequence[list[int]]) -> Tensor:
        """The next tokens of each. Gives the logits behind the last, of the engine's vocabulary: [B, V]."""
        caches = []
        for job, tokens in zip(jobs, new, strict=True):
            state = self._state(job)
            assert state.cache is not None
            state.read = [*state.read, *tokens]
            caches.append(state.cache)
        hidden = draft.hidden(new, caches)
        logits = draft.logits(hidden[[end - 1 for end in itertools.accumulate(map(len, new))]])
        missing = self._vocab_size - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)  # or cut, where it is negative

    def _guess(self, job: Job, before: Sequence[Guess], logits: Tensor) -> Guess | None:
        """The token behind those guesses, by the rules of the sequence. None: the rules leave none to this model."""
        state = self._state(job)
        ids = [*job.ids, *(guess.token_id for guess in before)]
        # A function of the user's own is asked once for each token, which is the model's.
        sampling = dataclasses.replace(job.sampling, sampler=None, logprobs=None)
        row = Row(sampling=sampling, ids=ids, n_prompt=job.n_prompt, draw=state.random.random(), bans=job.bans)
        allowed = None if job.matcher is None else job.matcher.allowed()
        if sampling.temperature == 0:
            (choice,) = choose(
                logits[None], [row], excluded=self._excluded, allowed=None if allowed is None else allowed[None]
            )
            return None if choice.token_id is None else Guess(choice.token_id)
        try:
            probabilities = distribution(logits, row, excluded=self._excluded, allowed=allowed)
        except UserError:
            return None
        return Guess(draw_from(probabilities, row.draw), probabilities, state.random.random())


def _capacity(draft: Decoder, n_places: int) -> int:
    """Of the draft's cache, for a sequence for which the engine has so many places."""
    return min(n_places, draft.config.max_seq_len)
