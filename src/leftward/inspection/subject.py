"""The text that a trace is about: a prompt, what the model wrote behind it and how, and one reading of both."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leftward.errors import UserError
from leftward.generation.requests import Event, FinishReason, Request
from leftward.generation.settings import Sampling
from leftward.inspection.reading import Cancelled, Reading
from leftward.language_model import LanguageModel

_ALTERNATIVES = 12
"""Tokens that are shown beside the one that was chosen."""


@dataclass
class Subject:
    """What every part is computed from."""

    model: LanguageModel
    name: str
    """Of the model, for people."""
    n_prompt: int
    sampling: Sampling
    """As it was asked for, with its seed; a text that fills its room ends before max_tokens."""
    events: Sequence[Event]
    """One a token that was written, and perhaps one without."""
    ids: Sequence[int]
    """Of the prompt and of what was written."""
    directory: Path | None = None
    """Of the run that the model comes from, if it does."""
    cancelled: Callable[[], bool] = field(default=lambda: False)
    """Whether nobody waits for the answer any more; a server sets it anew for each question."""

    @functools.cached_property
    def reading(self) -> Reading:
        """Raises: Cancelled."""
        return Reading(self.model.decoder, self.ids, lambda: self.cancelled())

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.events[-1].finish_reason if self.events else None


def write(
    model: LanguageModel,
    prompt: str | Sequence[int],
    settings: dict[str, Any],
    *,
    name: str = "model",
    directory: Path | None = None,
    most_tokens: int | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Subject:
    """Let the model go on from `prompt`, a text or ids. `settings` are the fields of `Sampling`; max_tokens 0 lets it
    write nothing.

    Args:
        most_tokens: that prompt and output may have; the output is cut to fit.

    Raises:
        UserError: a setting out of range; a prompt that is empty, too long, or can't be written by the tokenizer.
        Cancelled.
    """
    sampling = model.sampling({"max_tokens": 20, **settings, "logprobs": _ALTERNATIVES}).seeded()
    if sampling.n != 1 or sampling.best_of is not None:
        raise UserError("a trace is of one text: n and best_of are for generate")
    ids = model.tokenizer.encode(prompt, add_bos=True) if isinstance(prompt, str) else list(prompt)
    room = sampling.max_tokens
    if most_tokens is not None:
        if len(ids) > most_tokens:
            raise UserError(f"the prompt has {len(ids)} tokens, more than the {most_tokens} allowed here: shorten it")
        room = min(room, most_tokens - len(ids))
    engine = model.engine(share_prefixes=False)
    limited = dataclasses.replace(sampling, max_tokens=max(1, room))
    engine.submit(Request(ids=ids, sampling=limited))  # which checks the ids
    events: list[Event] = []
    while room and not (events and events[-1].finish_reason):
        if cancelled():
            raise Cancelled
        events += engine.step()
    if events and events[-1].message is not None:
        raise UserError(events[-1].message)
    written = [event.token_id for event in events if event.token_id is not None]
    return Subject(model, name, len(ids), sampling, events, [*ids, *written], directory)


def opening(model: LanguageModel, text: str, most_tokens: int) -> list[int]:
    """`text` as far as the model can read it: without what its tokenizer can't write, and within half of its context.
    Where nothing is left of it, the token that begins a text, or the first one."""
    tokenizer = model.tokenizer

    def writes(character: str) -> bool:
        with contextlib.suppress(UserError):
            return bool(tokenizer.encode(character))
        return False

    kept = "".join(next(filter(writes, (c, c.swapcase())), "") for c in text)
    ids = tokenizer.encode(kept.strip(), add_bos=True)[: max(1, min(most_tokens, model.config.max_seq_len) // 2)]
    ordinary = (i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids)
    return ids or [next(ordinary, 0)]
