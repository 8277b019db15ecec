"""What changes a sequence's logits before anything is drawn from them: masks, bias, penalties, bans and a function of
the user's own. Each rule is a pure function on one row of logits, and looks at that row's tokens only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leftward.errors import UserError
from leftward.generation.settings import Sampler, Sampling
from leftward.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Bans:
    """Which tokens a sequence must not choose, as ids: what of a `Sampling` only the tokenizer can say."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    end_ids: tuple[int, ...] = ()
    """What ends a sequence: end-of-text tokens and stop_ids. Banned before min_tokens."""

    @classmethod
    def of(cls, sampling: Sampling, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int] = ()) -> Bans:
        """Settled once for a sequence. Ends of texts that are not in the vocabulary, as some models' files name them,
        never come.

        Raises:
            UserError: a setting names an id that is not in the vocabulary, or a bad word that the tokenizer can't
                write.
        """
        words = {spelling for word in sampling.bad_words for spelling in _spellings(word, tokenizer)}
        named = {
            "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
            "stop_ids": sampling.stop_ids,
            "bad_words": [token_id for word in words for token_id in word],
        }
        for name, ids in named.items():
            if ids and max(ids) >= vocab_size:
                raise UserError(f"{name} has the id {max(ids)}: the model's vocabulary has {vocab_size} (ids from 0)")
        ends = {token_id for token_id in eos_ids if 0 <= token_id < vocab_size}
        return cls(tuple(sorted(words)), tuple(sorted(ends.union(sampling.stop_ids))))


NO_BANS = Bans()


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """A token that may come next."""

    token_id: int
    probabilities: Tensor | None = None
    """[V] in fp64, on the CPU: what it was drawn from. None: it was not drawn, and is right where the row's own choice
    is the same."""
    test: float = 0.0
    """A random number in [0, 1) that says whether a guess that was drawn is kept."""


@dataclass(slots=True, eq=False, kw_only=True)
class Row:
    """A sequence that is to get its next token."""

    sampling: Sampling
    ids: Sequence[int]
    """Of the prompt and the output so far."""
    n_prompt: int
    """How many of them are the prompt."""
    draw: float = 0.0
    """This token's random number in [0, 1), from a stream that is the row's own. A greedy row doesn't look at it."""
    bans: Bans = NO_BANS
    """`Bans.of` its sampling; the same for all tokens of a sequence."""
    guess: Guess | None = None
    """Its next token, if it was drawn from another model's distribution."""

    @property
    def is_greedy(self) -> bool:
        """Whether it gets the likeliest token, and nothing else is asked for."""
        return self.sampling.temperature == 0 and self.sampling.logprobs is None and not self.has_rules

    @property
    def has_rules(self) -> bool:
        """Whether `apply_rules` may change anything."""
        sampling = self.sampling
        return bool(
            sampling.logit_bias
            or sampling.repetition_penalty != 1
            or sampling.frequency_penalty
            or sampling.presence_penalty
            or self.bans.bad_words
            or (self.bans.end_ids and len(self.ids) - self.n_prompt < sampling.min_tokens)
            or sampling.sampler is not None
        )


def apply_rules(logits: Tensor, row: Row) -> int | None:
    """Change logits [V] in fp32 in place to those that temperature and so on go on with. Gives the id that the row's
    own sampler chose, if it did.

    The order is transformers', and vLLM's for the penalties: logit_bias, repetition, frequency and presence penalty,
    bad_words, min_tokens, sampler.

    Raises:
        UserError: the row's own sampler returned neither logits nor an id that may be chosen.
    """
    sampling = row.sampling
    if sampling.logit_bias:
        ids, bias = zip(*sampling.logit_bias, strict=True)
        logits[list(ids)] += torch.tensor(bias, device=logits.device)
    if sampling.repetition_penalty != 1:
        penalise_repetition(logits, row.ids, sampling.repetition_penalty)
    output = row.ids[row.n_prompt :]
    if output and (sampling.frequency_penalty or sampling.presence_penalty):
        penalise_frequency(logits, output, sampling.frequency_penalty, sampling.presence_penalty)
    banned = [word[-1] for word in row.bans.bad_words if _ends_with(row.ids, word[:-1])]
    if len(output) < sampling.min_tokens:
        banned += row.bans.end_ids
    if banned:
        logits[banned] = -torch.inf
    return None if sampling.sampler is None else _ask(sampling.sampler, logits, row.ids)


def penalise_repetition(logits: Tensor, ids: Sequence[int], penalty: float) -> None:
    """In place, for tokens of the prompt and the output."""
    seen = torch.tensor(ids, device=logits.device)
    old = logits[seen]
    logits[seen] = torch.where(old < 0, old * penalty, old / penalty)  # a token that is there twice: twice the same


def penalise_frequency(logits: Tensor, output: Sequence[int], frequency: float, presence: float) -> None:
    """In place, for tokens of the output."""
    seen, counts = torch.tensor(output, device=logits.device).unique(return_counts=True)
    logits[seen] -= frequency * counts
    logits[seen] -= presence


def _ask(sampler: Sampler, logits: Tensor, ids: Sequence[int]) -> int | None:
    out = logits == -torch.inf
    answer = sampler(logits.clone(), tuple(ids))
    if isinstance(answer, Tensor) and answer.shape == out.shape and answer.is_floating_point():
        logits.copy_(answer).masked_fill_(out, -torch.inf)
        return None
    if isinstance(answer, int) and 0 <= answer < len(out) and not out[answer]:
        return int(answer)
    said = f"a tensor of {list(answer.shape)}" if isinstance(answer, Tensor) else repr(answer)
    raise UserError(
        f"the sampler returned {said}: it must return logits of [{len(out)}], or the id of a token that no rule forbids"
    )


def _ends_with(ids: Sequence[int], beginning: tuple[int, ...]) -> bool:
    return not beginning or tuple(ids[-len(beginning) :]) == beginning


def _spellings(word: str | tuple[int, ...], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """A text within another one has these tokens, at the beginning of a word and inside one."""
    if isinstance(word, tuple):
        return [word]
    spelled = [tokenizer.encode_batch([word], starts=[False])[0]]
    with contextlib.suppress(UserError):  # a vocabulary without spaces never writes one
        spelled.append(tokenizer.encode_batch([" " + word], starts=[False])[0])
    return [tuple(map(int, ids)) for ids in spelled]
