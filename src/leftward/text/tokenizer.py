"""Text to token ids and back: byte-level BPE, one id a character, or one id a word, all as one tokenizer.json.

Training and encoding belong to the `tokenizers` library; here is what it leaves open: vocabularies that no text falls
out of silently, control tokens that user text cannot smuggle in, and a decoder that streams. Decoding is one mechanism
for every kind: each id stands for some bytes, and the bytes of all ids together are UTF-8. Not here: chat templates.
"""

from __future__ import annotations

import codecs
import copy
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from leftward import files
from leftward.errors import UserError, nearest

Kind = Literal["bpe", "char", "word"]
KINDS: tuple[Kind, ...] = ("bpe", "char", "word")
SEPARATOR = "<|endoftext|>"
"""The default special token: stands before every document and after the last (GPT-2's name for it)."""

# A word carries the space before it, as in GPT-2's pattern; runs of other white space stand alone. Every character is
# in one of the four classes, so nothing is lost.
_WORD_PATTERN = r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+"
_MAX_WORDS = 16_384
_MAX_VOCAB_SIZE = 10_000_000  # the library takes memory for what is asked before it learns whether the text has it
_MAX_AUTOMATIC_BPE = 65_536
_MIN_AUTOMATIC_BPE = 512
# A pair that occurs once teaches nothing about any other text.
_MIN_PAIR_COUNT = 2
_NO_ID = 0xFFFFFFFF


class Tokenizer:
    """A vocabulary with its rules. Make one with `train` or `load`."""

    def __init__(self, library: Any, config: dict[str, Any]) -> None:
        """Wrap a `tokenizers.Tokenizer` and the contents of its tokenizer_config.json.

        Raises:
            UserError: the file decodes in a way that is not known here, or names a token that it doesn't hold.
        """
        # A file may carry the padding or truncation of somebody's last batch.
        library.no_padding()
        library.no_truncation()
        library.encode_special_tokens = True  # control tokens in plain text stay plain text
        self._library = library
        self._config = config
        self.kind: Kind = _kind_of(library)
        vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError("the vocabulary is empty")
        self.vocab_size: int = max(vocabulary.values()) + 1
        added = library.get_added_tokens_decoder()
        self.special_ids: tuple[int, ...] = tuple(sorted(i for i, token in added.items() if token.special))
        self._added = {i: token.content for i, token in added.items()}
        self.eos_id: int | None = self._named_id("eos_token", vocabulary)
        self.bos_id: int | None = self._named_id("bos_token", vocabulary)

    # ---- making one

    @classmethod
    def train(
        cls,
        documents: Iterable[str],
        *,
        kind: Kind = "bpe",
        vocab_size: int | None = None,
        special_tokens: Sequence[str] = (SEPARATOR,),
        byte_fallback: bool = True,
    ) -> Tokenizer:
        """Learn a vocabulary from `documents`, which are read once.

        Special tokens get the first ids; the first of them ends a document (eos) and starts one (bos). Without a
        `vocab_size`, bpe takes a power of two near 3·sqrt(bytes) and char every character; word takes the 16,384 most
        frequent words. `byte_fallback` gives a word tokenizer 256 tokens that spell what is no word of it.

        Raises:
            UserError: no text, or a vocab_size or special token that does not fit the text.
        """
        if kind not in KINDS:
            raise UserError(f"tokenizer kind is {kind!r}: {nearest(str(kind), KINDS)}")
        if isinstance(documents, str):  # which is an iterable too: of documents of one character
            documents = [documents]
        specials = list(special_tokens)
        if len(set(specials)) < len(specials) or "" in specials:
            raise UserError(f"special tokens must be different and not empty; they are {specials}")
        if vocab_size is not None and not 1 <= vocab_size <= _MAX_VOCAB_SIZE:
            raise UserError(f"vocab_size is {vocab_size}: it must be at least 1 and at most {_MAX_VOCAB_SIZE:,}")
        corpus = _Counted(documents)
        if kind == "bpe":
            library = _train_bpe(corpus, vocab_size, specials)
        elif kind == "char":
            library = _train_char(corpus, vocab_size, specials)
        else:
            library = _train_word(corpus, vocab_size, specials, byte_fallback)
        library.add_special_tokens(specials)
        separator = specials[0] if specials else None
        if separator is not None:  # for other programs: what `add_bos` does here
            bos = (separator, library.token_to_id(separator))
            library.post_processor = processors.TemplateProcessing(f"{separator} $A", special_tokens=[bos])
        return cls(library, {"eos_token": separator, "bos_token": separator})

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Read tokenizer.json and tokenizer_config.json, ours or another's byte-level BPE.

        Raises:
            UserError: a file is missing, damaged, or decodes in a way that is not known here.
        """
        path = Path(directory) / "tokenizer.json"
        files.read_json(path)  # names what is wrong with the file better than the library does
        config_path = path.with_name("tokenizer_config.json")
        config = files.read_json(config_path)
        if not isinstance(config, dict):
            raise UserError(f"{config_path} is damaged: it must hold an object")
        try:
            library = tokenizers.Tokenizer.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare Exceptions, and Rust panics that are not Exceptions
            raise UserError(f"{path} is damaged: {error}") from None
        try:
            return cls(library, config)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None

    def save(self, directory: Path | str, *, model_max_length: int | None = None) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer takes as they are."""
        directory = Path(directory)
        config = {
            # A file of ours says all there is to say, so the class is the one that adds no rules of its own.
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self._config,
            "clean_up_tokenization_spaces": False,
        }
        if model_max_length is not None:
            config["model_max_length"] = model_max_length
        with files.writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        files.write_text(directory / "tokenizer.json", self._library.to_str(pretty=True) + "\n")
        files.write_json(directory / "tokenizer_config.json", config)

    def fingerprint(self) -> str:
        """A hash of what the tokenizer does; equal for equal tokenizers, wherever they were saved."""
        content = json.loads(self._library.to_str())
        del content["post_processor"]  # adds tokens around a text; not used here, and transformers writes an empty one
        canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()

    # ---- text to ids

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        """The ids of `text`. Special tokens written in it are plain text unless `parse_special`.

        `add_bos` puts the bos token first, unless the parsed text already starts with it or there is none.

        Raises:
            UserError: the text holds what the vocabulary can't write, or half a surrogate pair.
        """
        ids: list[int]
        if not parse_special:
            ids = self.encode_batch([text])[0].tolist()
        elif self.kind == "bpe":
            self._check_bytes([text])
            ids = self._parsing.encode(text, add_special_tokens=False).ids
        else:
            ids = []
            for part in self._split_at_specials(text):
                special = self._special_texts.get(part)
                ids += self.encode(part) if special is None else [special]
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_batch(self, texts: Sequence[str], *, starts: Sequence[bool] | None = None) -> list[NDArray[np.uint32]]:
        """The ids of each text, on all cores. Special tokens written in a text are plain text.

        `starts` says which texts begin a document; one that doesn't continues what came before (it matters to a word
        tokenizer, where the first word of a text is given the space that it lacks).

        Raises:
            UserError: as for `encode`.
        """
        if self.kind == "char":
            return [self._encode_characters(text) for text in texts]
        self._check_bytes(texts)
        if self.kind == "word":
            begins = [True] * len(texts) if starts is None else starts
            texts = [" " + text if start and text else text for text, start in zip(texts, begins, strict=True)]
        encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        batch = [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        self._check_complete(texts, batch)
        return batch

    # ---- ids to text

    def token_bytes(self, token_id: int) -> bytes:
        """What one id stands for: a part of UTF-8 text, perhaps half a character.

        Raises:
            UserError: no such id (as with ids that only pad a model's vocabulary).
        """
        table = self._token_bytes
        data = table[token_id] if 0 <= token_id < len(table) else None
        if data is None:
            raise UserError(f"token id {token_id} is not in the vocabulary of {self.vocab_size} (ids from 0)")
        return data

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        decoder = self.stream_decoder(skip_special=skip_special)
        return "".join([decoder.feed(token_id) for token_id in ids]) + decoder.flush()

    def stream_decoder(self, context: Iterable[int] = (), *, skip_special: bool = True) -> StreamDecoder:
        """Decode ids one at a time; the pieces join to exactly what `decode` gives.

        `context` are ids that came before, such as a prompt: their text is not given again, but what follows continues
        it (a word tokenizer drops the space before a text's first word only).
        """
        decoder = StreamDecoder(self, skip_special)
        for token_id in context:
            decoder.feed(token_id)
        return decoder

    # ---- inside

    def _named_id(self, name: str, vocabulary: dict[str, int]) -> int | None:
        """The id of the eos or bos token that the configuration names, as a string or as an object."""
        token = self._config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if text is None:
            return None
        if not isinstance(text, str) or text not in vocabulary:
            raise UserError(f"the {name} {text!r} of tokenizer_config.json is not in the vocabulary")
        return vocabulary[text]

    @functools.cached_property
    def _special_texts(self) -> dict[str, int]:
        return {self._added[i]: i for i in self.special_ids}

    @functools.cached_property
    def _encoder(self) -> Any:
        """The library's tokenizer for parts of documents: a word tokenizer's normalizer would give each a space."""
        if self.kind != "word":
            return self._library
        library = copy.deepcopy(self._library)
        library.encode_special_tokens = True
        library.normalizer = None
        return library

    @functools.cached_property
    def _parsing(self) -> Any:
        """The same tokenizer, but it reads control tokens. A copy: the switch belongs to a whole library object."""
        library = copy.deepcopy(self._library)
        library.encode_special_tokens = False
        return library

    @functools.cached_property
    def _token_bytes(self) -> list[bytes | None]:
        """The bytes of every id; None for the holes that some vocabularies have."""
        table: list[bytes | None] = [None] * self.vocab_size
        for token, token_id in self._library.get_vocab(with_added_tokens=True).items():
            data = token.encode()
            if token_id not in self._added:
                if self.kind == "bpe" and all(symbol in _BYTE_OF for symbol in token):
                    data = bytes(_BYTE_OF[symbol] for symbol in token)
                elif self.kind == "word" and (code := re.fullmatch("<0x([0-9A-F]{2})>", token)):
                    data = bytes.fromhex(code[1])
            table[token_id] = data
        return table

    @functools.cached_property
    def _id_of_code_point(self) -> NDArray[np.uint32]:
        """A char tokenizer's id for each code point, up to its highest one; the last entry stands for all above."""
        vocabulary = self._library.get_vocab(with_added_tokens=False)
        codes = {ord(token): i for token, i in vocabulary.items() if len(token) == 1 and i not in self._added}
        table = np.full(max(codes, default=0) + 2, _NO_ID, dtype=np.uint32)
        table[list(codes)] = list(codes.values())
        return table

    def _encode_characters(self, text: str) -> NDArray[np.uint32]:
        codes = np.frombuffer(_encoded(text, "utf-32-le"), dtype="<u4")  # [characters]
        table = self._id_of_code_point
        ids: NDArray[np.uint32] = table[np.minimum(codes, len(table) - 1)]
        if (ids == _NO_ID).any():
            self._raise_unknown([chr(code) for code in codes[ids == _NO_ID][:1000]])
        return ids

    def _split_at_specials(self, text: str) -> list[str]:
        if not self._special_texts:
            return [text]
        longest_first = sorted(self._special_texts, key=len, reverse=True)
        return [part for part in re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if part]

    @functools.cached_property
    def _missing_bytes(self) -> frozenset[int]:
        """Bytes that a byte-level BPE of other origin has no token for: the library would drop them in silence."""
        if self.kind != "bpe":
            return frozenset()
        return frozenset(b for symbol, b in _BYTE_OF.items() if self._library.token_to_id(symbol) is None)

    def _check_bytes(self, texts: Sequence[str]) -> None:
        """Refuse what the library would drop, or refuse without saying why."""
        for text in texts:
            data = _encoded(text)
            if self._missing_bytes and not self._missing_bytes.isdisjoint(data):
                self._raise_unknown([c for c in text if not self._missing_bytes.isdisjoint(c.encode())])

    def _check_complete(self, texts: Sequence[str], batch: Sequence[NDArray[np.uint32]]) -> None:
        """Refuse text of which a closed word vocabulary has dropped something: the library does it in silence."""
        if self.kind != "word" or self._library.model.byte_fallback:
            return
        for text, ids in zip(texts, batch, strict=True):
            if sum(len(self.token_bytes(i)) for i in ids.tolist()) != len(text.encode()):
                words = [word for word, _ in self._encoder.pre_tokenizer.pre_tokenize_str(text)]
                self._raise_unknown([w.strip() or w for w in words if self._encoder.token_to_id(w) is None])

    def _raise_unknown(self, unknown: Sequence[str]) -> None:
        things = list(dict.fromkeys(unknown))
        unit = "word" if self.kind == "word" else "character"
        shown = ", ".join(repr(t) + (f" (U+{ord(t):04X})" if unit == "character" else "") for t in things[:5])
        remedy = "set byte_fallback, which spells any word" if unit == "word" else "kind bpe writes any text"
        raise UserError(
            f"the tokenizer's vocabulary lacks the {unit}{'s' if len(things) > 1 else ''} {shown}"
            f"{' and more' if len(things) > 5 else ''}: leave {'them' if len(things) > 1 else 'it'} out, "
            f"or train another tokenizer ({remedy})"
        )


class StreamDecoder:
    """Text from ids as they come. It never gives half a character: bytes wait until the rest of theirs arrives."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.special_ids) if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # The space that a word tokenizer gives to the first word of a text is taken away again.
        self._drop_space = tokenizer.kind == "word"

    def feed(self, token_id: int) -> str:
        """The text that one more id completes; often empty."""
        token_id = int(token_id)  # a numpy or torch number may be equal to an id and yet not be found in a set
        data = self._tokenizer.token_bytes(token_id)
        return "" if token_id in self._skipped else self._trim(self._decoder.decode(data))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, or nothing."""
        return self._trim(self._decoder.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


class _Counted:
    """Documents on their way into training, checked and counted."""

    def __init__(self, documents: Iterable[str]) -> None:
        self._documents = documents
        self.bytes = 0

    def __iter__(self) -> Iterator[str]:
        for document in self._documents:
            self.bytes += len(_encoded(document))
            yield document

    def check_not_empty(self) -> None:
        if not self.bytes:
            raise UserError("no text to train a tokenizer on")


def _train_bpe(corpus: _Counted, vocab_size: int | None, specials: list[str]) -> Any:
    """GPT-2's byte-level BPE: any text is bytes, and every byte has a token, so nothing is out of vocabulary."""
    alphabet = sorted(_BYTE_OF)
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


def _train_char(corpus: _Counted, vocab_size: int | None, specials: list[str]) -> Any:
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


def _train_word(corpus: _Counted, vocab_size: int | None, specials: list[str], byte_fallback: bool) -> Any:
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
    library.decoder = _word_decoder()
    return library


def _word_decoder() -> Any:
    return decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def _kind_of(library: Any) -> Kind:
    """Which kind a tokenizer.json is, by the way it decodes: that says what bytes a token stands for."""
    decoder = _state(library.decoder)
    steps = decoder.get("decoders", [decoder])
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return "bpe"
    if decoder == _state(decoders.Fuse()) and library.pre_tokenizer is None and library.normalizer is None:
        return "char"
    if decoder == _state(_word_decoder()) and _state(library.normalizer) == _state(normalizers.Prepend(" ")):
        return "word"
    names = " + ".join(str(step.get("type")) for step in steps)
    raise UserError(f"this tokenizer decodes with {names}, which is not supported yet; byte-level BPE is")


def _state(component: Any) -> dict[str, Any]:
    """A part of the library's pipeline as plain data."""
    state: dict[str, Any] = json.loads(component.__getstate__()) if component is not None else {}
    return state


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


def _encoded(text: str, encoding: str = "utf-8") -> bytes:
    try:
        return text.encode(encoding)
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise UserError(f"the text holds half a surrogate pair ({half}), which is no character: remove it") from None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where it is visible, else the next free one from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
