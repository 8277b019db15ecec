"""A whole output with all that is known about it, gathered from the events of its decoding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
) -> list[Completion]:
    """The completions of all rows. `prompts` and `samplings`, with their seeds, are those of each."""
    rows: list[list[Event]] = [[] for _ in prompts]
    for event in events:
        rows[event.row].append(event)
    return [
        Completion(
            text="".join(event.text for event in of_row),
            ids=tuple(event.token_id for event in of_row if event.token_id is not None),
            finish_reason=next(event.finish_reason for event in of_row if event.finish_reason is not None),
            error=of_row[-1].message,
            seed=sampling.seed,
            logprobs=None if sampling.logprobs is None else tuple(e.logprobs for e in of_row if e.logprobs is not None),
            prompt_ids=tuple(prompt),
            n_guessed=of_row[-1].n_guessed,
            n_accepted=of_row[-1].n_accepted,
        )
        for of_row, prompt, sampling in zip(rows, prompts, samplings, strict=True)
    ]


def check_any(completions: Sequence[Completion]) -> None:
    """Raises: UserError: there are some, and every one ended in an error."""
    if completions and (reason := completions[0].error) is not None and all(each.error for each in completions):
        raise UserError(reason)


def best(completions: Sequence[Completion], n: int) -> list[Completion]:
    """The n with the highest log-probability per token, the best first; those that ended in an error last."""
    return sorted(completions, key=lambda each: (each.error is None, each.mean_logprob), reverse=True)[:n]
