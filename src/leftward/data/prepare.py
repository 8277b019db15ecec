"""Sources + a tokenizer → token shards on disk, in constant memory. Reading them back is batches.py.

Two passes over the text. The first counts, fingerprints, decides the split and trains the tokenizer; the second
encodes. The split is by document and by content, so that copies of one document always land on the same side.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from leftward import files
from leftward.data import sources
from leftward.data.batches import FORMAT, INDEX, VERSION, Dataset
from leftward.data.settings import Settings
from leftward.data.sources import Piece, Report, Source
from leftward.errors import UserError
from leftward.text.tokenizer import Tokenizer

Stage = Literal["reading", "encoding"]
OnProgress = Callable[[Stage, int, int | None], None]
"""Told the stage, the bytes of text done, and their total where it is known."""

_SHARD_TOKENS = 1 << 24
_BATCH_CHARACTERS = 1 << 21  # encoded at once; the library needs some 100 bytes a token meanwhile
_BATCH_DOCUMENTS = 1 << 14
_EXACT_SPLIT_DOCUMENTS = 10_000
_KEYS = 1 << 64


def prepare(
    settings: Settings,
    out: Path,
    *,
    seed: int,
    tokenizer: Tokenizer | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Tokenizer, Dataset]:
    """Write the dataset directory `out`, whole or not at all: shards, dataset.json and the tokenizer.

    A ready `tokenizer` is used as it is; without one, it is trained as `settings` say, on training and validation
    text alike (a character that only validation holds must have an id too).

    Every document follows an eos token and one more ends each split: `<eos> doc <eos> doc <eos>`. A single document
    is cut in two; then training is `<eos> head` and validation exactly the tail.

    Raises:
        UserError: the data can't be read, split or encoded, or `out` is in use.
    """
    if not settings.val_paths and not 0 < settings.val_fraction < 1:
        raise UserError(
            f"val_fraction is {settings.val_fraction}: it must be above 0 and below 1, as training is steered by "
            "validation; give a small fraction, or text of its own (data.val_path)"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} already exists: choose another directory or remove it")
    with files.directory_atomic(out) as directory:
        progress = on_progress or (lambda stage, done, total: None)
        corpus = _Corpus(settings, directory, seed, progress)
        tokenizer = corpus.survey(tokenizer)
        split = corpus.split()
        index = _encode(corpus, tokenizer, split, directory)
        corpus.remove_spool()
        tokenizer.save(directory)
        files.write_json(directory / INDEX, index)
    return tokenizer, Dataset.open(out)


class _Corpus:
    """The text as both passes see it: the documents in order, with what the first pass learned about them."""

    def __init__(self, settings: Settings, directory: Path, seed: int, progress: OnProgress) -> None:
        self.settings = settings
        self.seed = seed
        self.report = Report()
        self._progress = progress
        self._spool = directory / "stdin"
        paths, val_paths = (
            [str(self._spool) if path == sources.STDIN else path for path in group]
            for group in (settings.paths, settings.val_paths)
        )
        if str(self._spool) in paths + val_paths:
            sources.spool_stdin(self._spool)
        self._sources = sources.find(paths, self.report)
        self._val_sources = sources.find(val_paths, self.report) if val_paths else []
        self.documents = 0
        self.bytes = 0
        self.characters = 0
        self.fingerprint = ""
        self._val_documents = 0
        self._sizes: dict[int, int] | None = {}  # key of a document → bytes of all documents with it

    def remove_spool(self) -> None:
        self._spool.unlink(missing_ok=True)

    def survey(self, tokenizer: Tokenizer | None) -> Tokenizer:
        """The first pass."""
        if tokenizer is not None:
            for _ in self._survey_pieces():
                pass
        else:
            settings = self.settings
            try:
                tokenizer = Tokenizer.train(
                    self._survey_pieces(),
                    kind=settings.tokenizer,
                    vocab_size=settings.vocab_size,
                    special_tokens=settings.special_tokens,
                    byte_fallback=settings.byte_fallback,
                )
            except UserError:
                if self.fingerprint:
                    self._check_any()  # where there is no document at all, that is the better explanation
                raise
        self._check_any()
        return tokenizer

    def _check_any(self) -> None:
        report, where = self.report, ", ".join(self.settings.paths)
        if self.documents == self._val_documents:
            skipped = f"; {report.bad_lines} bad lines, the first: {report.first_bad_line}" if report.bad_lines else ""
            raise UserError(f"no documents in {where} (nothing but white space){skipped}")
        if self.settings.val_paths and not self._val_documents:
            raise UserError(f"no documents in {', '.join(self.settings.val_paths)}: the validation split is empty")

    def _survey_pieces(self) -> Iterator[str]:
        """Count everything, and pass on as much as the tokenizer is to be trained on."""
        digest = hashlib.blake2b(digest_size=16)
        size, key = 0, None
        for is_val, piece in self._read(self.report):
            data = piece.text.encode()
            digest.update(data)
            key = self._key(data) if key is None else key
            size += len(data)
            if self.bytes < self.settings.tokenizer_bytes:
                yield piece.text
            self.bytes += len(data)
            self.characters += len(piece.text)
            if piece.ends_document:
                digest.update(_DOCUMENT_END)
                self.documents += 1
                self._val_documents += is_val
                if self._sizes is not None:
                    self._sizes[key] = self._sizes.get(key, 0) + size
                    if self.documents > _EXACT_SPLIT_DOCUMENTS:
                        self._sizes = None
                size, key = 0, None
            self._progress("reading", self.bytes, None)
        self.fingerprint = digest.hexdigest()

    def split(self) -> _SplitRule:
        """Decide, from the first pass, which documents are for validation.

        Raises:
            UserError: one side would be empty.
        """
        fraction = _exact(self.settings.val_fraction)
        if self.settings.val_paths:
            return _SplitRule("paths", "validation is the text of data.val_path")
        if self.documents == 1:
            head = _head(self.characters, fraction)
            if head == 0 or head == self.characters:
                raise UserError(
                    f"the validation split would be empty: {self.characters} characters can't be cut at "
                    f"val_fraction {self.settings.val_fraction}; give more text, or data.val_path"
                )
            note = (
                f"the data is a single document: training has its first {head:,} characters, validation the last "
                f"{self.characters - head:,}"
            )
            return _SplitRule("characters", note, head=head)
        sizes = self._sizes
        if sizes is None:
            return _SplitRule("threshold", threshold=int(fraction * _KEYS))
        if len(sizes) == 1:
            raise UserError(
                f"the validation split would be empty: all {self.documents} documents begin alike and belong on one "
                "side; give other text for validation (data.val_path)"
            )
        # In the order of the keys, which is random but the same in every run; a document that is larger than the
        # whole share is taken only if there is no other, the least too large first. Where a few large documents hold
        # most of the text, half of the documents are enough: training needs small ones too.
        target = fraction * self.bytes
        most = max(1, len(sizes) // 2)
        order = sorted(sizes, key=lambda key: (max(sizes[key] - target, 0), key))
        chosen: set[int] = set()
        held = 0
        for key in order[:-1]:
            if held >= target or len(chosen) == most:
                break
            chosen.add(key)
            held += sizes[key]
        share = held / self.bytes
        note = "" if share < 2 * fraction else f"documents are few and large: validation holds {share:.0%} of the bytes"
        return _SplitRule("keys", note, keys=frozenset(chosen))

    def parts(self, split: _SplitRule) -> Iterator[_Part]:
        """The second pass.

        Raises:
            UserError: the text is not what the first pass saw.
        """
        digest = hashlib.blake2b(digest_size=16)
        starts, is_val, done, characters = True, False, 0, 0
        for from_val, piece in self._read(Report()):
            data = piece.text.encode()
            digest.update(data)
            if split.kind == "characters":
                # At most one piece lies on both sides.
                cut = min(max(split.head - characters, 0), len(piece.text))
                if cut:
                    yield _Part(piece.text[:cut], False, starts, False)
                if cut < len(piece.text):
                    yield _Part(piece.text[cut:], True, starts, False)
            else:
                if starts:
                    is_val = from_val or split.has(self._key(data))
                yield _Part(piece.text, is_val, starts, piece.ends_document)
            starts = piece.ends_document
            done += len(data)
            characters += len(piece.text)
            if piece.ends_document:
                digest.update(_DOCUMENT_END)
            self._progress("encoding", done, self.bytes)
        if digest.hexdigest() != self.fingerprint:
            raise UserError("the text changed while it was being prepared: try again when nothing writes to it")

    def _read(self, report: Report) -> Iterator[tuple[bool, Piece]]:
        groups: list[tuple[bool, Sequence[Source]]] = [(False, self._sources), (True, self._val_sources)]
        for is_val, group in groups:
            for piece in sources.read(
                group,
                report,
                text_field=self.settings.text_field,
                document_separator=self.settings.document_separator,
                bad_lines=self.settings.bad_lines,
            ):
                yield is_val, piece

    def _key(self, data: bytes) -> int:
        """A random number that depends on the seed and on the beginning of a document only."""
        salt = (self.seed % _KEYS).to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(data, digest_size=8, salt=salt).digest(), "little")

    def notes(self, split: _SplitRule) -> list[str]:
        report = self.report
        counted = [
            (report.bad_lines, f"bad lines left out, the first: {report.first_bad_line}"),
            (report.empty_documents, "empty documents left out"),
            (report.empty_files, "empty files left out"),
            (report.skipped_files, "files of other kinds left out"),
            (max(self.bytes - self.settings.tokenizer_bytes, 0), "bytes of text not seen by the tokenizer's training"),
        ]
        return [split.note] * bool(split.note) + [f"{count:,} {what}" for count, what in counted if count]


class _Part(NamedTuple):
    """A piece of text as it is encoded."""

    text: str
    is_val: bool
    starts: bool
    """Whether a document begins with it; then a separator goes before."""
    ends: bool


# No UTF-8 text holds this byte, so that no other way to part the same text has the same fingerprint.
_DOCUMENT_END = b"\xff"


@dataclass(frozen=True)
class _SplitRule:
    """Which documents are for validation."""

    kind: Literal["paths", "characters", "threshold", "keys"]
    note: str = ""
    head: int = 0
    threshold: int = 0
    keys: frozenset[int] = frozenset()

    def has(self, key: int) -> bool:
        return key < self.threshold or key in self.keys


class _Writer:
    """One split on its way to disk: .npy files of at most _SHARD_TOKENS tokens."""

    def __init__(self, directory: Path, name: str, dtype: type[np.unsignedinteger[Any]]) -> None:
        self._directory = directory
        self._name = name
        self._dtype = np.dtype(dtype)
        self._file: Any = None
        self._header_size = 0
        self.shards: list[dict[str, Any]] = []
        self.documents = 0
        self.characters = 0
        self.bytes = 0

    def write(self, tokens: NDArray[np.uint32]) -> None:
        while len(tokens):
            if self._file is None:
                self._open()
            shard = self.shards[-1]
            part = tokens[: _SHARD_TOKENS - shard["tokens"]]
            self._file.write(part.astype(self._dtype).tobytes())
            shard["tokens"] += len(part)
            if shard["tokens"] == _SHARD_TOKENS:
                self.close()
            tokens = tokens[len(part) :]

    def _open(self) -> None:
        name = f"{self._name}-{len(self.shards):05d}.npy"
        self.shards.append({"name": name, "tokens": 0})
        self._file = (self._directory / name).open("wb")
        self._header_size = self._write_header()

    def close(self) -> None:
        if self._file is None:
            return
        try:
            self._file.seek(0)
            # numpy leaves room in a header for the length to grow.
            assert self._write_header() == self._header_size
        finally:
            self._file.close()
            self._file = None

    def _write_header(self) -> int:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.shards[-1]["tokens"],)}
        np.lib.format.write_array_header_1_0(self._file, header)
        size: int = self._file.tell()
        return size

    def describe(self) -> dict[str, Any]:
        return {
            "documents": self.documents,
            "characters": self.characters,
            "bytes": self.bytes,
            "tokens": sum(shard["tokens"] for shard in self.shards),
            "shards": self.shards,
        }


def _encode(corpus: _Corpus, tokenizer: Tokenizer, split: _SplitRule, directory: Path) -> dict[str, Any]:
    """The second pass: write the shards, and return what dataset.json says about them."""
    dtype = _smallest_type(tokenizer.vocab_size)
    separator = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype=np.uint32)
    cut_in_two = split.kind == "characters"
    closing = contextlib.closing
    with closing(_Writer(directory, "train", dtype)) as train, closing(_Writer(directory, "val", dtype)) as val:
        for batch in _batched(corpus.parts(split)):
            encoded = tokenizer.encode_batch([part.text for part in batch], starts=[part.starts for part in batch])
            for part, tokens in zip(batch, encoded, strict=True):
                side = val if part.is_val else train
                if part.starts:
                    side.write(separator)
                side.write(tokens)
                side.documents += part.ends
                side.characters += len(part.text)
                side.bytes += len(part.text.encode())
        if cut_in_two:
            train.documents = val.documents = 1
        else:
            train.write(separator)
            val.write(separator)
    for side in (train, val):
        if not side.characters:
            raise UserError(
                f"the {'validation' if side is val else 'training'} split is empty: change val_fraction "
                f"({corpus.settings.val_fraction}), or give more documents"
            )
    description: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": np.dtype(dtype).name,
        "vocab_size": tokenizer.vocab_size,
        "seed": corpus.seed,
        "val_fraction": None if split.kind == "paths" else corpus.settings.val_fraction,
        "split_by": split.kind,
        "text_fingerprint": corpus.fingerprint,
        "tokenizer_fingerprint": tokenizer.fingerprint(),
        "eos_id": tokenizer.eos_id,
        "splits": {"train": train.describe(), "val": val.describe()},
    }
    identity = json.dumps(description, sort_keys=True)
    return {
        "fingerprint": hashlib.blake2b(identity.encode(), digest_size=16).hexdigest(),
        **description,
        "bad_lines": corpus.report.bad_lines,
        "tokenizer_bytes": min(corpus.bytes, corpus.settings.tokenizer_bytes),
        "notes": corpus.notes(split),
    }


def _batched(parts: Iterator[_Part]) -> Iterator[list[_Part]]:
    """Enough text at once to keep all cores busy, and not so much that memory notices."""
    batch: list[_Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part.text)
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _exact(fraction: float) -> Fraction:
    """A fraction as it was written: in binary, 10 · (1 - 0.9) is less than 1."""
    return Fraction(str(fraction))


def _head(characters: int, val_fraction: Fraction) -> int:
    """How many characters of a single document are for training: nanoGPT's split at 0.1."""
    return math.floor(characters * (1 - val_fraction))


def _smallest_type(vocab_size: int) -> type[np.unsignedinteger[Any]]:
    highest = vocab_size - 1
    return np.uint8 if highest < 1 << 8 else np.uint16 if highest < 1 << 16 else np.uint32
