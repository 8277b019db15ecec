"""A Decoder with its tokenizer: what users hold in their hands. Text goes in and text comes out."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor

from leftward.config import Config
from leftward.data.sources import Piece
from leftward.errors import UserError, nearest
from leftward.formats.generation_config import sampling_defaults
from leftward.formats.kinds import Weights
from leftward.formats.loading import open_model, shortened
from leftward.formats.packing import WEIGHTS, with_packed_weights
from leftward.formats.tensors import DTYPES
from leftward.generation.beam import USED, BeamSearch, beam_search
from leftward.generation.completions import Completion, best, check_any, gather
from leftward.generation.decode import decode, of_row
from leftward.generation.engine import Engine, KVDtype
from leftward.generation.requests import Event, FinishReason, checked_ids
from leftward.generation.rules import Bans
from leftward.generation.sampling import token_logprobs
from leftward.generation.settings import CHAT_MAX_TOKENS, Sampling
from leftward.generation.speculative import Speculator
from leftward.inspection import interventions
from leftward.inspection.record import LIMIT_BYTES, Recording, record
from leftward.kernels import native
from leftward.model.classifier import last_hidden
from leftward.model.decoder import Decoder
from leftward.text.chat import ChatTemplate, Message
from leftward.text.tokenizer import Tokenizer
from leftward.training.loss import Evaluation

_EMBEDDED_AT_ONCE = 16_384  # tokens, padding included
_READ_AT_ONCE = 4096  # tokens, padding included, and
_SCORED_AT_ONCE = 512  # positions whose logits over the vocabulary are in memory together

_Seen = TypeVar("_Seen")


def load(
    path: Path | str,
    *,
    dtype: Weights = "fp32",
    max_seq_len: int | None = None,
) -> LanguageModel:
    """Read a run directory of ours, a Hugging Face model directory or "owner/name" on the hub, a .gguf file, or a .bin
    file of llama2.c.

    Args:
        dtype: of the weights. stored: what a .gguf file has in 4 or 8 bits stays so, and is computed with as it is;
            fp32 for the rest, and on a machine without a C++ compiler (docs/generation.md). q8, q4: matrices rounded to
            8 bits or 4, a step for each 32 numbers, which takes a compiler.
        max_seq_len: a shorter context than the model's own. Where rotary angles are scaled by a rule that looks at the
            length (longrope, dynamic), this settles which angles there are.

    Raises:
        UserError: it is not there, damaged, or of a kind that is not supported yet.
    """
    if dtype not in (known := (*DTYPES, "stored", *WEIGHTS)):
        raise UserError(f"dtype is {dtype!r}: {nearest(str(dtype), known)}")
    packs = dtype == "stored" and native.available()
    decoder, tokenizer, generation, _ = open_model(path, DTYPES.get(dtype, torch.float32), packs)
    if max_seq_len is not None:
        decoder = shortened(decoder, max_seq_len)
    if dtype == "q8" or dtype == "q4":
        decoder = with_packed_weights(decoder, dtype)
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

    def generate(self, prompt: str | Sequence[str], **settings: Any) -> str | list[str]:
        """Continue `prompt`; the prompt is not part of the result. Arguments and errors are those of `complete`.

        Returns:
            A text for one sample of one prompt, otherwise a list: the n samples of the first prompt, and so on.

        Raises:
            UserError: as `complete`, and where one of several outputs ended in an error: `complete` gives the others.
        """
        completed = self.complete(prompt, **settings)
        if isinstance(completed, Completion):
            return completed.text
        for row, each in enumerate(completed):
            if each.error is not None:
                raise UserError(of_row(row, len(completed), f"{each.error} (`complete` gives the others)"))
        return [each.text for each in completed]

    @overload
    def complete(self, prompt: str, *, n: Literal[1] = 1, **settings: Any) -> Completion: ...

    @overload
    def complete(self, prompt: str | Sequence[str], *, n: int = 1, **settings: Any) -> list[Completion]: ...

    def complete(self, prompt: str | Sequence[str], **settings: Any) -> Completion | list[Completion]:
        """The same outputs as `generate`, with their tokens, why they ended and how likely they were.

        Args:
            prompt: one text, or several that are continued at once. An empty one begins a text.
            settings: as of `completions`.

        Returns:
            One for one sample of one prompt, otherwise a list: the n samples of the first prompt, and so on. One of
            several that can't go on, because its logits are no numbers or its rules leave nothing to choose, has the
            finish_reason "error" and says why in `error`; the others are whole.

        Raises:
            UserError: as `completions`; every output ended in an error.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        completed = [each for samples in self.completions(prompts, **settings) for each in samples]
        check_any(completed)
        return completed[0] if isinstance(prompt, str) and len(completed) == 1 else completed

    def completions(
        self,
        prompts: Sequence[str],
        *,
        truncate: Literal["left"] | None = None,
        prefix_embeddings: Tensor | None = None,
        prefix_lm: bool = False,
        speculative: Literal["prompt_lookup"] | None = None,
        draft: LanguageModel | None = None,
        at_context: Literal["stop", "roll"] = "stop",
        n_keep: int = 0,
        kv_dtype: KVDtype | None = None,
        **sampling: Any,
    ) -> Iterator[list[Completion]]:
        """The samples of each prompt in turn, as soon as they and those before are whole: many prompts, of which as
        many as there is room for are continued at once.

        Args:
            truncate: "left" drops the beginning of a prompt that is longer than the context.
            prefix_embeddings: [P, d_model] vectors in front of every prompt, or [prompts, P, d_model] for each.
            prefix_lm: those vectors and the prompt see each other whole, as in the training of a prefix-LM.
            speculative: "prompt_lookup" guesses next tokens where the last ones have stood before, and checks several
                in one pass: faster where a text repeats itself, and the same text.
            draft: a smaller model with the same tokenizer, which guesses next tokens. Greedy, the text is the same;
                otherwise it is another one for the same seed, as likely as without.
            at_context: when prompt and output fill the context: "stop", or "roll": drop the older half of it but for
                the first `n_keep` tokens, and go on behind the rest alone.
            kv_dtype: of keys and values: "fp32", "bf16" or "int8". None: as the weights, or bf16 where these are in 4
                or 8 bits.
            sampling: the fields of `Sampling`: max_tokens, temperature, top_p, n, stop, seed, logprobs and so on. What
                is not given is as the model's generation_config.json has it.

        Raises:
            UserError, at once: unknown settings or values out of range; a prompt that is too long or that the tokenizer
                can't write, of several prompts with its number.
        """
        settled = self.sampling(sampling)
        if settled.prompt_logprobs is not None and (prefix_embeddings is not None or prefix_lm):
            raise UserError("prompt_logprobs with prefix_embeddings or prefix_lm: there the prompt is not predicted")
        ids, samplings = self._samples(prompts, settled)
        how = {
            "at_context": at_context,
            "n_keep": n_keep,
            "kv_dtype": kv_dtype,
            "raises": False,
            **self._speculation(speculative, draft),
        }
        events = self._decode(ids, samplings, truncate, prefix_embeddings, prefix_lm, how)
        return self._of_prompts(gather(events, ids, samplings), settled)

    def _of_prompts(self, completed: Iterator[Completion], sampling: Sampling) -> Iterator[list[Completion]]:
        while samples := list(itertools.islice(completed, sampling.best_of or sampling.n)):
            if sampling.best_of is not None:
                samples = best(samples, sampling.n)
            if sampling.prompt_logprobs is not None:
                samples = self._with_prompt_logprobs(samples, sampling.prompt_logprobs)
            yield samples

    def beam_search(
        self,
        prompt: str | Sequence[str],
        *,
        num_beams: int = 4,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        **sampling: Any,
    ) -> list[Completion]:
        """The likeliest outputs as a whole that a search with some beams finds, where `generate` takes token by token.

        Args:
            prompt: one text, or several, each of which is searched for by itself.
            num_beams, length_penalty, early_stopping: see `BeamSearch`.
            sampling: of the fields of `Sampling` max_tokens, min_tokens, n, logit_bias, the penalties, bad_words,
                stop_ids and sampler.

        Returns:
            For each prompt the n best, the best first, with their scores. One of several prompts whose search can't go
            on has n with the finish_reason "error", as in `complete`.

        Raises:
            UserError: as `complete`, and for settings that a search has no use for.
        """
        if idle := [name for name in sampling if name not in USED and name in Sampling.__dataclass_fields__]:
            raise UserError(f"a beam search has no use for {', '.join(idle)}: leave that out, or use generate")
        how = BeamSearch(num_beams=num_beams, length_penalty=length_penalty, early_stopping=early_stopping)
        defaults = {name: value for name, value in self.sampling_defaults.items() if name in USED}
        settled = Sampling.of(defaults | sampling)
        prompts = _of_each([prompt] if isinstance(prompt, str) else list(prompt), self._fitting)
        bans = Bans.of(settled, self.tokenizer, self.config.vocab_size, self.eos_ids)
        found = beam_search(self.decoder, prompts, settled, how, bans, excluded=self._excluded)
        completed = []
        for ids, beams in zip(prompts, found, strict=True):
            for beam in beams:
                if beam.error is not None:
                    failed = Completion(text="", ids=(), finish_reason="error", error=beam.error, prompt_ids=tuple(ids))
                    completed.append(failed)
                    continue
                pieces = self.tokenizer.stream_decoder(ids)
                ended = bool(beam.ids) and beam.ids[-1] in bans.end_ids
                shown = beam.ids[:-1] if ended else beam.ids
                text = "".join([pieces.feed(token_id) for token_id in shown]) + pieces.flush()
                reason: FinishReason = (
                    "stop" if ended else "length" if len(beam.ids) == settled.max_tokens else "context"
                )
                completed.append(
                    Completion(text=text, ids=beam.ids, finish_reason=reason, prompt_ids=tuple(ids), score=beam.score)
                )
        check_any(completed)
        return completed

    def stream(
        self,
        prompt: str,
        *,
        truncate: Literal["left"] | None = None,
        speculative: Literal["prompt_lookup"] | None = None,
        draft: LanguageModel | None = None,
        at_context: Literal["stop", "roll"] = "stop",
        n_keep: int = 0,
        kv_dtype: KVDtype | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """The same text as `generate`, in pieces as they come. Raises: as `generate`, at once."""
        settled = self.sampling(sampling)
        if settled.n > 1 or settled.best_of is not None:
            raise UserError("a stream is one sample: n and best_of are for generate and complete")
        events = self.events(
            [prompt],
            settled,
            truncate=truncate,
            speculative=speculative,
            draft=draft,
            at_context=at_context,
            n_keep=n_keep,
            kv_dtype=kv_dtype,
        )
        return (event.text for event in events if event.text)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        speculative: Literal["prompt_lookup"] | None = None,
        draft: LanguageModel | None = None,
        kv_dtype: KVDtype | None = None,
        **sampling: Any,
    ) -> str:
        """The assistant's answer to a conversation: {"role": "user", "content": "Hello"}, and so on.

        Args:
            messages: from the first one on. What stands in them is text, never a control token.
            speculative, draft, kv_dtype: as of `complete`.
            sampling: the fields of `Sampling`; max_tokens is 1,024 if not given.

        Raises:
            UserError: as `generate`; the model has no chat template, or the template refuses the conversation.
        """
        stream = self.chat_stream(messages, speculative=speculative, draft=draft, kv_dtype=kv_dtype, **sampling)
        return "".join(stream)

    def chat_stream(
        self,
        messages: Sequence[Message],
        *,
        speculative: Literal["prompt_lookup"] | None = None,
        draft: LanguageModel | None = None,
        kv_dtype: KVDtype | None = None,
        **sampling: Any,
    ) -> Iterator[str]:
        """The same answer as `chat`, in pieces as they come. Raises: as `chat`, at once."""
        settled = self.sampling(sampling, max_tokens=CHAT_MAX_TOKENS)
        events = self.chat_events(messages, settled, speculative=speculative, draft=draft, kv_dtype=kv_dtype)
        return (event.text for event in events if event.text)

    def chat_events(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        speculative: Literal["prompt_lookup"] | None = None,
        draft: LanguageModel | None = None,
        kv_dtype: KVDtype | None = None,
        **variables: Any,
    ) -> Iterator[Event]:
        """The decoding of an answer. `variables` are what the template knows beside: tools, enable_thinking.

        Raises: as `chat`, at once.
        """
        if sampling.n > 1 or sampling.best_of is not None:
            raise UserError("a conversation has one answer: n and best_of are for generate and complete")
        prompt = self.chat_template.encode(messages, **variables)
        if len(prompt) > self.config.max_seq_len:
            raise UserError(
                f"the conversation has {len(prompt)} tokens, more than the model's context of "
                f"{self.config.max_seq_len}: begin a new one, or leave old messages out"
            )
        return decode(
            self.decoder,
            self.tokenizer,
            [prompt],
            [sampling],
            eos_ids=self.eos_ids | self.chat_template.end_ids,
            excluded=self._excluded,
            begins_text=True,
            kv_dtype=kv_dtype,
            **self._speculation(speculative, draft),
        )

    def engine(self, **options: Any) -> Engine:
        """An engine for many requests at once, with this model's ends of texts. `options` are those of `Engine`."""
        return Engine(self.decoder, self.tokenizer, **{"eos_ids": self.eos_ids, "excluded": self._excluded, **options})

    def events(
        self,
        prompts: Sequence[str],
        sampling: Sampling,
        *,
        truncate: Literal["left"] | None = None,
        prefix_embeddings: Tensor | None = None,
        prefix_lm: bool = False,
        speculative: Literal["prompt_lookup"] | None = None,
        draft: LanguageModel | None = None,
        at_context: Literal["stop", "roll"] = "stop",
        n_keep: int = 0,
        kv_dtype: KVDtype | None = None,
    ) -> Iterator[Event]:
        """The decoding itself: an event a token, with the reason where a sample ends.

        Sample i of prompt p is row p · n + i. It has the seed that `sampling.seeded(i)` says, whatever else is in the
        batch. With best_of there are as many as that in n's place. A row whose reason is an error leaves the others
        alone; the error is raised behind the last event. Raises: as `complete`, at once.
        """
        ids, samplings = self._samples(prompts, sampling)
        how = {
            "at_context": at_context,
            "n_keep": n_keep,
            "kv_dtype": kv_dtype,
            **self._speculation(speculative, draft),
        }
        return self._decode(ids, samplings, truncate, prefix_embeddings, prefix_lm, how)

    def _samples(self, prompts: Sequence[str], sampling: Sampling) -> tuple[list[list[int]], list[Sampling]]:
        """The ids and the settings of each row."""
        n = sampling.n if sampling.best_of is None else sampling.best_of
        if sampling.best_of is not None and sampling.logprobs is None:
            sampling = dataclasses.replace(sampling, logprobs=0)
        ids, samplings = [], []
        for encoded in _of_each(prompts, self._encode):
            ids += [encoded] * n
            first = sampling.seeded()
            samplings += [first.seeded(i) for i in range(n)]
        return ids, samplings

    def _decode(
        self,
        ids: Sequence[list[int]],
        samplings: Sequence[Sampling],
        truncate: Literal["left"] | None,
        prefix_embeddings: Tensor | None,
        prefix_lm: bool,
        how: Mapping[str, Any],
    ) -> Iterator[Event]:
        n = samplings[0].best_of or samplings[0].n if samplings else 1
        vectors = _one_for_each(prefix_embeddings, len(ids) // n)
        return decode(
            self.decoder,
            self.tokenizer,
            ids,
            samplings,
            eos_ids=self.eos_ids,
            excluded=self._excluded,
            truncate=truncate,
            prefix_embeddings=[vector for vector in vectors if vector is not None for _ in range(n)],
            prefix_lm=prefix_lm,
            n=n,
            **how,
        )

    def _with_prompt_logprobs(self, completed: Sequence[Completion], top: int) -> list[Completion]:
        """The prompt that all of them have is read as `score` reads a text, once."""
        if all(each.error is not None for each in completed):
            return list(completed)
        windows = _windows([(list(completed[0].prompt_ids), True)], self.config.max_seq_len, self._stride())
        of_windows = self._scored(windows, lambda logits, wanted: token_logprobs(logits, wanted.tolist(), top))
        known = tuple(each for _, logprobs in of_windows for each in logprobs)
        return [dataclasses.replace(each, prompt_logprobs=known) for each in completed]

    def _speculation(self, speculative: str | None, draft: LanguageModel | None) -> dict[str, Any]:
        """What `decode` is to be called with. Raises: UserError."""
        if speculative not in (None, "prompt_lookup"):
            raise UserError(
                f"speculative is {speculative!r}: only 'prompt_lookup' is possible, or a draft model (draft)"
            )
        if speculative is not None and draft is not None:
            raise UserError("speculative and draft are both given: tokens are guessed in one way or the other")
        if draft is not None and draft.tokenizer.fingerprint() != self.tokenizer.fingerprint():
            raise UserError(
                f"the draft has another tokenizer ({draft.tokenizer.kind}, {draft.tokenizer.vocab_size:,} tokens) than "
                f"the model ({self.tokenizer.kind}, {self.tokenizer.vocab_size:,}): both must be the same"
            )
        if speculative is None and draft is None:
            return {}
        decoder = None if draft is None else draft.decoder
        speculator = Speculator(self.config.vocab_size, decoder, excluded=self._excluded)
        return {"speculator": speculator, "speculative": speculative or "draft"}

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
                last = last_hidden(self.decoder, padded.to(self.decoder.device), lengths)
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

    # ---- looking inside (docs/inspection.md)

    def record(self, *names: str, limit_bytes: int = LIMIT_BYTES) -> AbstractContextManager[Recording]:
        """See `inspection.record.record`: `with model.record("attn.weights") as rec: model.score(text)`."""
        return record(self.decoder, *names, limit_bytes=limit_bytes)

    def patch(self, edits: Mapping[str, Any], **where: Any) -> AbstractContextManager[None]:
        """See `inspection.interventions.patch`: `with model.patch({"layers.3.attn.out": tensor}): …`."""
        return interventions.patch(self.decoder, edits, **where)

    def ablate(self, name: str, **what: Any) -> AbstractContextManager[None]:
        """See `inspection.interventions.ablate`: `with model.ablate("layers.2.attn.heads", heads=[1]): …`."""
        return interventions.ablate(self.decoder, name, **what)

    def steer(self, name: str, vector: Tensor, **how: Any) -> AbstractContextManager[None]:
        """See `inspection.interventions.steer`: `with model.steer("layers.4.resid.post", vector, scale=3.0): …`."""
        return interventions.steer(self.decoder, name, vector, **how)

    def remask(self, **rules: Any) -> AbstractContextManager[None]:
        """See `inspection.interventions.remask`: `with model.remask(window=4): …`."""
        return interventions.remask(self.decoder, **rules)

    # ---- inside

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

    def _fitting(self, prompt: str) -> list[int]:
        """The ids of a prompt that is read whole."""
        ids = self._encode(prompt)
        if not 0 < len(ids) <= self.config.max_seq_len:
            raise UserError(
                f"the prompt has {len(ids)} tokens, none or more than the model's context of "
                f"{self.config.max_seq_len}: shorten it"
            )
        return checked_ids(ids, self.config.vocab_size)

    def _logprobs(self, windows: Iterable[_Window]) -> Iterator[tuple[list[int], list[float]]]:
        """The ids that each window scores, and their log-probabilities."""
        return self._scored(windows, _logprobs_of)

    def _scored(
        self, windows: Iterable[_Window], look: Callable[[Tensor, Tensor], list[_Seen]]
    ) -> Iterator[tuple[list[int], list[_Seen]]]:
        """The ids that each window scores, and what `look` sees of them in logits [T, V], at those ids [T]."""
        device = self.decoder.device
        for batch in _batches(windows):
            longest = max(len(ids) for ids, _ in batch) - 1
            inputs = torch.tensor([ids[:-1] + [0] * (longest + 1 - len(ids)) for ids, _ in batch], device=device)
            scored = [ids[1 + known :] for ids, known in batch]
            targets = torch.tensor([target for ids in scored for target in ids], device=device)
            seen: list[_Seen] = []
            with torch.inference_mode():
                hidden = self.decoder.hidden(inputs)  # [B, T, D]
                kept = torch.cat([hidden[row, known : len(ids) - 1] for row, (ids, known) in enumerate(batch)])
                parts = zip(kept.split(_SCORED_AT_ONCE), targets.split(_SCORED_AT_ONCE), strict=True)
                for part, wanted in parts:
                    seen += look(self.decoder.logits(part).float(), wanted)
            start = 0
            for ids in scored:
                yield ids, seen[start : start + len(ids)]
                start += len(ids)

    @functools.cached_property
    def _n_bytes(self) -> Callable[[int], int]:
        """Bytes of text that an id stands for, remembered."""
        return functools.cache(lambda token_id: len(self.tokenizer.token_bytes(token_id)))

    @functools.cached_property
    def _excluded(self) -> Tensor | None:
        """[V], True for ids that stand for no text: vocabularies are padded, and some have holes. Never sampled."""
        size = self.config.vocab_size
        holes = sorted(self.tokenizer.holes.union(range(self.tokenizer.vocab_size, size)).intersection(range(size)))
        if not holes:
            return None
        excluded = torch.zeros(size, dtype=torch.bool, device=self.decoder.device)
        excluded[holes] = True
        return excluded


def _logprobs_of(logits: Tensor, wanted: Tensor) -> list[float]:
    found: list[float] = logits.log_softmax(dim=-1).gather(1, wanted[:, None])[:, 0].tolist()
    return found


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


def _of_each(prompts: Sequence[str], ids_of: Callable[[str], list[int]]) -> list[list[int]]:
    """Raises: UserError, which says which prompt's it is."""
    found = []
    for i, prompt in enumerate(prompts):
        try:
            found.append(ids_of(prompt))
        except UserError as error:
            raise UserError(of_row(i, len(prompts), str(error), "prompt")) from None
    return found


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
