"""A fixed list of prompts through the engine: one event a token."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

from torch import Tensor

from leftward.errors import UserError
from leftward.generation.engine import Engine, KVDtype
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
    **asked: Any,
) -> Iterator[Event]:
    """Continue each prompt. Every row ends with one event that has a finish reason.

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
        asked: other fields of `Request`, the same for all.

    Raises:
        UserError: a prompt is empty, too long or holds unknown ids (before anything is computed), or the model is
            broken.
    """
    engine = Engine(
        decoder,
        tokenizer,
        eos_ids=eos_ids,
        excluded=excluded,
        kv_dtype=kv_dtype,
        share_prefixes=len(prompts) > 1,
        speculator=speculator,
    )
    vectors: Sequence[Tensor | None] = prefix_embeddings or [None] * len(prompts)
    for prompt, sampling, in_front in zip(prompts, samplings, vectors, strict=True):
        engine.submit(
            Request(
                ids=prompt,
                sampling=sampling,
                truncate=truncate,
                prefix_embeddings=in_front,
                prefix_lm=prefix_lm,
                **asked,
            )
        )
    return _without_errors(engine.run())


def _without_errors(events: Iterator[Event]) -> Iterator[Event]:
    for event in events:
        if event.message is not None:
            raise UserError(event.message)
        yield event
