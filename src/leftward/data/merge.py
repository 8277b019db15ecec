"""The parts of a text → one dataset: what only the whole can tell, and the files that training reads.

Which documents are copies of others, which are for validation, and what there is to report follow from all parts
together, whoever made them. Here tokens are only copied, so that this takes a small part of the time of encoding.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from leftward import files
from leftward.data import duplicates
from leftward.data.batches import FORMAT, INDEX, VERSION, Dataset, Split
from leftward.data.encoding import BY_KEY, VAL, smallest_type
from leftward.data.npy import NpyWriter, read_npy
from leftward.data.settings import Settings
from leftward.data.work import SURVEY, Part, Plan, Shard, partial, shards
from leftward.errors import UserError
from leftward.text.tokenizer import Tokenizer

_SHARD_TOKENS = 1 << 24
_TOKENS_AT_ONCE = 1 << 22
_EXACT_SPLIT_DOCUMENTS = 10_000
_KEYS = 1 << 64
REJECTED = "rejected.log"
"""Lists every bad line that was left out."""
_BAD_LINES = 10  # of them in dataset.json
_BEGINNING = 60  # characters of the longest document


def finished(out: Path, plan: Plan) -> Dataset | None:
    """The dataset at `out` if it is what the plan asks for, or None where there is nothing yet.

    Raises:
        UserError: something else is there.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if (out / INDEX).is_file() and files.read_json(out / INDEX).get("plan") == plan.fingerprint():
        return Dataset.open(out)
    raise UserError(f"{out} already exists: choose another directory or remove it")


def merge(out: Path, directories: Sequence[Path] = ()) -> Dataset:
    """Make the dataset `out` of shards that are all there.

    Args:
        directories: what the shards were given as their `out`. None: they were all given `out`.

    Raises:
        UserError: a shard is missing or not finished, or they are not of one command; `out` is in use.
    """
    found = [shard for directory in directories or (out,) for shard in shards(directory)]
    if not found:
        where = ", ".join(str(partial(directory)) for directory in directories or (out,))
        raise UserError(f"there is nothing to merge in {where}: give what --out of the shards was")
    with contextlib.ExitStack() as stack:
        for directory in sorted({shard.directory.parent for shard in found}):
            if not stack.enter_context(files.locked(directory)):
                raise UserError(f"{directory} is being merged by another process: wait for it")
        return merge_shards(out, found)


def merge_shards(out: Path, found: Sequence[Shard]) -> Dataset:
    """`merge`, where nobody else is at work in these shards."""
    if other := [shard for shard in found if shard.of != found[0].of]:
        raise UserError(f"{found[0].directory} and {other[0].directory} are of different numbers of shards")
    by_number = {shard.number: shard for shard in found}
    missing = [n for n in range(1, found[0].of + 1) if n not in by_number or not by_number[n].is_done]
    if missing:
        names = ", ".join(f"{n}/{found[0].of}" for n in missing)
        raise UserError(f"not all shards are finished: give the command of the others again (--shard {names})")
    plan = found[0].plan()
    for shard in found[1:]:
        shard.plan().check_same(plan, found[0].directory, same_machine=False)
    if (dataset := finished(out, plan)) is None:
        with files.directory_atomic(out) as directory:
            _Merge(plan, [by_number[n] for n in sorted(by_number)], directory).write()
        dataset = Dataset.open(out)
    for shard in found:
        shard.remove()
    return dataset


class _Rows(NamedTuple):
    """The texts of a part, with what belongs to their document, which may have begun in an earlier part."""

    part: Part
    rows: NDArray[Any]
    """[texts] of `encoding.ROW`."""
    document: NDArray[np.int64]
    """[texts]: numbers of their documents, in the whole."""
    key: NDArray[np.uint64]
    """[texts]"""


def _rows(parts: Sequence[Part]) -> Iterator[_Rows]:
    n_documents, key = 0, np.uint64(0)
    for part in parts:
        rows = part.rows()
        if not len(rows):
            continue
        document = n_documents - 1 + np.cumsum(rows["starts"])
        begins = np.maximum.accumulate(np.where(rows["starts"], np.arange(len(rows)), -1))
        keys = np.where(begins >= 0, rows["key"][begins], key)
        n_documents, key = int(document[-1]) + 1, keys[-1]
        yield _Rows(part, rows, document, keys)


@dataclass(frozen=True)
class _Documents:
    """What decides about a document. Some 40 bytes of memory each, so only where it is asked for."""

    key: NDArray[np.uint64]
    """[N]"""
    bytes: NDArray[np.int64]
    side: NDArray[np.uint8]
    digest: NDArray[np.uint64]
    """[N, 2]"""

    @classmethod
    def of(cls, parts: Sequence[Part], n: int) -> _Documents:
        found = cls(np.zeros(n, np.uint64), np.zeros(n, np.int64), np.zeros(n, np.uint8), np.zeros((n, 2), np.uint64))
        for _, rows, document, _ in _rows(parts):
            starts = rows["starts"]
            begun = document[starts]
            found.key[begun], found.side[begun] = rows["key"][starts], rows["side"][starts]
            found.digest[begun] = rows["digest"][starts]
            np.add.at(found.bytes, document, rows["bytes"])
            for number, digest in zip(document[~starts], rows["digest"][~starts], strict=True):
                both = found.digest[number].tobytes() + digest.tobytes()
                found.digest[number] = np.frombuffer(hashlib.blake2b(both, digest_size=16).digest(), np.uint64)
        return found


@dataclass(frozen=True)
class _SplitRule:
    """Which documents are for validation."""

    kind: Literal["paths", "characters", "threshold", "keys"]
    note: str = ""
    threshold: int = 0
    keys: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))

    def is_val(self, side: NDArray[np.uint8], key: NDArray[np.uint64]) -> NDArray[np.bool_]:
        by_key = (key < self.threshold) | np.isin(key, self.keys)
        return np.where(side == BY_KEY, by_key, side == VAL)


class _Merge:
    """One dataset in the making."""

    def __init__(self, plan: Plan, shards: Sequence[Shard], directory: Path) -> None:
        self._plan = plan
        settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plan.settings.items()}
        self._settings = Settings(**settings)
        self._directory = directory
        self._work = shards[0].directory
        self._parts = [part for shard in shards for part in shard.parts()]  # each shard has one stretch of the text
        self._survey = files.read_json(self._work / SURVEY)
        self._tokenizer = Tokenizer.load(self._work)

    def write(self) -> None:
        """Raises: UserError where a side of the split would be empty."""
        read = self._read_reports()
        documents = None
        if self._settings.dedup != "none" or read.documents <= _EXACT_SPLIT_DOCUMENTS:
            documents = _Documents.of(self._parts, read.documents)
        copies = np.zeros(read.documents, np.bool_)
        if documents is not None and self._settings.dedup != "none":
            copies = duplicates.exact_copies(documents.digest, documents.side == VAL)
        read.exact_copies = int(copies.sum())
        rule = self._split_rule(read, documents, copies)
        if documents is not None and self._settings.dedup == "near":
            copies |= self._near_copies(documents, copies, rule)
        read.near_copies = int(copies.sum()) - read.exact_copies
        sides = self._copy_tokens(rule, copies)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(self._work / name, self._directory / name)
        files.write_json(self._directory / INDEX, self._index(read, rule, sides))

    def _read_reports(self) -> _Read:
        """Add up what the parts say, and list the lines that were left out."""
        read = _Read()
        fingerprint = hashlib.blake2b(digest_size=16)
        path = self._directory / REJECTED
        with path.open("w", encoding="utf-8") as rejected:
            for part in self._parts:
                info = part.info()
                fingerprint.update(info["fingerprint"].encode())
                read.documents += info["documents"]
                read.characters += info["characters"]
                read.bytes += info["bytes"]
                read.letters.update(info["letters"])
                read.empty_documents += info["report"]["empty_documents"]
                read.empty_files += info["report"]["empty_files"]
                read.bad_lines += info["report"]["bad_lines"][: _BAD_LINES - len(read.bad_lines)]
                read.n_bad_lines += len(info["report"]["bad_lines"])
                rejected.writelines(f"{line}\n" for line in info["report"]["bad_lines"])
        if not read.n_bad_lines:
            path.unlink()
        read.fingerprint = fingerprint.hexdigest()
        return read

    def _split_rule(self, read: _Read, documents: _Documents | None, copies: NDArray[np.bool_]) -> _SplitRule:
        """Which documents are for validation; copies that are left out don't count.

        Raises:
            UserError: one side would be empty.
        """
        settings = self._settings
        fraction = Fraction(str(settings.val_fraction))  # as it was written, not as it is in binary
        if settings.val_paths:
            return _SplitRule("paths", "validation is the text of data.val_path")
        if (head := self._survey["head"]) is not None:
            note = (
                f"the data is a single document: training has its first {head:,} characters, validation the last "
                f"{read.characters - head:,}"
            )
            return _SplitRule("characters", note)
        if documents is None or read.documents > _EXACT_SPLIT_DOCUMENTS:
            return _SplitRule("threshold", threshold=int(fraction * _KEYS))
        sizes: Counter[int] = Counter()  # key of a document → bytes of all documents with it
        for key, size, is_copy in zip(documents.key.tolist(), documents.bytes.tolist(), copies, strict=True):
            sizes[key] += 0 if is_copy else size
        if len(sizes) == 1:
            raise UserError(
                f"the validation split would be empty: all {read.documents} documents begin alike and belong on one "
                "side; give other text for validation (data.val_path)"
            )
        # In the order of the keys, which is random but the same in every run; a document that is larger than the
        # whole share is taken only if there is no other, the least too large first. Where a few large documents hold
        # most of the text, half of the documents are enough: training needs small ones too.
        total = sizes.total()
        target = fraction * total
        most = max(1, len(sizes) // 2)
        order = sorted(sizes, key=lambda key: (max(sizes[key] - target, 0), key))
        chosen: list[int] = []
        held = 0
        for key in order[:-1]:
            if held >= target or len(chosen) == most:
                break
            chosen.append(key)
            held += sizes[key]
        share = held / max(1, total)
        note = "" if share < 2 * fraction else f"documents are few and large: validation holds {share:.0%} of the bytes"
        return _SplitRule("keys", note, keys=np.array(chosen, dtype=np.uint64))

    def _near_copies(self, documents: _Documents, copies: NDArray[np.bool_], rule: _SplitRule) -> NDArray[np.bool_]:
        """Which documents are near copies of others; of a pair on both sides validation's stays, as it is what
        training must not have seen."""
        path = self._work / "signatures.npy"
        shape = (len(copies), duplicates.PERMUTATIONS)
        signed = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint32, shape=shape)
        for part, rows, document, _ in _rows(self._parts):
            starts, of_part = rows["starts"], part.signatures()
            signed[document[starts]] = of_part[starts]
            for number, signature in zip(document[~starts], of_part[~starts], strict=True):
                signed[number] = np.minimum(signed[number], signature)
        is_val = rule.is_val(documents.side, documents.key)
        order = [number for side in (is_val, ~is_val) for number in np.flatnonzero(side & ~copies).tolist()]
        return duplicates.near_copies(signed, order, self._settings.near_threshold)

    def _copy_tokens(self, rule: _SplitRule, copies: NDArray[np.bool_]) -> dict[str, _Side]:
        """Write the shards of both sides."""
        tokenizer, is_cut = self._tokenizer, rule.kind == "characters"
        separator = [] if tokenizer.eos_id is None or is_cut else [tokenizer.eos_id]
        dtype = smallest_type(tokenizer.vocab_size)
        with contextlib.ExitStack() as stack:
            train, val = (stack.enter_context(_Side(self._directory, name, dtype)) for name in ("train", "val"))
            for part, rows, document, key in _rows(self._parts):
                tokens = part.tokens()
                stays, is_val = ~copies[document], rule.is_val(rows["side"], key)
                train.add(rows, tokens, stays & ~is_val)
                val.add(rows, tokens, stays & is_val)
            for side in (train, val):
                if is_cut:
                    side.end_document()
                side.append(np.array(separator, dtype))
        for side in (train, val):
            if not side.characters:
                raise UserError(self._emptiness(side))
        return {"train": train, "val": val}

    def _emptiness(self, side: _Side) -> str:
        settings = self._settings
        if settings.val_paths:
            paths = settings.paths if side.name == "train" else settings.val_paths
            copies = "" if settings.dedup == "none" else " but copies"
            return f"no documents in {', '.join(paths)}{copies}: the {side.title} split is empty"
        return f"the {side.title} split is empty: change val_fraction ({settings.val_fraction}), or give more documents"

    def _index(self, read: _Read, rule: _SplitRule, sides: dict[str, _Side]) -> dict[str, Any]:
        """What dataset.json says."""
        settings, tokenizer = self._settings, self._tokenizer
        description: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": np.dtype(smallest_type(tokenizer.vocab_size)).name,
            "vocab_size": tokenizer.vocab_size,
            "seed": self._plan.seed,
            "val_fraction": None if rule.kind == "paths" else settings.val_fraction,
            "split_by": rule.kind,
            "dedup": settings.dedup,
            "text_fingerprint": read.fingerprint,
            "tokenizer_fingerprint": tokenizer.fingerprint(),
            "eos_id": tokenizer.eos_id,
            "splits": {name: side.describe() for name, side in sides.items()},
        }
        identity = json.dumps(description, sort_keys=True)
        return {
            "fingerprint": hashlib.blake2b(identity.encode(), digest_size=16).hexdigest(),
            **description,
            "plan": self._plan.fingerprint(),
            "bad_lines": read.n_bad_lines,
            "tokenizer_bytes": self._survey["tokenizer_bytes"],
            "notes": self._notes(read, rule),
            "report": self._report(read, sides),
        }

    def _notes(self, read: _Read, rule: _SplitRule) -> list[str]:
        """What a user should know about how the text was read and split."""
        unseen = read.bytes - self._survey["tokenizer_bytes"] if self._plan.tokenizer_fingerprint is None else 0
        counted = [
            (read.n_bad_lines, f"bad lines left out, the first: {''.join(read.bad_lines[:1])}"),
            (read.empty_documents, "empty documents left out"),
            (read.empty_files, "empty files left out"),
            (self._plan.skipped_files, "files of other kinds left out"),
            (read.exact_copies, "copies of other documents left out"),
            (read.near_copies, "near copies of other documents left out"),
            (unseen, "bytes of text not seen by the tokenizer's training"),
        ]
        return [rule.note] * bool(rule.note) + [f"{count:,} {what}" for count, what in counted if count]

    def _report(self, read: _Read, sides: dict[str, _Side]) -> dict[str, Any]:
        """What `leftward data report` shows."""
        letters, (train, val) = read.letters.total(), sides.values()
        longest = max(train, val, key=lambda side: side.longest.tokens)
        return {
            "documents": train.documents + val.documents,
            "tokens": len(train) + len(val),
            "characters": train.characters + val.characters,
            "bytes": train.bytes + val.bytes,
            "bytes_per_token": (train.bytes + val.bytes) / (len(train) + len(val)),
            "scripts": {name: count / letters for name, count in read.letters.most_common()},
            "longest": {
                "split": longest.name,
                **longest.longest._asdict(),
                "begins": self._tokenizer.decode(longest.longest_beginning())[:_BEGINNING],
            },
            "left_out": {
                "bad_lines": read.n_bad_lines,
                "empty_documents": read.empty_documents,
                "empty_files": read.empty_files,
                "files_of_other_kinds": self._plan.skipped_files,
                "exact_copies": read.exact_copies,
                "near_copies": read.near_copies,
            },
            "bad_lines": read.bad_lines,
        }


@dataclass
class _Read:
    """What was read, all parts together."""

    fingerprint: str = ""
    documents: int = 0
    characters: int = 0
    bytes: int = 0
    letters: Counter[str] = field(default_factory=Counter)
    empty_documents: int = 0
    empty_files: int = 0
    bad_lines: list[str] = field(default_factory=list)
    """The first of them."""
    n_bad_lines: int = 0
    exact_copies: int = 0
    near_copies: int = 0


class _Longest(NamedTuple):
    """The longest document of a side."""

    document: int = 0
    """Its number, from 0."""
    tokens: int = 0
    bytes: int = 0


class _Side:
    """One split on its way to disk: .npy files of at most _SHARD_TOKENS tokens, and where its documents end."""

    def __init__(self, directory: Path, name: str, dtype: type[np.unsignedinteger[Any]]) -> None:
        self.name = name
        self._directory = directory
        self._dtype = dtype
        self._shards: list[dict[str, Any]] = []
        self._file: NpyWriter | None = None
        self._ends = NpyWriter(directory / self._ends_name, np.int64)
        self._last_end = np.zeros(2, np.int64)  # tokens and bytes up to the last document's end
        self.longest = _Longest()
        self._longest_start = 0
        self.characters = self.bytes = self._length = 0

    def __len__(self) -> int:
        """In tokens."""
        return self._length

    @property
    def title(self) -> str:
        return {"train": "training", "val": "validation"}[self.name]

    @property
    def documents(self) -> int:
        return len(self._ends)

    @property
    def _ends_name(self) -> str:
        return f"{self.name}-documents.npy"

    def add(self, rows: NDArray[Any], tokens: NDArray[Any], chosen: NDArray[np.bool_]) -> None:
        """The chosen ones of some texts.

        Args:
            rows: [texts] of `encoding.ROW`
            tokens: [N], of all of them
            chosen: [texts]
        """
        stops = np.cumsum(rows["tokens"], dtype=np.int64)
        marks = np.arange(0, int(stops[-1]) + _TOKENS_AT_ONCE, _TOKENS_AT_ONCE)
        for first, last in itertools.pairwise(np.searchsorted(stops, marks, side="right").tolist()):
            taken, counts = chosen[first:last], rows["tokens"][first:last]
            if taken.any():
                of_these = tokens[stops[first] - counts[0] : stops[last - 1]]
                self._end_documents(rows[first:last][taken])
                self.append(of_these[np.repeat(taken, counts)])

    def _end_documents(self, rows: NDArray[Any]) -> None:
        """Note where documents of these texts end, which are about to be appended."""
        at = np.stack([np.cumsum(rows[name], dtype=np.int64) for name in ("tokens", "bytes")], axis=1)  # [texts, 2]
        ends = at[rows["ends"]] + (self._length, self.bytes)
        self.characters += int(rows["characters"].sum(dtype=np.int64))
        self.bytes += int(at[-1, 1])
        if len(ends):
            self._note_ends(ends)

    def _note_ends(self, ends: NDArray[np.int64]) -> None:
        """ends: [documents, 2], in tokens and in bytes."""
        sizes = np.diff(ends, axis=0, prepend=self._last_end[None])
        longest = int(sizes[:, 0].argmax())
        if sizes[longest, 0] > self.longest.tokens:
            self.longest = _Longest(self.documents + longest, *sizes[longest].tolist())
            self._longest_start = int(ends[longest, 0] - sizes[longest, 0])
        self._ends.append(ends[:, 0])
        self._last_end = ends[-1]

    def longest_beginning(self) -> list[int]:
        """The first tokens of the longest document, once all is written."""
        shards = [read_npy(self._directory / shard["name"]) for shard in self._shards]
        split = Split(self.name, shards, {"documents": 0, "characters": 0, "bytes": 0})
        start = self._longest_start
        tokens: list[int] = split.slice(start, start + min(self.longest.tokens, _BEGINNING)).tolist()
        return tokens

    def end_document(self) -> None:
        """The last document ends here, though no text said so: the other side has the rest of it."""
        self._note_ends(np.array([[self._length, self.bytes]]))

    def append(self, tokens: NDArray[Any]) -> None:
        """Tokens that belong to no document, or whose documents are noted."""
        while len(tokens):
            if self._file is None:
                name = f"{self.name}-{len(self._shards):05d}.npy"
                self._shards.append({"name": name, "tokens": 0})
                self._file = NpyWriter(self._directory / name, self._dtype)
            part = tokens[: _SHARD_TOKENS - len(self._file)]
            self._file.append(part)
            self._length += len(part)
            self._shards[-1]["tokens"] = len(self._file)
            if len(self._file) == _SHARD_TOKENS:
                self._close_shard()
            tokens = tokens[len(part) :]

    def _close_shard(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *error: object) -> None:
        self._close_shard()
        self._ends.close()

    def describe(self) -> dict[str, Any]:
        return {
            "documents": self.documents,
            "characters": self.characters,
            "bytes": self.bytes,
            "tokens": self._length,
            "shards": self._shards,
            "ends": self._ends_name,
        }
