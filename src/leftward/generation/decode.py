"""A fixed list of prompts through the engine: one event a token."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

from torch import Tensor

from leftward.errors import UserError
from leftward.generation.engine import MAX_ROWS, Engine, KVDtype
from leftward.generation.requests import Event, Request
from leftward.generation.settings import Sampling
from leftward.generation.speculative import Speculator
from leftward.model.decoder import Decoder
from leftward.text.tokenizer import Tokenizer


def decode(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    *,
    eos_ids: Collection[int] = (),
    excluded: Tensor | None = None,
    truncate: Literal["left"] | None = None,
    prefix_embeddings: Sequence[Tensor] | None = None,
    prefix_lm: bool = False,
    kv_dtype: KVDtype | None = None,
    speculator: Speculator | None = None,
    raises: bool = True,
    n: int = 1,
    **asked: Any,
) -> Iterator[Event]:
    """Continue each prompt. Every row ends with one event that has a finish reason; where that is an error, the others
    go on.

    Args:
        decoder: in evaluation mode.
        prompts: token ids.
        samplings: for each prompt; one without a seed draws one.
        eos_ids: tokens that end a sequence; they are not shown.
        excluded: [V], True for ids that must not be chosen.
        truncate: "left" drops the beginning of a prompt that is longer than the context.
        prefix_embeddings: for each prompt [P, d_model], put in front of it.
        prefix_lm: what is in front and the prompt see each other whole, as in the training of a prefix-LM.
        kv_dtype: as of `Engine`.
        speculator: of the model's vocabulary, where `asked` has `speculative`.
        raises: whether the error of the first row that has one is raised when all have ended.
        n: how many rows in turn have the same prompt, to say in errors which prompt of a user's it is.
        asked: other fields of `Request`, the same for all.

    Raises:
        UserError: a prompt is empty, too long or holds unknown ids (before anything is computed); or, behind the last
            event, a row's logits were no numbers or its rules left nothing to choose.
    """
    engine = Engine(
        decoder,
        tokenizer,
        eos_ids=eos_ids,
        excluded=excluded,
        max_rows=max(1, min(MAX_ROWS, len(prompts))),
        kv_dtype=kv_dtype,
        share_prefixes=len(prompts) > 1,
        speculator=speculator,
    )
    vectors: Sequence[Tensor | None] = prefix_embeddings or [None] * len(prompts)
    for row, (prompt, sampling, in_front) in enumerate(zip(prompts, samplings, vectors, strict=True)):
        request = Request(
            ids=prompt,
            sampling=sampling,
            truncate=truncate,
            prefix_embeddings=in_front,
            prefix_lm=prefix_lm,
            **asked,
        )
        try:
            engine.submit(request)
        except UserError as error:
            if not _is_served(engine, dataclasses.replace(request, ids=[0])):
                raise  # the settings, which all prompts have
            raise UserError(of_row(row // n, len(prompts) // n, str(error), "prompt")) from None
    return _with_error_behind(engine.run(), len(prompts)) if raises else engine.run()


def _is_served(engine: Engine, request: Request) -> bool:
    try:
        engine.submit(request)
    except UserError:
        return False
    return True


def of_row(row: int, n_rows: int, message: str, what: str = "output") -> str:
    """What went wrong in one of several outputs, or with one of several prompts."""
    return message if n_rows == 1 else f"{what} {row + 1} of {n_rows}: {message}"


def _with_error_behind(events: Iterator[Event], n_rows: int) -> Iterator[Event]:
    messages: dict[int, str] = {}
    for event in events:
        if event.message is not None:
            messages[event.row] = event.message
        yield event
    if messages:
        first = min(messages)
        raise UserError(of_row(first, n_rows, messages[first]))
