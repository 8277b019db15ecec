"""A whole output with all that is known about it, gathered from the events of its decoding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from leftward.errors import UserError
from leftward.generation.requests import Event, FinishReason
from leftward.generation.sampling import TokenLogprobs
from leftward.generation.settings import Sampling


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One output of one prompt."""

    text: str
    ids: tuple[int, ...]
    """The tokens that were chosen. The last ones may be no part of the text: what ended it, a stop text."""
    finish_reason: FinishReason
    error: str | None = None
    """Why there is no more of it, in one line, where the reason is an error."""
    seed: int | None = None
    """It gives this output again, alone or beside others. None: of a beam, for which nothing is drawn."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of each of the ids, where the setting logprobs asks for them."""
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the prompt's ids but the first, in the model's own distribution, where prompt_logprobs asks for them."""
    score: float | None = None
    """Of a beam: the sum of its log-probabilities over its length to the power of length_penalty."""
    n_guessed: int = 0
    """Tokens that were guessed ahead."""
    n_accepted: int = 0
    """Those of them that were right."""

    @property
    def mean_logprob(self) -> float:
        """Log-probability per token under the model itself; −inf if there is no token. Takes logprobs."""
        if self.logprobs is None:
            raise ValueError("there are no log-probabilities: generate with logprobs=0")
        return math.fsum(of.logprob for of in self.logprobs) / len(self.ids) if self.ids else -math.inf


def gather(
    events: Iterable[Event], prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
) -> Iterator[Completion]:
    """The completions of all rows, in their order, each as soon as those before it are whole. `prompts` and
    `samplings`, with their seeds, are those of each."""
    rows: list[list[Event]] = [[] for _ in prompts]
    n_given = 0
    for event in events:
        rows[event.row].append(event)
        while n_given < len(rows) and rows[n_given] and rows[n_given][-1].finish_reason is not None:
            yield _completion(rows[n_given], prompts[n_given], samplings[n_given])
            rows[n_given] = []
            n_given += 1


def _completion(events: Sequence[Event], prompt: Sequence[int], sampling: Sampling) -> Completion:
    last = events[-1]
    assert last.finish_reason is not None
    return Completion(
        text="".join(event.text for event in events),
        ids=tuple(event.token_id for event in events if event.token_id is not None),
        finish_reason=last.finish_reason,
        error=last.message,
        seed=sampling.seed,
        logprobs=None if sampling.logprobs is None else tuple(e.logprobs for e in events if e.logprobs is not None),
        prompt_ids=tuple(prompt),
        n_guessed=last.n_guessed,
        n_accepted=last.n_accepted,
    )


def check_any(completions: Sequence[Completion]) -> None:
    """Raises: UserError: there are some, and every one ended in an error."""
    if completions and (reason := completions[0].error) is not None and all(each.error for each in completions):
        raise UserError(reason)


def best(completions: Sequence[Completion], n: int) -> list[Completion]:
    """The n with the highest log-probability per token, the best first; those that ended in an error last."""
    return sorted(completions, key=lambda each: (each.error is None, each.mean_logprob), reverse=True)[:n]
