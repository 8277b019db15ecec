"""Text to token ids and back, for the vocabularies that are trained here and for everybody else's.

Encoding belongs to the `tokenizers` library; here is what it leaves open: control tokens that user text cannot smuggle
in, text that no vocabulary drops silently, and a decoder that streams. Decoding is one mechanism for every kind: each
id stands for some bytes, and the bytes of all ids together are UTF-8. Not here: training (vocabularies.py), other
programs' files (directory.py, foreign.py), chat templates (chat.py).
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import hashlib
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import normalizers, processors

from leftward import files
from leftward.errors import UserError, nearest, printable
from leftward.text import directory as model_directory
from leftward.text import foreign
from leftward.text.decoding import BYTE_OF, AnyKind, decoding_of, library_errors, state
from leftward.text.gguf_metadata import template_metadata, vocabulary_metadata
from leftward.text.vocabularies import SEPARATOR, Counted, encoded, train_bpe, train_char, train_word

Kind = Literal["bpe", "char", "word"]
"""What can be trained here."""
KINDS: tuple[Kind, ...] = ("bpe", "char", "word")

_MAX_VOCAB_SIZE = 10_000_000  # the library takes memory for what is asked before it learns whether the text has it
_NO_ID = 0xFFFFFFFF
_UNWRITABLE = "the tokenizer can't write this text"
_ONE_AT_A_TIME = threading.RLock()


class Tokenizer:
    """A vocabulary with its rules. Make one with `train`, `load` or one of the `from_…`."""

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
        self._decoding = decoding_of(library)
        self.kind: AnyKind = self._decoding.kind
        vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError("the vocabulary is empty")
        self.vocab_size: int = max(vocabulary.values()) + 1
        if self.vocab_size > _MAX_VOCAB_SIZE:  # an id of 2^32 - 1 would ask for a table of that many places
            raise UserError(f"a token has the id {self.vocab_size - 1}: the largest possible is {_MAX_VOCAB_SIZE - 1}")
        added = library.get_added_tokens_decoder()
        self.special_ids: tuple[int, ...] = tuple(sorted(i for i, token in added.items() if token.special))
        self._added = {i: token.content for i, token in added.items()}
        self.holes: frozenset[int] = frozenset(range(self.vocab_size)).difference(vocabulary.values())
        """Ids that stand for nothing: some vocabularies have such."""
        self._bytes: dict[int, bytes] = {}  # of ids that were asked for
        self.eos_id: int | None = self._named_id("eos_token", vocabulary)
        self.bos_id: int | None = self._named_id("bos_token", vocabulary)
        self.before, self.after = self._ends()

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
        corpus = Counted(documents)
        if kind == "bpe":
            library = train_bpe(corpus, vocab_size, specials)
        elif kind == "char":
            library = train_char(corpus, vocab_size, specials)
        else:
            library = train_word(corpus, vocab_size, specials, byte_fallback)
        library.add_special_tokens(specials)
        separator = specials[0] if specials else None
        if separator is not None:
            bos = (separator, library.token_to_id(separator))
            library.post_processor = processors.TemplateProcessing(f"{separator} $A", special_tokens=[bos])
        return cls(library, {"eos_token": separator, "bos_token": separator})

    @classmethod
    def load(cls, directory: Path | str) -> Tokenizer:
        """Read the tokenizer of a model directory: tokenizer.json, or tokenizer.model, or vocab.json and merges.txt.

        Raises:
            UserError: a file is missing, damaged, or decodes in a way that is not known here.
        """
        paths = model_directory.find(Path(directory)) or (Path(directory) / "tokenizer.json",)
        parts = model_directory.read(Path(directory))
        try:
            return cls(*parts)
        except UserError as error:
            raise UserError(f"{paths[0]}: {printable(str(error), 1000)}") from None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """What the metadata of a GGUF file describe: its keys and values as plain data. Raises: UserError."""
        return cls(*foreign.from_gguf(metadata))

    @classmethod
    def from_sentencepiece(cls, path: Path | str) -> Tokenizer:
        """A .model file, BPE or unigram. Raises: UserError."""
        return cls(*foreign.from_sentencepiece(Path(path)))

    @classmethod
    def from_tiktoken(cls, path: Path | str, pre: str, special_tokens: Mapping[str, int] | None = None) -> Tokenizer:
        """A .tiktoken file, with what it doesn't say: how text is cut into words, and the control tokens.

        `pre` names the cut as GGUF files do: gpt-2 (for r50k_base), llama-bpe (cl100k_base and Llama 3), qwen2, gpt-4o
        (o200k_base). Raises: UserError.
        """
        return cls(*foreign.from_tiktoken(Path(path), pre, special_tokens or {}))

    @classmethod
    def from_pieces(cls, pieces: Iterable[tuple[bytes, float]]) -> Tokenizer:
        """llama2.c's vocabulary: (text, score) for each id. Raises: UserError."""
        return cls(*foreign.from_pieces(pieces))

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

    def to_gguf(self, *, eot_id: int | None = None) -> dict[str, Any]:
        """The metadata of a GGUF file that describe it.

        `eot_id` is the token that ends a turn of a conversation, where that is not the one that ends a text.

        Raises: UserError: llama.cpp has no such tokenizer; gguf_metadata.py says which it has, and what they leave out.
        """
        metadata = vocabulary_metadata(json.loads(self._library.to_str()), self.kind)
        named = self.named_tokens
        ids = {
            name: self._library.token_to_id(named.get(f"{short}_token", ""))
            for name, short in foreign.SHORT_NAMES.items()
        }
        ids["unknown"] = self._unknown_id
        for name, around in (("bos", self.before), ("eos", self.after)):
            ids[name] = around[0] if ids[name] is None and around else ids[name]
            if around not in ([], [ids[name]]):
                place = "begins" if name == "bos" else "ends"
                raise UserError(
                    f"llama.cpp {place} a text with its {name} token only, and this tokenizer with {around}"
                )
            metadata[f"tokenizer.ggml.add_{name}_token"] = bool(around)
        if ids["eos"] is None:
            raise UserError(
                "llama.cpp takes a token of its own choice for the end of a text where none is named: name eos_token "
                "in tokenizer_config.json, or train the tokenizer with a special token"
            )
        ids["eot"] = None if eot_id == ids["eos"] else eot_id
        metadata |= {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items() if i is not None}
        return metadata | template_metadata(self.chat_template)

    def fingerprint(self) -> str:
        """A hash of what the tokenizer does; equal for equal tokenizers, wherever they were saved."""
        content = json.loads(self._library.to_str())
        del content["post_processor"]  # what comes before a text: transformers may write the same in another way
        canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()

    # ---- what its configuration says

    @property
    def chat_template(self) -> str | list[dict[str, str]] | None:
        """As in tokenizer_config.json: one text, or a list of named ones."""
        template: str | list[dict[str, str]] | None = self._config.get("chat_template")
        return template

    @property
    def named_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and their like, which chat templates may write."""
        tokens = {name: self._config.get(name) for name in model_directory.NAMED}
        texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    @property
    def drops_first_space(self) -> bool:
        """Whether the space of a text's first word was put there by encoding."""
        return self._decoding.drops_first_space

    @property
    def drops_last_space(self) -> bool:
        """Whether the end of a text's last word, spelled as a space, is not part of the text."""
        return self._decoding.drops_last_space

    # ---- text to ids

    def encode(
        self, text: str, *, parse_special: bool = False, add_bos: bool = False, add_eos: bool = False
    ) -> list[int]:
        """The ids of `text`. Special tokens written in it are plain text unless `parse_special`.

        `add_bos` puts what begins a text first where the tokenizer's own configuration does so, and `add_eos` what ends
        one behind it: never twice, where the parsed text already has it. An empty text begins in any case, if there is
        a bos token: a model needs something to continue.

        Raises:
            UserError: the text holds what the vocabulary can't write, or half a surrogate pair.
        """
        ids = self._parse(text) if parse_special else self.encode_batch([text])[0].tolist()
        return self._with_ends(ids, add_bos, add_eos)

    def encode_marked(self, text: str, mark: str, *, add_bos: bool = False) -> list[int]:
        """The ids of `text` without `mark`, with special tokens read wherever no mark stands in them.

        Raises: UserError, as for `encode`.
        """
        return self._with_ends(self._parse(text, mark), add_bos, False)

    def encode_batch(self, texts: Sequence[str], *, starts: Sequence[bool] | None = None) -> list[NDArray[np.uint32]]:
        """The ids of each text, on all cores. Special tokens written in a text are plain text.

        `starts` says which texts begin a document; one that doesn't continues what came before (it matters where the
        first word of a text is given the space that it lacks).

        Raises:
            UserError: as for `encode`.
        """
        if self.kind == "char":
            return [self._encode_characters(text) for text in texts]
        self._check_bytes(texts)
        begins = [True] * len(texts) if starts is None else starts
        batch: list[NDArray[np.uint32]] = [np.empty(0, dtype=np.uint32)] * len(texts)
        for begin in (True, False):
            places = [i for i, text in enumerate(texts) if text and bool(begins[i]) == begin]
            if not places:
                continue
            with library_errors(_UNWRITABLE), self._switched(continuing=not begin) as library:
                encodings = library.encode_batch_fast([texts[i] for i in places], add_special_tokens=False)
            for i, encoding in zip(places, encodings, strict=True):
                batch[i] = self._spelled(np.array(encoding.ids, dtype=np.uint32))
        self._check_complete(texts, batch)
        return batch

    # ---- ids to text

    def token_bytes(self, token_id: int) -> bytes:
        """What one id stands for: a part of UTF-8 text, perhaps half a character.

        Raises:
            UserError: no such id (as with ids that only pad a model's vocabulary).
        """
        data = self._bytes.get(token_id)
        if data is None:
            if not 0 <= token_id < self.vocab_size or token_id in self.holes:
                raise UserError(f"token id {token_id} is not in the vocabulary of {self.vocab_size} (ids from 0)")
            data = self._decoding.bytes_of(self._library.id_to_token(token_id), token_id in self._added)
            self._bytes[token_id] = data
        return data

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        decoder = self.stream_decoder(skip_special=skip_special)
        return "".join([decoder.feed(token_id) for token_id in ids]) + decoder.flush()

    def stream_decoder(self, context: Iterable[int] = (), *, skip_special: bool = True) -> StreamDecoder:
        """Decode ids one at a time; the pieces join to exactly what `decode` gives.

        `context` are ids that came before, such as a prompt: their text is not given again, but what follows continues
        it (the space before a text's first word is dropped, where it was put there by encoding).
        """
        decoder = StreamDecoder(self, skip_special)
        for token_id in context:
            decoder.feed(token_id)
        return decoder

    # ---- inside: what the configuration says

    def _named_id(self, name: str, vocabulary: dict[str, int]) -> int | None:
        """The id of the eos or bos token that the configuration names, as a string or as an object."""
        token = self._config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if text is None:
            return None
        if not isinstance(text, str) or text not in vocabulary:
            raise UserError(f"the {name} {text!r} of tokenizer_config.json is not in the vocabulary")
        return vocabulary[text]

    def _ends(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer's own configuration puts before a text and behind it.

        The file's rules count; add_bos_token and add_eos_token only where it has none, as in transformers.
        """
        if self._library.post_processor is None:
            wanted = (self._config.get(f"add_{name}_token") for name in ("bos", "eos"))
            ids = [i if flag else None for flag, i in zip(wanted, (self.bos_id, self.eos_id), strict=True)]
            foreign.add_ends(self._library, *(None if i is None else self._library.id_to_token(i) for i in ids))
        processor = state(self._library.post_processor)
        for step in processor.get("processors", [processor]):
            match step:
                case {"type": "TemplateProcessing", "single": single, "special_tokens": tokens}:
                    before: list[int] = []
                    after: list[int] = []
                    for part in single:
                        if "Sequence" in part:
                            before, after = after, []
                        elif (name := part["SpecialToken"]["id"]) in tokens:
                            after += tokens[name]["ids"]
                        else:
                            raise UserError(f"its post_processor names {printable(name)}, which it does not explain")
                    return before, after
                case {"type": "RobertaProcessing" | "BertProcessing", "cls": [_, first], "sep": [_, last]}:
                    return [first], [last]
        return [], []

    # ---- inside: text to ids

    @functools.cached_property
    def _special_texts(self) -> dict[str, int]:
        return {self._added[i]: i for i in self.special_ids}

    @functools.cached_property
    def _continuation(self) -> tuple[Any, Any] | None:
        """The normalizer and pre-tokenizer for text that continues another, whose first word is not given a space.

        None where that makes no difference.
        """
        normalizer, changed = _without_prefix(state(self._library.normalizer))
        pre_tokenizer, changed_too = _without_prefix(state(self._library.pre_tokenizer))
        if not (changed or changed_too):
            return None
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        parts = {"normalizer": normalizer or None, "pre_tokenizer": pre_tokenizer or None, "model": empty}
        rules = tokenizers.Tokenizer.from_str(json.dumps(parts))
        return rules.normalizer, rules.pre_tokenizer

    @contextlib.contextmanager
    def _switched(self, *, read_special: bool = False, mark: str = "", continuing: bool = False) -> Iterator[Any]:
        """The library's tokenizer while it reads control tokens (where no `mark` is in one), or continues a text.

        The switches belong to the whole object, and a copy of a large vocabulary takes seconds: so one at a time.
        """
        library = self._library
        with _ONE_AT_A_TIME:
            usual = library.normalizer, library.pre_tokenizer
            normalizer, pre_tokenizer = self._continuation or usual if continuing else usual
            early: list[Any] = []
            if mark:  # vanishes before words are cut, but after control tokens are looked for
                steps = [normalizers.Replace(mark, ""), *([] if normalizer is None else [normalizer])]
                normalizer = normalizers.Sequence(steps)
                added = library.get_added_tokens_decoder().values()
                early = [token for token in added if token.special and token.normalized]
            try:
                library.encode_special_tokens = not read_special
                if continuing or mark:
                    library.normalizer, library.pre_tokenizer = normalizer, pre_tokenizer
                _add_again(library, early, normalized=False)
                yield library
            finally:
                library.encode_special_tokens = True
                if continuing or mark:
                    library.normalizer, library.pre_tokenizer = usual
                _add_again(library, early, normalized=True)

    def _parse(self, text: str, mark: str = "") -> list[int]:
        """The ids of a text whose special tokens are read, except where a mark stands in one."""
        self._check_bytes([text.replace(mark, "") if mark else text])
        if self.kind in ("char", "word"):
            ids: list[int] = []
            for part in self._split_at_specials(text):
                special = self._special_texts.get(part)
                ids += self.encode(part.replace(mark, "") if mark else part) if special is None else [special]
            return ids
        mark = mark if mark and mark in text else ""
        with library_errors(_UNWRITABLE), self._switched(read_special=True, mark=mark) as library:
            found: list[int] = library.encode(text, add_special_tokens=False).ids
        return found

    def _with_ends(self, ids: list[int], add_bos: bool, add_eos: bool) -> list[int]:
        before = self.before or ([] if ids or self.bos_id is None else [self.bos_id])
        if add_bos and ids[: len(before)] != before:
            ids = before + ids
        if add_eos and ids[len(ids) - len(self.after) :] != self.after:
            ids = ids + self.after
        return ids

    @functools.cached_property
    def _is_special(self) -> NDArray[np.bool_]:
        """[vocab_size]"""
        table = np.zeros(self.vocab_size, dtype=np.bool_)
        table[list(self.special_ids)] = True
        return table

    def _spelled(self, ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """The ids of a plain text without control tokens, which some vocabularies make from the text that names them.

        Such a one is spelled character by character.
        """
        forged = self._is_special[ids]
        if not forged.any():
            return ids
        spelled: list[int] = []
        for token_id in ids.tolist():
            characters = list(self._added.get(token_id, "")) if self._is_special[token_id] else []
            if token_id == self._unknown_id or len(characters) <= 1:
                spelled.append(token_id)
                continue
            with self._switched(continuing=True) as library:
                for encoding in library.encode_batch_fast(characters, add_special_tokens=False):
                    spelled += encoding.ids
        return np.array(spelled, dtype=np.uint32)

    @functools.cached_property
    def _unknown_id(self) -> int | None:
        """What stands for text that the vocabulary can't write, where there is such a token."""
        model = self._library.model
        token = getattr(model, "unk_token", None) or self.named_tokens.get("unk_token")
        found: int | None = state(model).get("unk_id") if token is None else self._library.token_to_id(token)
        return found

    @functools.cached_property
    def _id_of_code_point(self) -> NDArray[np.uint32]:
        """A char tokenizer's id for each code point, up to its highest one; the last entry stands for all above."""
        vocabulary = self._library.get_vocab(with_added_tokens=False)
        codes = {ord(token): i for token, i in vocabulary.items() if len(token) == 1 and i not in self._added}
        table = np.full(max(codes, default=0) + 2, _NO_ID, dtype=np.uint32)
        table[list(codes)] = list(codes.values())
        return table

    def _encode_characters(self, text: str) -> NDArray[np.uint32]:
        codes = np.frombuffer(encoded(text, "utf-32-le"), dtype="<u4")  # [characters]
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
        return frozenset(b for symbol, b in BYTE_OF.items() if self._library.token_to_id(symbol) is None)

    def _check_bytes(self, texts: Sequence[str]) -> None:
        """Refuse what the library would drop, or refuse without saying why."""
        for text in texts:
            data = encoded(text)
            if self._missing_bytes and not self._missing_bytes.isdisjoint(data):
                self._raise_unknown([c for c in text if not self._missing_bytes.isdisjoint(c.encode())])

    @functools.cached_property
    def _drops(self) -> bool:
        """Whether the library drops in silence what the vocabulary can't write."""
        model = self._library.model
        return (
            self.kind != "bpe"
            and not getattr(model, "byte_fallback", True)
            and getattr(model, "unk_token", None) is None
        )

    def _check_complete(self, texts: Sequence[str], batch: Sequence[NDArray[np.uint32]]) -> None:
        """Refuse text of which a closed vocabulary has dropped something."""
        if not self._drops:
            return
        for text, ids in zip(texts, batch, strict=True):
            written = self.decode(ids.tolist(), skip_special=False)
            if len(written.strip()) != len(text.strip()):  # the first space may be one that encoding puts there
                cut = self._library.pre_tokenizer
                words = [word for word, _ in cut.pre_tokenize_str(text)] if self.kind == "word" else list(text)
                known = self._library.get_vocab()
                self._raise_unknown([w.strip() or w for w in words if w not in known and f" {w}" not in known])

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
        # The space that encoding gives to the first word of a text is taken away again.
        self._drop_space = tokenizer.drops_first_space
        self._hold_space = tokenizer._decoding.drops_last_space
        self._held = ""

    def feed(self, token_id: int) -> str:
        """The text that one more id completes; often empty."""
        token_id = int(token_id)  # a numpy or torch number may be equal to an id and yet not be found in a set
        data = self._tokenizer.token_bytes(token_id)
        return "" if token_id in self._skipped else self._trim(self._decoder.decode(data))

    @property
    def drops_space(self) -> bool:
        """Whether the text that comes next is a text's first, so that the space which encoding gives it goes."""
        return self._drop_space

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, or nothing."""
        return self._trim(self._decoder.decode(b"", final=True))

    def _trim(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            text = text.removeprefix(" ")
        if self._hold_space and text:
            text, self._held = self._held + text, ""
            if text.endswith(" "):
                text, self._held = text[:-1], " "
        return text


def _add_again(library: Any, tokens: Sequence[Any], *, normalized: bool) -> None:
    """Change whether control tokens are looked for in the text as it is, or as it is when normalized."""
    for token in tokens:
        token.normalized = normalized
    if tokens:
        library.add_special_tokens(list(tokens))


def _without_prefix(rules: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A normalizer or pre-tokenizer that gives a text's first word no space, and whether that differs."""
    match rules:
        case {"type": "Sequence", **rest}:
            name = "normalizers" if "normalizers" in rest else "pretokenizers"
            steps = [_without_prefix(step) for step in rest[name]]
            return {**rules, name: [step for step, _ in steps if step]}, any(changed for _, changed in steps)
        case {"type": "Prepend"}:
            return {}, True
        case {"type": "Metaspace", "prepend_scheme": "always" | "first"}:
            return {**rules, "prepend_scheme": "never"}, True
        case {"type": "ByteLevel", "add_prefix_space": True}:
            return {**rules, "add_prefix_space": False}, True
    return rules, False
