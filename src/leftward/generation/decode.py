"""The decoding loop: prompts in, one event a token out, for one sequence or many at once.

A prompt is read in one pass (prefill); then each pass adds one token to every unfinished sequence. Streaming and
batches are this same loop. Not here: a queue of requests that come and go, which is the engine's business.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leftward.config import Config
from leftward.errors import UserError
from leftward.generation.sampling import choose
from leftward.generation.settings import Sampling
from leftward.model.cache import KVCache
from leftward.model.decoder import Decoder
from leftward.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "context"]
"""stop: an end-of-text token or a stop text. length: max_tokens. context: prompt and output fill max_seq_len."""


@dataclass(frozen=True, slots=True)
class Event:
    """One step of one sequence."""

    row: int
    token_id: int | None
    """None where a sequence ends without a token: there was no room for one."""
    text: str
    """What may be shown now: never half a character, never a part of a stop text. The texts of a row join to its
    whole output."""
    finish_reason: FinishReason | None = None


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
) -> Iterator[Event]:
    """Continue each prompt. Every row ends with one event that has a finish reason.

    Args:
        decoder: in evaluation mode.
        prompts: token ids.
        samplings: for each prompt; one without a seed draws one.
        eos_ids: tokens that end a sequence; they are not shown.
        excluded: [V], True for ids that must not be chosen.
        truncate: "left" drops the beginning of a prompt that is longer than the context.
        prefix_embeddings: for each prompt [P, d_model], put in front of it; P is the same for all.
        prefix_lm: what is in front and the prompt see each other whole, as in the training of a prefix-LM.

    Raises:
        UserError: a prompt is empty, too long or holds unknown ids (before anything is computed), or the model is
            broken.
    """
    if decoder.training:
        raise ValueError("the decoder is in training mode: call decoder.eval() first")
    vectors: Sequence[Tensor | None] = prefix_embeddings or [None] * len(prompts)
    longest = decoder.config.max_seq_len - _check_vectors(vectors, decoder.config)
    prompts = [
        _fitting(prompt, sampling.max_tokens, longest, truncate)
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    for prompt in prompts:
        _check_ids(prompt, decoder.config.vocab_size)
    rows = [
        _Row(number, prompt, before, sampling, longest - len(prompt), tokenizer)
        for number, (prompt, before, sampling) in enumerate(zip(prompts, vectors, samplings, strict=True))
    ]
    return _run(decoder, rows, frozenset(eos_ids), excluded, prefix_lm)


class StopScanner:
    """Holds back what may be the beginning of a stop text, and cuts where one is complete.

    The text that is complete first wins, and of two that end together the longer one; where the pieces of the text
    begin and end makes no difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """What may be shown now, and whether a stop text is complete."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        longest = min(max(map(len, self._stops)) - 1, len(text))
        begins = (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stops))
        keep = len(text) - next(begins, 0)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class _Row:
    """One sequence on its way: what it may still do, its random numbers, and the text that is not shown yet."""

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        before: Tensor | None,
        sampling: Sampling,
        room: int,
        tokenizer: Tokenizer,
    ) -> None:
        self.number = number
        self.prompt, self.before = prompt, before
        self.sampling = sampling
        self.random = random.Random(sampling.seeded().seed)
        self.left = min(sampling.max_tokens, room)  # tokens
        self.end: FinishReason = "length" if sampling.max_tokens <= room else "context"
        self.pieces = tokenizer.stream_decoder(prompt)
        self.scanner = StopScanner(sampling.stop)
        self.last_id = prompt[-1]

    def accept(self, token_id: int, eos_ids: frozenset[int]) -> Event:
        self.last_id = token_id
        self.left -= 1
        if token_id in eos_ids:
            return self._finish(token_id, "", "stop")
        text, stopped = self.scanner.feed(self.pieces.feed(token_id))
        if stopped:
            return Event(self.number, token_id, text, "stop")
        if self.left == 0:
            return self._finish(token_id, text, self.end)
        return Event(self.number, token_id, text)

    def _finish(self, token_id: int, text: str, reason: FinishReason) -> Event:
        # An incomplete character may complete a stop text, as U+FFFD.
        rest, stopped = self.scanner.feed(self.pieces.flush())
        return Event(self.number, token_id, text + rest + self.scanner.flush(), "stop" if stopped else reason)


def _fitting(
    prompt: Sequence[int], max_tokens: int, max_seq_len: int, truncate: Literal["left"] | None
) -> Sequence[int]:
    if not prompt:
        raise UserError("the prompt is empty, and the tokenizer has no token that begins a text: give it some text")
    if len(prompt) <= max_seq_len:
        return prompt
    if truncate is None:
        raise UserError(
            f"the prompt has {len(prompt)} tokens, more than the model's context of {max_seq_len}: shorten it, "
            "or drop its beginning (--truncate left; truncate='left' in Python)"
        )
    # At least half of the context stays prompt, however much is asked for.
    return prompt[-(max_seq_len - min(max_tokens, max_seq_len // 2)) :]


def _check_ids(prompt: Sequence[int], vocab_size: int) -> None:
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        wrong = next(token_id for token_id in prompt if not 0 <= token_id < vocab_size)
        raise UserError(f"token id {wrong} is not in the model's vocabulary of {vocab_size} (ids from 0)")


def _check_vectors(vectors: Sequence[Tensor | None], config: Config) -> int:
    """How many there are in front of each prompt."""
    shapes = {None if v is None else tuple(v.shape) for v in vectors}
    if shapes <= {None}:
        return 0
    shape = next(iter(shapes))
    if len(shapes) > 1 or shape is None or len(shape) != 2 or shape[1] != config.d_model:
        raise UserError(
            f"prefix_embeddings have shapes {sorted(map(str, shapes))}: every prompt needs the same number of vectors "
            f"of {config.d_model}, as [P, {config.d_model}]"
        )
    if shape[0] >= config.max_seq_len:
        raise UserError(f"{shape[0]} prefix_embeddings leave no room in the model's context of {config.max_seq_len}")
    return shape[0]


def _run(
    decoder: Decoder, rows: list[_Row], eos_ids: frozenset[int], excluded: Tensor | None, prefix_lm: bool
) -> Iterator[Event]:
    for row in rows:
        if row.left == 0:
            yield Event(row.number, None, "", row.end)
    rows = [row for row in rows if row.left]
    if not rows:
        return
    cache, logits = _prefill(decoder, rows, prefix_lm)
    excluded = None if excluded is None else excluded.to(logits.device)
    seen = _seen_tokens(rows, logits)
    groups = _group(rows)
    while True:
        for row, token_id in zip(rows, _choose(logits, rows, groups, seen, excluded), strict=True):
            event = row.accept(token_id, eos_ids)
            if event.finish_reason is not None:
                row.left = 0
            yield event
        if seen is not None:
            seen[range(len(rows)), [row.last_id for row in rows]] = True
        kept = [i for i, row in enumerate(rows) if row.left]
        if not kept:
            return
        if len(kept) < len(rows):
            rows = [rows[i] for i in kept]
            cache = cache.fork(kept)
            seen = None if seen is None else seen[kept]
            groups = _group(rows)
        logits = _step(decoder, rows, cache)


@torch.inference_mode()
def _prefill(decoder: Decoder, rows: list[_Row], prefix_lm: bool) -> tuple[KVCache, Tensor]:
    """Read the prompts, each different one once. Gives the cache and the next token's logits, [B, V]."""
    device, dtype = decoder.embed.weight.device, decoder.embed.weight.dtype
    keys = [(tuple(row.prompt), id(row.before)) for row in rows]
    different = dict(zip(keys, rows, strict=True))
    prompts = [row.prompt for row in different.values()]
    vectors = [row.before.to(device) for row in different.values() if row.before is not None]
    before = torch.stack(vectors) if vectors else None
    n_before = 0 if before is None else before.shape[1]
    lengths = [n_before + len(prompt) for prompt in prompts]
    # The last token that is generated need not be read.
    capacity = max(n_before + len(row.prompt) + row.left - 1 for row in rows)
    cache = KVCache(decoder.config, len(different), capacity, dtype, device, rewindable=0)
    ids = torch.zeros(len(different), max(map(len, prompts)), dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, : len(prompt)] = torch.tensor(prompt)
    prefix_lengths = lengths if prefix_lm else None
    hidden = decoder.hidden(
        ids.to(device), cache, lengths, prefix_lengths=prefix_lengths, prefix_embeddings=before
    )  # [B, P + T, D]
    last = hidden[range(len(different)), [length - 1 for length in lengths]]
    logits = decoder.logits(last)
    if len(different) < len(rows):
        place = {key: i for i, key in enumerate(different)}
        places = [place[key] for key in keys]
        cache, logits = cache.fork(places), logits[places]
    return cache, logits


@torch.inference_mode()
def _step(decoder: Decoder, rows: list[_Row], cache: KVCache) -> Tensor:
    """Read each row's last token. Gives the next one's logits, [B, V]."""
    ids = torch.tensor([[row.last_id] for row in rows], device=decoder.embed.weight.device)
    return decoder(ids, cache)[:, -1]


@torch.inference_mode()
def _choose(
    logits: Tensor,
    rows: list[_Row],
    groups: list[tuple[Sampling, list[int]]],
    seen: Tensor | None,
    excluded: Tensor | None,
) -> list[int]:
    if excluded is not None:
        logits = logits.masked_fill(excluded, -torch.inf)
    chosen = [0] * len(rows)
    for sampling, members in groups:
        everyone = len(members) == len(rows)
        part = logits if everyone else logits[members]
        part_seen = None if seen is None or sampling.repetition_penalty == 1 else seen if everyone else seen[members]
        draws = [rows[i].random.random() for i in members]
        for i, token_id in zip(members, choose(part, sampling, draws, part_seen), strict=True):
            chosen[i] = token_id
    return chosen


def _group(rows: list[_Row]) -> list[tuple[Sampling, list[int]]]:
    """Rows that differ in nothing but their seed are computed together."""
    groups: dict[Sampling, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(dataclasses.replace(row.sampling, seed=None), []).append(i)
    return list(groups.items())


def _seen_tokens(rows: list[_Row], logits: Tensor) -> Tensor | None:
    """[B, V], True for the tokens of each prompt; None where no row asks for a repetition penalty."""
    if all(row.sampling.repetition_penalty == 1 for row in rows):
        return None
    seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    for i, row in enumerate(rows):
        seen[i, list(row.prompt)] = True
    return seen
