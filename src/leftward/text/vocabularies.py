"""Learning a vocabulary from text: byte-level BPE, one token a character, or one token a word.

Training belongs to the `tokenizers` library; here is what it leaves open: sizes that suit the text, and vocabularies
that no text falls out of silently. Not here: encoding and decoding, which is tokenizer.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from leftward.errors import UserError
from leftward.text.decoding import BYTE_OF, word_decoder

SEPARATOR = "<|endoftext|>"
"""The default special token: stands before every document and after the last (GPT-2's name for it)."""

# A word carries the space before it, as in GPT-2's pattern; runs of other white space stand alone. Every character is
# in one of the four classes, so nothing is lost.
_WORD_PATTERN = r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+"
_MAX_WORDS = 16_384
_MAX_AUTOMATIC_BPE = 65_536
_MIN_AUTOMATIC_BPE = 512
# A pair that occurs once teaches nothing about any other text.
_MIN_PAIR_COUNT = 2


class Counted:
    """Documents on their way into training, checked and counted."""

    def __init__(self, documents: Iterable[str]) -> None:
        self._documents = documents
        self.bytes = 0

    def __iter__(self) -> Iterator[str]:
        for document in self._documents:
            self.bytes += len(encoded(document))
            yield document

    def check_not_empty(self) -> None:
        if not self.bytes:
            raise UserError("no text to train a tokenizer on")


def train_bpe(corpus: Counted, vocab_size: int | None, specials: list[str]) -> Any:
    """GPT-2's byte-level BPE: any text is bytes, and every byte has a token, so nothing is out of vocabulary."""
    alphabet = sorted(BYTE_OF)
    smallest = len(specials) + len(alphabet)
    if vocab_size is not None and vocab_size < smallest:
        raise UserError(
            f"vocab_size is {vocab_size}: a bpe tokenizer needs at least {smallest} (256 bytes and the special tokens)"
        )
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        # Merges are learned in order, so that a smaller vocabulary is the beginning of a larger one: without a size
        # asked for, learn many and keep what suits the size of the text, which is known only when it has been read.
        vocab_size=(vocab_size or _MAX_AUTOMATIC_BPE) - len(specials),
        min_frequency=_MIN_PAIR_COUNT,
        initial_alphabet=alphabet,
        special_tokens=[],
        show_progress=False,
    )
    # The library's time grows with the square of a run without spaces (base64, DNA): it learns as much from pieces.
    pieces = (re.sub(r"(\S{256})(?=\S)", r"\1\n", document) for document in corpus)
    library.train_from_iterator(pieces, trainer=trainer)
    corpus.check_not_empty()
    learned = json.loads(library.model.__getstate__())
    if vocab_size is None:
        suited = 2 ** round(math.log2(3 * corpus.bytes**0.5))
        size = min(max(suited, _MIN_AUTOMATIC_BPE), _MAX_AUTOMATIC_BPE)
    else:
        size = vocab_size
        _check_supported(vocab_size, len(learned["vocab"]) + len(specials), corpus.bytes)
    vocabulary, merges = {token: i for i, token in enumerate([*specials, *alphabet])}, []
    _check_specials(specials, learned["vocab"])
    for left, right in learned["merges"]:
        if len(vocabulary) >= size:
            break
        vocabulary.setdefault(left + right, len(vocabulary))
        merges.append((left, right))
    library.model = models.BPE(vocab=vocabulary, merges=merges)
    library.decoder = decoders.ByteLevel()
    return library


def train_char(corpus: Counted, vocab_size: int | None, specials: list[str]) -> Any:
    """One id a character, in the order of code points: a BPE that never merges."""
    seen: set[str] = set()
    for document in corpus:
        seen.update(document)
    corpus.check_not_empty()
    _check_specials(specials, seen)
    vocabulary = {token: i for i, token in enumerate([*specials, *sorted(seen)])}
    if vocab_size is not None:
        _check_supported(vocab_size, len(vocabulary), corpus.bytes)
        if vocab_size < len(vocabulary):
            raise UserError(
                f"vocab_size is {vocab_size}, but the text has {len(seen)} different characters: with the special "
                f"tokens that takes {len(vocabulary)}; leave vocab_size out"
            )
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.decoder = decoders.Fuse()
    return library


def train_word(corpus: Counted, vocab_size: int | None, specials: list[str], byte_fallback: bool) -> Any:
    """One id a word, the most frequent first: a BPE that takes whole words and never merges."""
    library = tokenizers.Tokenizer(models.WordLevel())
    # Every word begins with its space, the first one of a text too, so that a word is one token wherever it stands.
    library.normalizer = normalizers.Prepend(" ")
    library.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_WORD_PATTERN), "isolated")
    for special in specials:
        if len(library.pre_tokenizer.pre_tokenize_str(special)) == 1:
            raise UserError(f"the special token {special!r} looks like a word of the text: write it like {SEPARATOR}")
    trainer = trainers.WordLevelTrainer(vocab_size=2**31, min_frequency=0, special_tokens=[], show_progress=False)
    library.train_from_iterator(iter(corpus), trainer=trainer)
    corpus.check_not_empty()
    ranks = library.get_vocab(with_added_tokens=False)
    words = sorted(ranks, key=ranks.__getitem__)
    fixed = [*specials, *(f"<0x{b:02X}>" for b in range(256) if byte_fallback)]
    if vocab_size is not None:
        _check_supported(vocab_size, len(fixed) + len(words), corpus.bytes)
        if vocab_size <= len(fixed):
            raise UserError(
                f"vocab_size is {vocab_size}, but special tokens and bytes alone take {len(fixed)}: raise it, "
                "or leave it out"
            )
        if vocab_size < len(fixed) + len(words) and not byte_fallback:
            raise UserError(
                f"vocab_size is {vocab_size}, but the text has {len(words)} different words and without "
                "byte_fallback all must be in the vocabulary: leave vocab_size out, or set byte_fallback"
            )
        words = words[: vocab_size - len(fixed)]
    elif byte_fallback:
        words = words[:_MAX_WORDS]
    vocabulary = {token: i for i, token in enumerate([*fixed, *words])}
    library.model = models.BPE(vocab=vocabulary, merges=[], ignore_merges=True, byte_fallback=byte_fallback)
    library.decoder = word_decoder()
    return library


def _check_supported(vocab_size: int, supported: int, corpus_bytes: int) -> None:
    if vocab_size > supported:
        raise UserError(
            f"vocab_size is {vocab_size}, larger than the corpus supports: its {corpus_bytes:,} bytes give {supported} "
            "tokens; lower vocab_size, leave it out, or add text"
        )


def _check_specials(specials: list[str], ordinary: Iterable[str]) -> None:
    """A special token that is also an ordinary one could be written by any text."""
    if clash := set(specials) & set(ordinary):
        raise UserError(f"the special token {min(clash)!r} is also an ordinary token: write it like {SEPARATOR}")


def encoded(text: str, encoding: str = "utf-8") -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise UserError(f"the text holds half a surrogate pair ({half}), which is no character: remove it") from None
