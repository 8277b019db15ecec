"""A request, what comes of it, and the state of one that is being worked on: its tokens, random numbers and text."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from leftward.config import Config
from leftward.errors import UserError
from leftward.generation.constrained import matcher_of
from leftward.generation.prefixes import Node
from leftward.generation.rules import Bans, Guess, Row
from leftward.generation.sampling import Choice, TokenLogprobs
from leftward.generation.settings import Sampling
from leftward.generation.speculative import Speculation
from leftward.model.cache import KVCache
from leftward.text.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "context", "error"]
"""stop: an end-of-text token or a stop text. length: max_tokens. context: prompt and output fill max_seq_len, or the
most that the memory for keys and values holds of one sequence. error: there was no next token; `Event.message` says
why."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """Continue a prompt."""

    ids: Sequence[int]
    """The prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    eos_ids: Collection[int] | None = None
    """Tokens that end it; they are not shown. None: the engine's."""
    truncate: Literal["left"] | None = None
    """"left" drops the beginning of a prompt that is longer than the context."""
    at_context: Literal["stop", "roll"] = "stop"
    """When prompt and output fill the context: stop, or drop the older half of it but for the first `n_keep` tokens,
    read the rest anew from place 0, and go on. What is written then has seen the kept tokens only."""
    n_keep: int = 0
    """Tokens from the beginning on that "roll" never drops."""
    begins_text: bool = False
    """The output is a text of its own, an answer, so that the space that some tokenizers write a first word with is not
    shown."""
    prefix_embeddings: Tensor | None = None
    """[P, d_model], in front of the prompt."""
    prefix_lm: bool = False
    """What is in front and the prompt see each other whole, as in the training of a prefix-LM."""
    speculative: Speculation | None = None
    """How the engine's speculator guesses next tokens. None: not at all."""


@dataclass(frozen=True, slots=True)
class Event:
    """One step of one sequence."""

    row: int
    """The request's number: how many were submitted to the engine before it."""
    token_id: int | None
    """None where a sequence ends without a token: there was no room for one, or nothing to choose."""
    text: str
    """What may be shown now: never half a character, never a part of a stop text. The texts of a row join to its
    whole output."""
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    """Of the token, where the row's sampling asks for them."""
    message: str | None = None
    """One line, where the reason is an error."""
    n_guessed: int = 0
    """At the end of a sequence: tokens that were guessed for it (speculative.py) and read,"""
    n_accepted: int = 0
    """and how many of them it has."""


class StopScanner:
    """Holds back what may be the beginning of a stop text, and cuts where one is complete.

    The text that is complete first wins, and of two that end together the longer one; where the pieces of the text
    begin and end makes no difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, piece: str, *, may_end: bool = True) -> tuple[str, bool]:
        """What may be shown now, and whether a stop text is complete. One that is complete where the text must not end
        yet is text; the beginning of one still counts."""
        if not self._stops:
            return piece, False
        text, known = self._held + piece, len(self._held)
        found = [
            (start + len(stop), start)
            for stop in self._stops
            if may_end and (start := text.find(stop, max(0, known - len(stop) + 1))) >= 0  # complete only now
        ]
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


class Job:
    """A request on its way.

    `context` is what the cache holds or is going to hold, `n_read` of it so far. Its first `n_chunked` tokens are read
    in chunks, the others one by one, as they were when they were chosen: a job that was put off and lost its memory
    reads all again and gets the same numbers.
    """

    def __init__(
        self, number: int, request: Request, tokenizer: Tokenizer, config: Config, eos_ids: Collection[int], limit: int
    ) -> None:
        """`limit`: tokens of prompt and output at most, prefix_embeddings counted.

        Raises: UserError: the request can't be served.
        """
        sampling = request.sampling
        self.number, self.request, self.sampling = number, request, sampling
        self.n_before = _n_before(request, config, limit)
        self.limit = limit - self.n_before
        _check_policy(request, self.limit)
        bound = "the model's context of" if limit == config.max_seq_len else "what kv_bytes holds of one sequence,"
        self.context = checked_ids(_fitting(request, self.limit, bound), config.vocab_size)
        eos_ids = eos_ids if request.eos_ids is None else request.eos_ids
        self.bans = Bans.of(sampling, tokenizer, config.vocab_size, eos_ids)
        self.ids = list(self.context)  # and the output so far, whatever is dropped from the context
        self.n_prompt = self.n_chunked = len(self.ids)
        self.random = random.Random(sampling.seeded().seed)
        self._draw: float | None = None
        room = sampling.max_tokens if request.at_context == "roll" else self.limit - len(self.ids)
        self.left = min(sampling.max_tokens, room)  # tokens
        self.end: FinishReason = "length" if sampling.max_tokens <= room else "context"
        self.pieces = tokenizer.stream_decoder(self.context)
        begins_text = request.begins_text or self.pieces.drops_space
        self.matcher = matcher_of(sampling, tokenizer, config.vocab_size, self.bans.end_ids, begins_text=begins_text)
        if self.matcher is not None and self.matcher.is_over:  # what is demanded is an empty text
            self.left, self.end = 0, "stop"
        self.scanner = StopScanner(sampling.stop)
        self.drops_space = request.begins_text and tokenizer.drops_first_space
        self.special = _special(request)
        """What a prompt's numbers follow from beside its tokens. Such a prompt is one chunk, read by itself."""
        self.has_rolled = False
        self.cache: KVCache | None = None
        self.node: Node | None = None
        """Where in the tree of known beginnings what is read ends; None: outside of it."""
        self.guesses: list[Guess] = []
        """Tokens that were read with the last one of the context, in case they come next,"""
        self.n_right = 0
        """and how many of them did."""
        self.n_guessed = self.n_accepted = 0
        """Of the whole output."""
        self.roll_if_full()

    @property
    def n_read(self) -> int:
        """Tokens of the context that the cache holds."""
        return 0 if self.cache is None else max(0, self.cache.lengths[0] - self.n_before)

    @property
    def is_chunked(self) -> bool:
        """Whether what it reads next is a chunk."""
        return self.n_read < self.n_chunked

    @property
    def places(self) -> int:
        """That its cache needs for the context and the token behind it."""
        return min(self.n_before + len(self.context) + 1, self.most_places)

    @property
    def most_places(self) -> int:
        """That its cache can ever need: the last token is not read."""
        return self.n_before + min(self.limit - 1, len(self.context) + self.left - 1)

    @property
    def guess(self) -> Guess | None:
        """For its next token."""
        return self.guesses[self.n_right] if self.n_right < len(self.guesses) else None

    def next(self) -> Row:
        """What the choice of its next token needs to know."""
        return Row(
            sampling=self.sampling,
            ids=self.ids,
            n_prompt=self.n_prompt,
            draw=self._drawn(),
            bans=self.bans,
            guess=self.guess,
        )

    def _drawn(self) -> float:
        """The random number of the next token: the same, where a choice was broken off."""
        if self._draw is None:
            self._draw = self.random.random()
        return self._draw

    def take(self, choice: Choice) -> Event:
        """Go on with the token that was chosen, or end without one. The job has ended where the event has a reason."""
        self._draw = None
        if choice.token_id is None:
            return self._fail(f"{choice.error}")
        token_id = choice.token_id
        ends = token_id in self.bans.end_ids
        if self.matcher is not None and not ends:
            try:
                self.matcher.accept(token_id)
            except UserError as error:
                return self._fail(str(error))
        if self.guess is not None and self.guess.token_id == token_id:
            self.n_right += 1
            self.n_accepted += 1
        self.ids.append(token_id)
        self.context.append(token_id)
        self.left -= 1
        may_end = len(self.ids) - self.n_prompt > self.sampling.min_tokens
        text, stopped = "", False
        reason: FinishReason | None = None
        if not ends:
            text, stopped = self.scanner.feed(self.pieces.feed(token_id), may_end=may_end)
            ends = self.matcher is not None and self.matcher.is_over
        if stopped:
            reason = "stop"
        elif ends or self.left == 0:
            # An incomplete character may complete a stop text, as U+FFFD.
            rest, stopped = self.scanner.feed(self.pieces.flush(), may_end=may_end)
            text += rest + self.scanner.flush()
            reason = self.end if self.left == 0 and not (ends or stopped) else "stop"
        return self._event(token_id, text, reason, logprobs=choice.logprobs)

    def roll_if_full(self) -> bool:
        """Drop the older half of a context that is full, where the request says so; what is kept is read anew."""
        if self.request.at_context != "roll" or len(self.context) < self.limit:
            return False
        n_keep = self.request.n_keep
        n_last = (self.limit - n_keep) // 2
        self.context = self.context[:n_keep] + self.context[len(self.context) - n_last :]
        self.n_chunked = len(self.context)
        self.has_rolled = True
        return True

    def _fail(self, message: str) -> Event:
        return self._event(None, self.scanner.flush(), "error", message=message)

    def _event(self, token_id: int | None, text: str, reason: FinishReason | None, **more: Any) -> Event:
        if reason is not None:
            more |= {"n_guessed": self.n_guessed, "n_accepted": self.n_accepted}
        return Event(self.number, token_id, self._shown(text), reason, **more)

    def _shown(self, text: str) -> str:
        if self.drops_space and text:
            self.drops_space = False
            return text.removeprefix(" ")
        return text


def checked_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """Whole numbers of any kind, numpy's and torch's too, as a list of Python's."""
    try:
        checked = list(map(operator.index, ids))
    except TypeError:
        raise UserError("a prompt must be token ids, which are whole numbers") from None
    if not 0 <= min(checked) <= max(checked) < vocab_size:
        wrong = next(token_id for token_id in checked if not 0 <= token_id < vocab_size)
        raise UserError(f"token id {wrong} is not in the model's vocabulary of {vocab_size} (ids from 0)")
    return checked


def _fitting(request: Request, limit: int, bound: str) -> Sequence[int]:
    prompt, max_tokens = request.ids, request.sampling.max_tokens
    if not len(prompt):
        raise UserError("the prompt is empty, and the tokenizer has no token that begins a text: give it some text")
    if len(prompt) <= limit:
        return prompt
    if request.truncate is None:
        raise UserError(
            f"the prompt has {len(prompt)} tokens, more than {bound} {limit}: shorten it, "
            "or drop its beginning (--truncate left; truncate='left' in Python)"
        )
    # At least half of the context stays prompt, however much is asked for.
    return prompt[-(limit - min(max_tokens, limit // 2)) :]


def _check_policy(request: Request, limit: int) -> None:
    if request.at_context not in ("stop", "roll"):
        raise UserError(f"at_context is {request.at_context!r}: it must be 'stop' or 'roll'")
    if request.truncate not in (None, "left"):
        raise UserError(f"truncate is {request.truncate!r}: only 'left' is possible")
    if type(request.n_keep) is not int or not 0 <= request.n_keep <= limit // 2:
        raise UserError(
            f"n_keep is {request.n_keep!r}: it must be a whole number from 0 to half of the context, {limit // 2}"
        )
    if request.at_context == "roll" and (request.prefix_embeddings is not None or request.prefix_lm or limit < 2):
        raise UserError("a context of one token, with prefix_embeddings, or of a prefix-LM can't roll")


def _n_before(request: Request, config: Config, limit: int) -> int:
    """How many vectors there are in front of the prompt."""
    vectors = request.prefix_embeddings
    if vectors is None:
        return 0
    if vectors.ndim != 2 or vectors.shape[1] != config.d_model:
        raise UserError(
            f"prefix_embeddings have the shape {list(vectors.shape)}: a prompt needs vectors of {config.d_model}, as "
            f"[P, {config.d_model}]"
        )
    if len(vectors) >= limit:
        raise UserError(f"{len(vectors)} prefix_embeddings leave no room in the model's context of {limit}")
    return len(vectors)


def _special(request: Request) -> Hashable:
    vectors = request.prefix_embeddings
    if vectors is None:
        return "prefix_lm" if request.prefix_lm else None
    numbers = vectors.detach().float().cpu().contiguous().numpy().tobytes()
    return request.prefix_lm, len(vectors), hashlib.blake2b(numbers).digest()
