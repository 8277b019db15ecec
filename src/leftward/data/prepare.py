"""Sources + a tokenizer → a dataset directory, in constant memory, on all cores, and if need be on many machines.

What has to be known before a text can be encoded is learned first (`_survey`): a tokenizer is trained, where there is
none, and a single document's cut is found. Then the text becomes parts (`_encode`), each whole or absent, so that the
same command goes on after a kill, and processes on many machines can each make theirs. All the parts are then made into
one dataset (merge.py), which also decides what only the whole can tell: the split, and which documents are copies.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from leftward import files
from leftward.data import duplicates, sources
from leftward.data.batches import Dataset
from leftward.data.encoding import BY_KEY, ROW, TRAIN, VAL, Text, cores, encoders, smallest_type
from leftward.data.merge import finished, merge_shards
from leftward.data.npy import NpyWriter
from leftward.data.settings import Settings
from leftward.data.sources import Piece, Report, Source, Unit
from leftward.data.work import PART, SURVEY, Plan, Shard, part_name, partial, shards
from leftward.errors import UserError
from leftward.text.tokenizer import Tokenizer

Stage = Literal["reading", "encoding"]
OnProgress = Callable[[Stage, int, int | None], None]
"""Told the stage, the bytes of text done, and their total as far as it can be told."""

_UNIT_BYTES = 1 << 26  # on disk
_PART_BYTES = 1 << 26  # of text: what a kill loses at most
_BATCH_CHARACTERS = 1 << 20  # encoded at once; the library needs some 100 bytes a token meanwhile
_BATCH_DOCUMENTS = 1 << 14
_BYTES_WORTH_PROCESSES = 1 << 24  # starting them takes half a second
# No UTF-8 text holds this byte, so that no other way to part the same text has the same fingerprint.
_DOCUMENT_END = b"\xff"


def prepare(
    settings: Settings,
    out: Path,
    *,
    seed: int,
    tokenizer: Tokenizer | None = None,
    processes: int | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Tokenizer, Dataset]:
    """Write the dataset directory `out`, whole or not at all: shards, dataset.json and the tokenizer.

    A ready `tokenizer` is used as it is; without one, it is trained as `settings` say, on training and validation
    text alike (a character that only validation holds must have an id too).

    Every document follows an eos token and one more ends each split: `<eos> doc <eos> doc <eos>`. Where the tokenizer
    begins a text with another token, that follows each eos but the last: `<eos> <bos> doc <eos>`. A single document is
    cut in two; then training is `<eos> head` and validation exactly the tail.

    If it is killed, or the disk is full, the same call goes on where it was, and gives the same bytes. (Standard input
    is read anew.) On a dataset that the same call has made it does nothing.

    Args:
        processes: that encode. 0: none but this one. None: as many as there are cores, if the text is worth it.

    Raises:
        UserError: the data can't be read, split or encoded, or `out` is in use.
    """
    dataset = prepare_shard(
        settings, out, 1, 1, seed=seed, tokenizer=tokenizer, processes=processes, on_progress=on_progress
    )
    if dataset is None:
        raise UserError(f"{out} is being merged by another process: wait for it")
    return tokenizer or Tokenizer.load(out), dataset


def prepare_shard(
    settings: Settings,
    out: Path,
    number: int,
    of: int,
    *,
    seed: int,
    tokenizer: Tokenizer | None,
    processes: int | None = None,
    on_progress: OnProgress | None = None,
) -> Dataset | None:
    """Do the share `number` (from 1) of `of` of what `prepare` does, in a directory beside `out`.

    Where all shares are there afterwards, they become the dataset: byte for byte what one process would have made.

    Returns:
        The dataset, or None while others are at work.

    Raises:
        UserError: as for `prepare`; the shares can't be told apart.
    """
    _check(settings, number, of, tokenizer)
    progress = on_progress or (lambda stage, done, total: None)
    shard = Shard.at(out, number, of)
    with files.locked(shard.directory) as is_ours:
        if not is_ours:
            raise UserError(f"{shard.directory} is in use by another process: wait for it")
        keeps = shard.is_begun  # what is there when something is wrong
        try:
            text = _Text.open(settings, shard)
            plan = text.plan(seed, tokenizer)
            if (dataset := finished(out, plan)) is not None:
                shard.remove()
                return dataset
            shard.begin(plan)
            keeps = of > 1
            if not shard.is_done:
                survey, used = _survey(text, shard, tokenizer, progress)
                _encode(text, shard, survey, used, seed, _processes(processes, text), progress)
                text.plan(seed, tokenizer).check_same(plan, shard.directory)
                shard.mark_done()
            with files.locked(partial(out)) as is_ours:
                others = [other for other in shards(out) if other.of == of and other.is_done]
                return merge_shards(out, others) if is_ours and len(others) == of else None
        except UserError as error:
            # What the disk refuses can be mended, and then this goes on; text that is wrong is begun anew.
            if not keeps and not isinstance(error.__cause__, OSError):
                shard.remove()
            raise


def _check(settings: Settings, number: int, of: int, tokenizer: Tokenizer | None) -> None:
    """Raises: UserError for what can be told without reading."""
    if not settings.val_paths and not 0 < settings.val_fraction < 1:
        raise UserError(
            f"val_fraction is {settings.val_fraction}: it must be above 0 and below 1, as training is steered by "
            "validation; give a small fraction, or text of its own (data.val_path)"
        )
    if not 1 <= number <= of:
        raise UserError(f"shard is {number}/{of}: the first number must be from 1 to the second")
    if of > 1 and tokenizer is None:
        raise UserError("shards need a ready tokenizer, the same for all: train it first, or give one (--tokenizer)")
    if of > 1 and sources.STDIN in settings.paths + settings.val_paths:
        raise UserError("standard input can't be shared out among shards: write it to a file first")
    if settings.dedup == "near":
        duplicates.check_library()
        if not 0 < settings.near_threshold <= 1:
            raise UserError(f"near_threshold is {settings.near_threshold}: it must be above 0, and at most 1")


def _processes(asked: int | None, text: _Text) -> int:
    if asked is not None:
        if asked < 0:
            raise UserError(f"processes is {asked}: it must be at least 1, or 0 for none beside the one that reads")
        return asked
    return cores() if sum(unit.size for unit in text.units) >= _BYTES_WORTH_PROCESSES else 0


@dataclass(frozen=True)
class _End:
    """A part of a unit ends here."""

    fingerprint: str
    """Of its text and where documents end in it."""
    is_last: bool
    """The unit ends too."""
    report: Report


@dataclass(frozen=True)
class _Text:
    """What there is to read, in units of work."""

    settings: Settings
    sources: list[Source]
    units: list[Unit]
    n_val_units: int
    """How many of the units, at the end, are text for validation."""
    skipped_files: int

    @classmethod
    def open(cls, settings: Settings, shard: Shard) -> _Text:
        """Raises: UserError where a name stands for nothing that can be read."""
        if sources.STDIN in settings.paths + settings.val_paths:
            # Nobody can tell whether the same comes again, so there is nothing to go on with.
            shard.clear()
            spool = shard.directory / "stdin"
            sources.spool_stdin(spool)
            spooled: dict[str, Any] = {
                name: tuple(str(spool) if path == sources.STDIN else path for path in getattr(settings, name))
                for name in ("paths", "val_paths")
            }
            settings = dataclasses.replace(settings, **spooled)
        report = Report()
        train = sources.find(settings.paths, report)
        val = sources.find(settings.val_paths, report) if settings.val_paths else []
        val_units = sources.units(val, _UNIT_BYTES)
        units = sources.units(train, _UNIT_BYTES) + val_units
        return cls(settings, train + val, units, len(val_units), report.skipped_files)

    def plan(self, seed: int, tokenizer: Tokenizer | None) -> Plan:
        fingerprint = None if tokenizer is None else tokenizer.fingerprint()
        return Plan.of(self.settings, seed, fingerprint, self.sources, self.units, self.skipped_files)

    def side(self, unit: int) -> int:
        if not self.settings.val_paths:
            return BY_KEY
        return VAL if unit >= len(self.units) - self.n_val_units else TRAIN

    def read(self, unit: int) -> Iterator[Piece | _End]:
        """The pieces of a unit, and where its parts end: the same at every reading.

        Raises:
            UserError: naming the file, and the line or byte.
        """
        report, digest, size = Report(), hashlib.blake2b(digest_size=16), 0
        for piece in sources.read(
            self.units[unit].sources,
            report,
            text_field=self.settings.text_field,
            document_separator=self.settings.document_separator,
            bad_lines=self.settings.bad_lines,
        ):
            data = piece.text.encode()
            digest.update(data)
            if piece.ends_document:
                digest.update(_DOCUMENT_END)
            size += len(data)
            yield piece
            if size >= _PART_BYTES:
                yield _End(digest.hexdigest(), False, report.take())
                digest, size = hashlib.blake2b(digest_size=16), 0
        yield _End(digest.hexdigest(), True, report.take())


# ---- before encoding


@dataclass(frozen=True)
class _Survey:
    """What was learned from the text, or from as much of it as that took."""

    tokenizer_bytes: int
    """Of text that the tokenizer was trained on."""
    bytes: int | None
    """Of all text, if all was read."""
    head: int | None
    """How many characters of a single document are for training."""
    fingerprints: dict[str, str]
    """Of parts, by name: to notice that the text changes."""


def _survey(text: _Text, shard: Shard, tokenizer: Tokenizer | None, progress: OnProgress) -> tuple[_Survey, Tokenizer]:
    """Learn what encoding must know, unless that was done and saved before the shard was interrupted.

    Raises:
        UserError: there is no text, or none that a tokenizer can be trained on, or it can't be cut.
    """
    path = shard.directory / SURVEY
    if path.exists():
        return _Survey(**files.read_json(path)), tokenizer or Tokenizer.load(shard.directory)
    reader = _Surveyor(text, tokenizer is None, progress)
    if tokenizer is not None:
        for _ in reader.texts():
            pass
    else:
        settings = text.settings
        try:
            tokenizer = Tokenizer.train(
                reader.texts(),
                kind=settings.tokenizer,
                vocab_size=settings.vocab_size,
                special_tokens=settings.special_tokens,
                byte_fallback=settings.byte_fallback,
            )
        except UserError:
            if reader.is_whole:
                reader.check_any()  # where there is no document at all, that is the better explanation
            raise
    survey = reader.result()
    if survey.head is not None and shard.of > 1:
        raise UserError("the data is a single document, which can't be shared out among shards: leave out --shard")
    tokenizer.save(shard.directory)
    files.write_json(path, dataclasses.asdict(survey))
    return survey, tokenizer


class _Surveyor:
    """Reads until the tokenizer has enough, and there is more than one document."""

    def __init__(self, text: _Text, trains: bool, progress: OnProgress) -> None:
        self._text = text
        self._most = text.settings.tokenizer_bytes if trains else 0
        self._progress = progress
        self._documents = Counter[int]()  # by side
        self._bad_lines: list[str] = []
        self._n_bad_lines = 0
        self._fingerprints: dict[str, str] = {}
        self._bytes = self._characters = self._given = 0
        self.is_whole = False
        """Whether all text was read."""

    def texts(self) -> Iterator[str]:
        """As much as the tokenizer is to be trained on."""
        for unit in range(len(self._text.units)):
            side, number = self._text.side(unit), itertools.count()
            for piece in self._text.read(unit):
                if isinstance(piece, _End):
                    self._fingerprints[part_name(unit, next(number))] = piece.fingerprint
                    self._n_bad_lines += len(piece.report.bad_lines)
                    self._bad_lines = self._bad_lines or piece.report.bad_lines[:1]
                    continue
                if self._bytes >= self._most and self._documents.total():
                    return
                size = len(piece.text.encode())
                if self._bytes < self._most:
                    self._given += size
                    yield piece.text
                self._bytes += size
                self._characters += len(piece.text)
                self._documents[side] += piece.ends_document
                self._progress("reading", self._bytes, None)
        self.is_whole = True

    def check_any(self) -> None:
        """Raises: UserError where all text was read, and there is none."""
        settings = self._text.settings
        if not self._documents[TRAIN] + self._documents[BY_KEY]:
            where = ", ".join(settings.paths)
            bad = f"; {self._n_bad_lines} bad lines, the first: {self._bad_lines[0]}" if self._n_bad_lines else ""
            raise UserError(f"no documents in {where} (nothing but white space){bad}")
        if settings.val_paths and not self._documents[VAL]:
            raise UserError(f"no documents in {', '.join(settings.val_paths)}: the validation split is empty")

    def result(self) -> _Survey:
        """Raises: UserError where there is no text, or it can't be cut."""
        head = None
        if self.is_whole:
            self.check_any()
            if self._documents[BY_KEY] == 1:
                head = self._head()
        return _Survey(self._given, self._bytes if self.is_whole else None, head, self._fingerprints)

    def _head(self) -> int:
        fraction = self._text.settings.val_fraction
        head = head_of(self._characters, fraction)
        if head == 0 or head == self._characters:
            raise UserError(
                f"the validation split would be empty: {self._characters} characters can't be cut at val_fraction "
                f"{fraction}; give more text, or data.val_path"
            )
        return head


def head_of(characters: int, val_fraction: float) -> int:
    """How many characters of a single document are for training: nanoGPT's split at 0.1.

    The fraction is taken as it was written: in binary, 10 · (1 - 0.9) is less than 1.
    """
    return math.floor(characters * (1 - Fraction(str(val_fraction))))


# ---- encoding


@dataclass(frozen=True)
class _Job:
    """Some texts of a part."""

    unit: int
    path: Path
    """Of the part."""
    end: _End | None
    """Where the part ends with them."""


def _encode(
    text: _Text,
    shard: Shard,
    survey: _Survey,
    tokenizer: Tokenizer,
    seed: int,
    processes: int,
    progress: OnProgress,
) -> None:
    """Make the parts of a shard that are not there yet.

    Raises:
        UserError: the text can't be read or encoded, is not what it was, or the disk refuses.
    """
    units = shard.units([unit.size for unit in text.units])
    dtype = smallest_type(tokenizer.vocab_size)
    near = text.settings.dedup == "near"
    there: dict[int, list[dict[str, Any]]] = {}
    for part in shard.parts():
        there.setdefault(part.unit, []).append(part.info())
    done = sum(info["bytes"] for infos in there.values() for info in infos)
    expected = _Expected(text, units, None if shard.of > 1 else survey.bytes)
    with encoders(tokenizer, shard.directory, seed, near, processes) as encode:
        results = encode(_jobs(text, shard, units, survey, there))
        for path, of_part in itertools.groupby(results, key=lambda result: result[0].path):
            with files.directory_atomic(path) as directory:
                counts = Counter[str]()
                letters = Counter[str]()
                with (
                    NpyWriter(directory / "tokens.npy", dtype) as tokens,
                    NpyWriter(directory / "rows.npy", ROW) as rows,
                    NpyWriter(directory / "signatures.npy", np.uint32, (duplicates.PERMUTATIONS,)) as signatures,
                ):
                    for job, encoded in of_part:  # noqa: B007 - the last one says where the part ends
                        tokens.append(encoded.tokens)
                        rows.append(encoded.rows)
                        signatures.append(encoded.signatures)
                        letters += encoded.letters
                        for name, column in (("documents", "starts"), ("characters", "characters"), ("bytes", "bytes")):
                            counts[name] += int(encoded.rows[column].sum(dtype=np.int64))
                        progress("encoding", done + counts["bytes"], expected.total)
                assert job.end is not None
                info = {**counts, "letters": letters, **dataclasses.asdict(job.end)}
                files.write_json(directory / PART, info)
            done += counts["bytes"]
            expected.note(job, counts["bytes"])


class _Expected:
    """How many bytes of text there will be, as far as it can be told: files may be compressed."""

    def __init__(self, text: _Text, units: range, known: int | None) -> None:
        self.total = known
        self._is_known = known is not None
        self._sizes = [unit.size for unit in text.units]
        self._all = sum(self._sizes[unit] for unit in units)
        self._text = self._disk = 0

    def note(self, job: _Job, text_bytes: int) -> None:
        """A part is written."""
        self._text += text_bytes
        self._disk += self._sizes[job.unit] if job.end and job.end.is_last else 0
        if self._disk and not self._is_known:
            self.total = round(self._text / self._disk * self._all)


def _jobs(
    text: _Text, shard: Shard, units: range, survey: _Survey, there: dict[int, list[dict[str, Any]]]
) -> Iterator[tuple[_Job, list[Text]]]:
    """The texts of the parts of `units` that are not there yet.

    Args:
        there: what is known of the parts that are, by unit.

    Raises:
        UserError: the text is not what it was.
    """
    for unit in units:
        made = there.get(unit, [])
        if made and made[-1]["is_last"]:
            continue
        side, number, characters, starts = text.side(unit), 0, 0, True
        batch: list[Text] = []
        size = 0
        for piece in text.read(unit):
            path = shard.part_path(unit, number)
            if isinstance(piece, _End):
                known = made[number]["fingerprint"] if number < len(made) else survey.fingerprints.get(path.name)
                if known not in (None, piece.fingerprint):
                    raise UserError("the text changed while it was being prepared: try again when nothing writes to it")
                if number >= len(made):
                    yield _Job(unit, path, piece), batch
                number, batch, size = number + 1, [], 0
                continue
            if number >= len(made):
                if survey.head is None:
                    batch.append(Text(piece.text, side, starts, piece.ends_document))
                else:
                    batch += _cut(piece.text, starts, survey.head - characters)
                size += len(piece.text)
                if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
                    yield _Job(unit, path, None), batch
                    batch, size = [], 0
            characters += len(piece.text)
            starts = piece.ends_document


def _cut(text: str, starts: bool, place: int) -> list[Text]:
    """A piece of a single document, which is for training up to `place` and for validation from there on."""
    place = min(max(place, 0), len(text))
    parts = [Text(text[:place], TRAIN, starts, False), Text(text[place:], VAL, False, False)]
    return [part for part in parts if part.text]
