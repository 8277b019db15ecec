"""A Decoder with its tokenizer: what users hold in their hands. Text goes in and text comes out."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor

from leftward.config import Config
from leftward.data.sources import Piece
from leftward.errors import UserError, nearest
from leftward.formats.generation_config import sampling_defaults
from leftward.formats.loading import open_model, shortened
from leftward.formats.tensors import DTYPES
from leftward.generation.decode import Event, decode
from leftward.generation.settings import CHAT_MAX_TOKENS, Sampling
from leftward.model.classifier import last_hidden
from leftward.model.decoder import Decoder
from leftward.text.chat import ChatTemplate, Message
from leftward.text.tokenizer import Tokenizer
from leftward.training.loss import Evaluation

_MOST_SAMPLES = 4096  # of a prompt: each has its place in the cache at once
_EMBEDDED_AT_ONCE = 16_384  # tokens, padding included
_READ_AT_ONCE = 4096  # tokens, padding included, and
_SCORED_AT_ONCE = 512  # positions whose logits over the vocabulary are in memory together


def load(path: Path | str, *, dtype: Literal["fp32", "bf16"] = "fp32", max_seq_len: int | None = None) -> LanguageModel:
    """Read a run directory of ours, a Hugging Face model directory or "owner/name" on the hub, a .gguf file, or a .bin
    file of llama2.c.

    Args:
        max_seq_len: a shorter context than the model's own. Where rotary angles are scaled by a rule that looks at the
            length (longrope, dynamic), this settles which angles there are.

    Raises:
        UserError: it is not there, damaged, or of a kind that is not supported yet.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}: {nearest(str(dtype), DTYPES)}")
    decoder, tokenizer, generation, _ = open_model(path, DTYPES[dtype])
    if max_seq_len is not None:
        decoder = shortened(decoder, max_seq_len)
    if tokenizer is None:
        where = Path(path) / "tokenizer.json" if Path(path).is_dir() else f"the tokenizer of {path}"
        raise UserError(f"{where} is missing")
    defaults = sampling_defaults(generation)
    try:
        Sampling.of(defaults)
    except UserError as error:
        raise UserError(f"the generation_config.json of {path}: {error}") from None
    return LanguageModel(decoder, tokenizer, eos_ids=generation["eos_token_id"], sampling=defaults)


@dataclass(frozen=True)
class Score:
    """How likely a model finds a text. One entry of `ids`, `tokens` and `logprobs` for each token that was predicted:
    all of the text where the tokenizer has a token that begins a text, otherwise all but the first."""

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    """Each token's text; U+FFFD stands for a part of a character."""
    logprobs: tuple[float, ...]
    """Natural logarithms of the model's own probabilities: no temperature, no penalty."""
    n_bytes: int
    """Bytes of UTF-8 that the scored tokens stand for."""

    @property
    def nll(self) -> float:
        """Negative log-likelihood of the text, in nats."""
        return -math.fsum(self.logprobs)

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nll / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # e^710 is no float any more

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers."""
        return self.nll / math.log(2) / self.n_bytes


class LanguageModel:
    """Generate from it, or ask how likely a text is. `decoder` is the torch module, ids [B, T] → logits [B, T, V]."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """Puts `decoder` in evaluation mode. `eos_ids` end a text beside the tokenizer's own; `sampling` are the fields
        of `Sampling` that this model has other defaults for: what its generation_config.json says."""
        self.decoder = decoder.eval()
        self.tokenizer = tokenizer
        own = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        self.eos_ids = frozenset([*eos_ids, *own])
        self.sampling_defaults = dict(sampling or {})

    def __repr__(self) -> str:
        config = self.config
        return (
            f"LanguageModel({self.decoder.n_parameters:,} parameters, {config.n_layers} layers of {config.d_model}, "
            f"context {config.max_seq_len}, {self.tokenizer.kind} vocabulary of {self.tokenizer.vocab_size:,})"
        )

    @property
    def config(self) -> Config:
        return self.decoder.config

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """How the model was trained to see a conversation; may be set. Raises: UserError, where it came without one."""
        return ChatTemplate.of(self.tokenizer)

    def sampling(self, settings: Mapping[str, Any], **otherwise: Any) -> Sampling:
        """`settings`, where they say nothing the model's own defaults, then `otherwise`, then those of `Sampling`.

        Raises: UserError.
        """
        return Sampling.of({**otherwise, **self.sampling_defaults, **settings})

    @overload
    def generate(self, prompt: str, *, n: Literal[1] = 1, **settings: Any) -> str: ...

    @overload
    def generate(self, prompt: str | Sequence[str], *, n: int = 1, **settings: Any) -> list[str]: ...

    def generate(
        self,
        prompt: str | Sequence[str],
        *,
        n: int = 1,
        truncate: Literal["left"] | None = None,
        prefix_embeddings: Tensor | None = None,
        prefix_lm: bool = False,
        **sampling: Any,
    ) -> str | list[str]:
        """Continue `prompt`; the prompt is not part of the result.

        Args:
            prompt: one text, or several that are continued at once. An empty one begins a text.
            n: samples of each prompt.
            truncate: "left" drops the beginning of a prompt that is longer than the context.
            prefix_embeddings: [P, d_model] vectors in front of every prompt, or [prompts, P, d_model] for each.
            prefix_lm: those vectors and the prompt see each other whole, as in the training of a prefix-LM.
            sampling: the fields of `Sampling`: max_tokens, temperature, top_k, top_p, min_p, repetition_penalty,
                seed, stop. What is not given is as the model's generation_config.json has it.

        Returns:
            A text for one sample of one prompt, otherwise a list: the n samples of the first prompt, and so on.

        Raises:
            UserError: unknown settings or values out of range; a prompt that is too long or that the tokenizer can't
                write.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        texts = [""] * (len(prompts) * n)
        events = self.events(
            prompts,
            self.sampling(sampling),
            n=n,
            truncate=truncate,
            prefix_embeddings=prefix_embeddings,
            prefix_lm=prefix_lm,
        )
        for event in events:
            texts[event.row] += event.text
        return texts[0] if isinstance(prompt, str) and n == 1 else texts

    def stream(self, prompt: str, *, truncate: Literal["left"] | None = None, **sampling: Any) -> Iterator[str]:
        """The same text as `generate`, in pieces as they come. Raises: as `generate`, at once."""
        events = self.events([prompt], self.sampling(sampling), truncate=truncate)
        return (event.text for event in events if event.text)

    def chat(self, messages: Sequence[Message], **sampling: Any) -> str:
        """The assistant's answer to a conversation: {"role": "user", "content": "Hello"}, and so on.

        Args:
            messages: from the first one on. What stands in them is text, never a control token.
            sampling: the fields of `Sampling`; max_tokens is 1,024 if not given.

        Raises:
            UserError: as `generate`; the model has no chat template, or the template refuses the conversation.
        """
        return "".join(self.chat_stream(messages, **sampling))

    def chat_stream(self, messages: Sequence[Message], **sampling: Any) -> Iterator[str]:
        """The same answer as `chat`, in pieces as they come. Raises: as `chat`, at once."""
        events = self.chat_events(messages, self.sampling(sampling, max_tokens=CHAT_MAX_TOKENS))
        return (event.text for event in events if event.text)

    def chat_events(self, messages: Sequence[Message], sampling: Sampling, **variables: Any) -> Iterator[Event]:
        """The decoding of an answer. `variables` are what the template knows beside: tools, enable_thinking.

        Raises: as `chat`, at once.
        """
        prompt = self.chat_template.encode(messages, **variables)
        if len(prompt) > self.config.max_seq_len:
            raise UserError(
                f"the conversation has {len(prompt)} tokens, more than the model's context of "
                f"{self.config.max_seq_len}: begin a new one, or leave old messages out"
            )
        events = decode(
            self.decoder,
            self.tokenizer,
            [prompt],
            [sampling],
            eos_ids=self.eos_ids | self.chat_template.end_ids,
            excluded=self._excluded,
        )
        return _without_first_space(events) if self.tokenizer.drops_first_space else events

    def events(
        self,
        prompts: Sequence[str],
        sampling: Sampling,
        *,
        n: int = 1,
        truncate: Literal["left"] | None = None,
        prefix_embeddings: Tensor | None = None,
        prefix_lm: bool = False,
    ) -> Iterator[Event]:
        """The decoding itself: an event a token, with the reason where a sample ends.

        Sample i of prompt p is row p · n + i. It has the seed that `sampling.seeded(i)` says, whatever else is in the
        batch. Raises: as `generate`, at once.
        """
        if type(n) is not int or not 1 <= n <= _MOST_SAMPLES:
            raise UserError(f"n is {n!r}: it must be a whole number, at least 1 and at most {_MOST_SAMPLES}")
        if truncate not in (None, "left"):
            raise UserError(f"truncate is {truncate!r}: only 'left' is possible")
        vectors = _one_for_each(prefix_embeddings, len(prompts))
        ids, before, samplings = [], [], []
        for prompt, in_front in zip(prompts, vectors, strict=True):
            ids += [self._encode(prompt)] * n
            before += [in_front] * n
            first = sampling.seeded()
            samplings += [first.seeded(i) for i in range(n)]
        return decode(
            self.decoder,
            self.tokenizer,
            ids,
            samplings,
            eos_ids=self.eos_ids,
            excluded=self._excluded,
            truncate=truncate,
            prefix_embeddings=[vector for vector in before if vector is not None],
            prefix_lm=prefix_lm,
        )

    def embed(self, texts: Sequence[str]) -> Tensor:
        """A vector a text: what the head reads at its last token, [texts, d_model]. In fp32, not normalised.

        A text's vector does not depend on the others. Raises: UserError: a text that is empty or longer than the
        context, or that the tokenizer can't write.
        """
        rows = [self._encode(text) for text in texts]
        for text, ids in zip(texts, rows, strict=True):
            if not 0 < len(ids) <= self.config.max_seq_len:
                raise UserError(
                    f"the text {text[:40]!r} has {len(ids)} tokens: it must have at least 1, and the model's context "
                    f"is {self.config.max_seq_len}"
                )
        vectors = torch.empty(len(rows), self.config.d_model)
        by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # little padding in a batch
        while by_length:
            longest = len(rows[by_length[-1]])
            size = max(1, _EMBEDDED_AT_ONCE // longest)
            by_length, batch = by_length[:-size], by_length[-size:]
            lengths = [len(rows[i]) for i in batch]
            padded = torch.tensor([rows[i] + [0] * (longest - len(rows[i])) for i in batch])
            with torch.inference_mode():
                last = last_hidden(self.decoder, padded.to(self.decoder.embed.weight.device), lengths)
            vectors[batch] = last.float().cpu()
        return vectors

    def score(self, text: str) -> Score:
        """How likely the model finds `text` from its beginning on.

        A text longer than the context is read in windows that overlap by half, and each token is scored in the first
        window that holds it: behind at least half a context.

        Raises:
            UserError: nothing to predict in it, or characters that the tokenizer can't write.
        """
        ids = self._encode(text)
        if len(ids) < 2:
            raise UserError("nothing to score: the text has no token that another one comes before")
        windows = _windows([(ids, True)], self.config.max_seq_len, self._stride())
        logprobs = [logprob for _, of_window in self._logprobs(windows) for logprob in of_window]
        scored = [self.tokenizer.token_bytes(token_id) for token_id in ids[1:]]
        return Score(
            ids=tuple(ids[1:]),
            tokens=tuple(part.decode("utf-8", errors="replace") for part in scored),
            logprobs=tuple(logprobs),
            n_bytes=sum(map(len, scored)),
        )

    def evaluate(self, texts: Iterable[str | Piece], *, stride: int | None = None) -> Evaluation:
        """The loss of texts, each read from its own beginning and in windows, as `score` reads one.

        Args:
            texts: a document each, or the pieces of documents that `data.sources.read` gives, in constant memory.
            stride: how many tokens each window of a text begins after the one before, and so the tokens that are scored
                in it, behind the others; from 1 to the context. Less costs time, and gives tokens more to go by. None:
                half the context.

        Raises:
            UserError: a stride out of range, nothing to predict in the texts, or characters that the tokenizer can't
                write.
        """
        windows = _windows(self._encoded(texts), self.config.max_seq_len, self._stride(stride))
        nats, tokens, n_bytes = 0.0, 0, 0
        for ids, logprobs in self._logprobs(windows):
            nats -= math.fsum(logprobs)
            tokens += len(ids)
            n_bytes += sum(map(self._n_bytes, ids))
        if not tokens:
            raise UserError("nothing to evaluate: the texts have no token that another one comes before")
        return Evaluation(nats, tokens, n_bytes)

    def _stride(self, stride: int | None = None) -> int:
        context = self.config.max_seq_len
        if stride is None:
            return max(1, context // 2)
        if type(stride) is not int or not 1 <= stride <= context:
            raise UserError(f"stride is {stride!r}: it must be a whole number from 1 to the context, {context}")
        return stride

    def _encoded(self, texts: Iterable[str | Piece]) -> Iterator[tuple[list[int], bool]]:
        """The ids of each piece, and whether it is the last of its text."""
        begins = True
        for text in texts:
            piece = text if isinstance(text, Piece) else Piece(text, ends_document=True)
            yield self._encode(piece.text) if begins else self.tokenizer.encode(piece.text), piece.ends_document
            begins = piece.ends_document

    def _encode(self, text: str) -> list[int]:
        """The ids of a text from its beginning on, which the bos token marks where there is one."""
        if not isinstance(text, str):
            raise UserError(f"a text must be a string; this is {type(text).__name__}")
        return self.tokenizer.encode(text, add_bos=True)

    def _logprobs(self, windows: Iterable[_Window]) -> Iterator[tuple[list[int], list[float]]]:
        """The ids that each window scores, and their log-probabilities."""
        device = self.decoder.embed.weight.device
        for batch in _batches(windows):
            longest = max(len(ids) for ids, _ in batch) - 1
            inputs = torch.tensor([ids[:-1] + [0] * (longest + 1 - len(ids)) for ids, _ in batch], device=device)
            scored = [ids[1 + known :] for ids, known in batch]
            targets = torch.tensor([target for ids in scored for target in ids], device=device)
            logprobs: list[float] = []
            with torch.inference_mode():
                hidden = self.decoder.hidden(inputs)  # [B, T, D]
                kept = torch.cat([hidden[row, known : len(ids) - 1] for row, (ids, known) in enumerate(batch)])
                parts = zip(kept.split(_SCORED_AT_ONCE), targets.split(_SCORED_AT_ONCE), strict=True)
                for part, wanted in parts:
                    distribution = self.decoder.logits(part).float().log_softmax(dim=-1)  # [T, V]
                    logprobs += distribution.gather(1, wanted[:, None])[:, 0].tolist()
            start = 0
            for ids in scored:
                yield ids, logprobs[start : start + len(ids)]
                start += len(ids)

    @functools.cached_property
    def _n_bytes(self) -> Callable[[int], int]:
        """Bytes of text that an id stands for, remembered."""
        return functools.cache(lambda token_id: len(self.tokenizer.token_bytes(token_id)))

    @functools.cached_property
    def _excluded(self) -> Tensor | None:
        """[V], True for ids that stand for no text: vocabularies are padded, and some have holes. Never sampled."""
        ids = range(self.config.vocab_size)
        holes = [token_id for token_id in ids if not self._stands_for_text(token_id)]
        if not holes:
            return None
        excluded = torch.zeros(self.config.vocab_size, dtype=torch.bool, device=self.decoder.embed.weight.device)
        excluded[holes] = True
        return excluded

    def _stands_for_text(self, token_id: int) -> bool:
        try:
            self.tokenizer.token_bytes(token_id)
        except UserError:
            return False
        return True


_Window = tuple[list[int], int]
"""Ids of which the last is only predicted, and how many of the others the window before has predicted already."""


def _windows(pieces: Iterable[tuple[list[int], bool]], context: int, stride: int) -> Iterator[_Window]:
    """Windows of `context` inputs that go on by `stride`: every id of a text but its first is predicted once.

    `pieces` are the ids of texts, and whether a text ends behind them.
    """
    held: list[int] = []
    at = known = 0
    for ids, ends in pieces:
        held += ids
        while len(held) - at > context:
            yield held[at : at + context + 1], known
            at, known = at + stride, context - stride
        del held[:at]
        at = 0
        if ends:
            if len(held) > 1 + known:
                yield held, known
            held, known = [], 0


def _batches(windows: Iterable[_Window]) -> Iterator[list[_Window]]:
    """As many windows as may be read at once, and at least one."""
    batch: list[_Window] = []
    longest = 0
    for window in windows:
        longest = max(longest, len(window[0]))
        if batch and (len(batch) + 1) * longest > _READ_AT_ONCE:
            yield batch
            batch, longest = [], len(window[0])
        batch.append(window)
    if batch:
        yield batch


def _without_first_space(events: Iterator[Event]) -> Iterator[Event]:
    """An answer is a text of its own, so that the space that its first word is written with goes."""
    begun = False
    for event in events:
        yield event if begun else dataclasses.replace(event, text=event.text.removeprefix(" "))
        begun = begun or bool(event.text)


def _one_for_each(vectors: Tensor | None, n_prompts: int) -> list[Tensor | None]:
    if vectors is None:
        return [None] * n_prompts
    if vectors.ndim == 2:
        return [vectors] * n_prompts
    if vectors.ndim != 3 or len(vectors) != n_prompts:
        raise UserError(
            f"prefix_embeddings have the shape {list(vectors.shape)}: it must be [P, d_model], or "
            f"[{n_prompts}, P, d_model] for {n_prompts} prompts"
        )
    return list(vectors)
