"""Output that follows a JSON schema, a regular expression, a list of choices or a grammar, token by token.

Grammars belong to the `llguidance` library; here is what it leaves open: our vocabularies as the bytes that each id
stands for, what ends an output, going back over tokens that were only proposed, and errors of one line. A token may be
chosen if the text so far and its bytes are the beginning of a text that the constraint allows: every such token, and no
other one, so that a model's own probabilities decide between them.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from leftward.errors import UserError, missing_extra, printable
from leftward.generation.settings import CONSTRAINTS, Sampling
from leftward.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Between the parts of JSON: nothing, a space, or a new line with its indentation. Without a bound, a model that is
# unsure writes spaces for ever.
_JSON_SPACE = r"( |\n[ \t]{0,32})?"
# The library would tokenise in its own way what the grammar leaves no choice about.
_EVERY_DIVISION = '\n%llguidance {"no_forcing": true}'


_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class Matcher:
    """Where one output stands in what it may be.

    Its first `accept` is the first token of the output. What was accepted can be taken back.
    """

    def __init__(self, vocabulary: _Vocabulary, start: LLMatcher, end_ids: Collection[int], begins_text: bool) -> None:
        self._vocabulary = vocabulary
        self._start = start  # stays as it is
        self._end_ids = [token_id for token_id in end_ids if token_id < vocabulary.size]
        self._first = vocabulary.first if begins_text else {}
        self._accepted: list[int] = []
        self._restore()

    def allowed(self) -> Tensor:
        """[V], True for the tokens that may come next; those that end the output only where it is complete."""
        return self._allowed

    @property
    def is_over(self) -> bool:
        """Whether the output is complete and nothing but its end can follow."""
        return self._is_complete and self._is_closed

    def accept(self, token_id: int) -> None:
        """Go on behind a token that is allowed and doesn't end the output.

        Raises:
            UserError: it leads to where the vocabulary has no token for what must follow, or to more ways of reading
                the text than the library keeps. The matcher is where it was.
        """
        self._accepted.append(token_id)
        seen = self._seen(token_id, len(self._accepted) == 1)
        try:
            if seen is not None:
                self._matcher.consume_token(seen)
            self._look()
        except UserError:
            self._accepted.pop()
            self._restore()  # the library's matcher never leaves its error
            raise

    def rewind(self, n: int) -> None:
        """Take back the last n tokens."""
        if not n:
            return
        gone, self._accepted = self._accepted[-n:], self._accepted[:-n]
        n_seen = sum(self._seen(token_id, not self._accepted and i == 0) is not None for i, token_id in enumerate(gone))
        if n_seen:
            self._matcher.rollback(n_seen)
        self._look()

    def _seen(self, token_id: int, is_first: bool) -> int | None:
        """What the library is told of a token; None: nothing, since it shows nothing."""
        return self._first.get(token_id, token_id) if is_first else token_id

    def _restore(self) -> None:
        self._matcher = self._start.deep_copy()
        for i, token_id in enumerate(self._accepted):
            if (seen := self._seen(token_id, i == 0)) is not None:
                self._matcher.consume_token(seen)
        self._look()

    def _look(self) -> None:
        """Settle what may follow."""
        matcher = self._matcher
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            raise UserError(_dead_end(matcher, self._vocabulary.text(self._accepted)))
        self._allowed, self._is_complete, self._is_closed = self._vocabulary.read(
            bits, {} if self._accepted else self._first
        )
        self._allowed[self._end_ids] = self._is_complete


def matcher_of(
    sampling: Sampling, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int] = (), *, begins_text: bool
) -> Matcher | None:
    """What the settings demand of an output; None where they leave it free.

    Args:
        vocab_size: the model's, which may be larger than the tokenizer's.
        end_ids: tokens that end the output.
        begins_text: whether the space that the first word of a text is written with will be taken from the output.

    Raises:
        UserError: the library is not installed; the constraint is none, or too large; the tokenizer is of a kind that
            can't follow one, or can't write its beginning.
    """
    given = [(name, value) for name in CONSTRAINTS if (value := getattr(sampling, name)) is not None]
    if not given:
        return None
    ((name, value),) = given
    if tokenizer.drops_last_space:
        raise UserError(
            f"{name} is not possible with this tokenizer: it writes the end of a word as a space, which the last word "
            "of a text then loses"
        )
    vocabulary = _vocabulary(tokenizer, vocab_size)
    start = _compiled(vocabulary, name, value)
    return Matcher(vocabulary, start, end_ids, begins_text and tokenizer.drops_first_space)


class _Vocabulary:
    """A tokenizer's table id → bytes as the library has it.

    Behind the model's ids are one that stands for the end, whatever ends the output, and one for each token that begins
    with a space, without it: where a text begins, that space is not shown.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError:
            raise missing_extra("llguidance", "constrained", "constrained output") from None
        self.size = size
        self._tokenizer = tokenizer
        tokens = [_bytes_of(tokenizer, token_id) for token_id in range(size)]
        specials = {token_id for token_id in tokenizer.special_ids if token_id < size}
        spaced: list[int] = []
        if tokenizer.drops_first_space:
            spaced = [i for i, token in enumerate(tokens) if token.startswith(b" ") and i not in specials]
        self.first: dict[int, int | None] = {
            token_id: size + 1 + i if tokens[token_id] != b" " else None for i, token_id in enumerate(spaced)
        }
        table = SimpleNamespace(
            tokens=[*tokens, b"<end>", *(tokens[token_id][1:] for token_id in spaced)],
            eos_token_id=size,
            bos_token_id=None,
            special_token_ids=[*specials, size],
        )
        self.library: LLTokenizer = LLTokenizer(TokenizerWrapper(table))

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def read(self, bits: bytes, first: dict[int, int | None]) -> tuple[Tensor, bool, bool]:
        """The mask [V] that the library gives, whether the end is in it, and whether nothing else is."""
        unpacked = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little")
        allowed = unpacked[: self.size].astype(np.bool_)
        for token_id, seen in first.items():
            allowed[token_id] = seen is None or unpacked[seen]
        return torch.from_numpy(allowed), bool(unpacked[self.size]), not allowed.any()


@functools.lru_cache(maxsize=8)
def _vocabulary(tokenizer: Tokenizer, size: int) -> _Vocabulary:
    return _Vocabulary(tokenizer, size)


@functools.lru_cache(maxsize=64)
def _compiled(vocabulary: _Vocabulary, name: str, value: str | tuple[str, ...]) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    grammar = LLMatcher.grammar_from_lark(_lark(name, value) + _EVERY_DIVISION)
    matcher = LLMatcher(vocabulary.library, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        reason = _reason(matcher)
        if name != "grammar":  # which is the only one whose places the user knows
            reason = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", reason)
        raise UserError(f"{name} is not possible: {reason}")
    start = matcher.deep_copy()
    matcher.compute_bitmask()
    if matcher.is_error():
        raise UserError(f"{name} is not possible: {_dead_end(matcher, '')}")
    return start


def _lark(name: str, value: str | tuple[str, ...]) -> str:
    """The constraint as a grammar in the library's dialect of Lark."""
    if not isinstance(value, str):
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
    if name == "grammar":
        return _from_gbnf(value) if _GBNF_RULE.search(value) else value
    if name == "regex":
        from llguidance import regex_to_lark

        return f"start: /{regex_to_lark(value, 'd')}/"  # \d: what people mean by it, not every script's digits
    schema = json.loads(value)
    if schema is True:
        schema = {}
    if isinstance(schema, dict):
        options = schema.get("x-guidance", {})
        if isinstance(options, dict) and not options.keys() & {"whitespace_flexible", "whitespace_pattern"}:
            schema["x-guidance"] = {"whitespace_pattern": _JSON_SPACE} | options
    return f"start: %json {json.dumps(schema)}"


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # whatever its parser makes of a text that is none
        raise UserError(f"grammar is not possible: {printable(str(error), 200)}") from None


def _bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Nothing for the ids that only pad a vocabulary, which the library then never allows."""
    try:
        return tokenizer.token_bytes(token_id)
    except UserError:
        return b""


def _reason(matcher: LLMatcher) -> str:
    """The one line of the library's message that says what is wrong."""
    lines = [line.strip() for line in matcher.get_error().splitlines()]
    said = next((line for line in lines if line.startswith("error: ")), lines[0])
    return printable(said.removeprefix("error: "), 200)


def _dead_end(matcher: LLMatcher, text: str) -> str:
    where = f"behind {printable(text[-40:])!r}" if text else "at its beginning"
    if matcher.get_error().startswith("NoExtension"):
        return f"no token of the vocabulary can write what the constraint demands {where}"
    return f"the constraint can't be followed {where}: {_reason(matcher)}"
