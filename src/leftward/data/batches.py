"""Memory-mapped tokens → batches of one split: rows of tokens and of what follows each.

Everything is numpy; moving a batch to a device is the training loop's business. Not here: rows of whole documents
(packing.py), and the order in which training takes rows of one or several datasets (order.py).
"""

from __future__ import annotations

import bisect
import copy
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from leftward import files
from leftward.data.npy import read_npy
from leftward.errors import UserError

FORMAT = "leftward-tokens"
VERSION = 1
INDEX = "dataset.json"
IGNORED = -100
"""The target that no loss counts (PyTorch's cross_entropy ignores it by default)."""


class Batch(NamedTuple):
    """Rows to learn from."""

    inputs: NDArray[np.int64]
    """[rows, T]"""
    targets: NDArray[np.int64]
    """[rows, T]: the token that follows each; `IGNORED` where none is to be predicted."""
    documents: NDArray[np.int64] | None
    """[rows, T]: numbers of documents, which don't see each other. None: each row is one text."""

    @classmethod
    def empty(cls, rows: int, seq_len: int, apart: bool) -> Batch:
        """To be filled: padding everywhere."""
        shape = (rows, seq_len)
        documents = np.zeros(shape, np.int64) if apart else None
        return cls(np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64), documents)

    @property
    def n_targets(self) -> int:
        """How many tokens are to be predicted: what a mean loss is over."""
        return int((self.targets != IGNORED).sum())


class Split:
    """The tokens of one side, training or validation: one stream over as many files as it takes."""

    def __init__(
        self,
        name: str,
        shards: list[NDArray[Any]],
        counts: Mapping[str, int],
        vocab_size: int | None = None,
        *,
        ends: NDArray[np.int64] | None = None,
        separated: bool = True,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self.ends = ends
        """[documents]: the place behind each document's last token. A document begins where the one before it ends,
        with its separator. None: not known."""
        self.separated = separated
        """Whether a separator follows each document, which its last token is to predict."""
        self.is_apart = False
        """Whether documents are to be read as if each stood alone."""
        self._shards = shards
        self._starts = [0]
        for shard in shards:
            self._starts.append(self._starts[-1] + len(shard))
        self.documents = counts["documents"]
        self.characters = counts["characters"]
        self.bytes = counts["bytes"]
        """Of the text in UTF-8: what bits per byte are counted over."""

    @classmethod
    def joined(cls, splits: Sequence[Split]) -> Split:
        """Several as one stream, one behind the other. What separates documents stands between two of them once."""
        first = splits[0]
        if len(splits) == 1:
            return first
        counts = {name: sum(getattr(split, name) for split in splits) for name in ("documents", "characters", "bytes")}
        shards: list[NDArray[Any]] = []
        ends: list[NDArray[np.int64]] = []
        length = 0
        for split, following in itertools.zip_longest(splits, splits[1:]):
            closed = following is not None and split.slice(len(split) - 1, len(split)) == following.slice(0, 1)
            shards += [*split._shards[:-1], split._shards[-1][: -1 if split.separated and closed else None]]
            ends += [] if split.ends is None else [split.ends + length]
            length = sum(map(len, shards))
        all_ends = np.concatenate(ends) if len(ends) == len(splits) else None
        return cls(first.name, shards, counts, first.vocab_size, ends=all_ends, separated=first.separated)

    def apart(self) -> Split:
        """The same tokens, of documents that don't see each other.

        Raises:
            UserError: where the documents end isn't known.
        """
        if self.ends is None:
            raise UserError(
                f"the {self.name} split doesn't say where its documents end, as it was prepared by an older version: "
                "prepare it again, or leave out data.packing"
            )
        split = copy.copy(self)
        split.is_apart = True
        return split

    @property
    def n_targets(self) -> int:
        """How many tokens can be predicted from one before it."""
        if not self.is_apart or self.separated or self.ends is None:
            return len(self) - 1
        return len(self) - int(np.count_nonzero(np.diff(self.ends, prepend=0)))  # the first of each that has any

    def documents_at(self, start: int, stop: int) -> NDArray[np.int64]:
        """[stop − start]: the number of the document that each token [start, stop) belongs to."""
        assert self.ends is not None
        return np.searchsorted(self.ends, np.arange(start, stop), side="right")

    def __len__(self) -> int:
        """In tokens."""
        return self._starts[-1]

    def check_ids(self, tokens: NDArray[Any]) -> None:
        """Raises: UserError where the files hold an id that no token has: a disk can rot."""
        if self.vocab_size is not None and len(tokens) and tokens.max() >= self.vocab_size:
            raise UserError(
                f"the {self.name} split holds token {tokens.max()}, but its vocabulary has {self.vocab_size} tokens: "
                "its files are damaged, prepare the data again"
            )

    def slice(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop), in the type that they are stored in; a view where one file holds them all."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        first = bisect.bisect_right(self._starts, start, hi=len(self._shards)) - 1
        offset = start - self._starts[first]
        if stop <= self._starts[first + 1]:
            return self._shards[first][offset : offset + stop - start]
        parts = []
        while start < stop:
            end = min(stop, self._starts[first + 1])
            parts.append(self._shards[first][start - self._starts[first] : end - self._starts[first]])
            start, first = end, first + 1
        return np.concatenate(parts)


@dataclass(frozen=True)
class Part:
    """A dataset that another one draws from."""

    dataset: Dataset
    weight: float
    """Its share of the tokens, together with the other weights."""


class Dataset:
    """Prepared tokens on disk. Made by `prepare`, or by `link` of other datasets; opened by `Dataset.open`."""

    def __init__(
        self, directory: Path, index: dict[str, Any], train: Split, val: Split, parts: Sequence[Part] = ()
    ) -> None:
        self.directory = directory
        self.parts = tuple(parts)
        """What it is a mixture of; nothing where it has tokens of its own."""
        self.train = train
        self.val = val
        self.vocab_size: int = index["vocab_size"]
        self.fingerprint: str = index["fingerprint"]
        """Of text, tokenizer, split and seed: equal datasets, equal tokens."""
        self.tokenizer_fingerprint: str = index["tokenizer_fingerprint"]
        self.notes: list[str] = index["notes"]
        """What a user should know about how the data was read and split."""
        self.index = index

    @classmethod
    def open(cls, directory: Path | str) -> Dataset:
        """Map the files of a dataset; nothing is read before it is asked for.

        Raises:
            UserError: a file is missing, damaged, or of another version.
        """
        directory = Path(directory)
        path = directory / INDEX
        index = files.read_json(path)
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            raise UserError(f"{path} does not describe a dataset of leftward")
        if index.get("version") != VERSION:
            raise UserError(f"{path} is of version {index.get('version')}, this program reads {VERSION}: prepare again")
        try:
            if "mix" in index:
                return cls._open_linked(directory, index)
            train, val = (_open_split(directory, index, name) for name in ("train", "val"))
            return cls(directory, index, train, val)
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): prepare the data again") from None

    @classmethod
    def _open_linked(cls, directory: Path, index: dict[str, Any]) -> Dataset:
        parts = []
        for entry in index["mix"]:
            part = Part(cls.open(entry["path"]), entry["weight"])
            if part.dataset.fingerprint != entry["fingerprint"]:
                raise UserError(
                    f"{entry['path']} does not hold the tokens that it held when {directory} was made of it "
                    f"(fingerprint {part.dataset.fingerprint}, expected {entry['fingerprint']})"
                )
            parts.append(part)
        train, val = (Split.joined([getattr(part.dataset, name) for part in parts]) for name in ("train", "val"))
        return cls(directory, index, train, val, parts)


def link(mix: Mapping[str, float], out: Path) -> Dataset:
    """Make `out` a dataset without tokens of its own: training draws from others, in proportion to their weights.

    Args:
        mix: directories of datasets → weights. Tokens are drawn in this proportion.

    Raises:
        UserError: something is no dataset, or they were not made with one tokenizer.
    """
    resolved = [Path(path).expanduser().resolve() for path in mix]
    parts = {str(path): Dataset.open(path) for path in resolved}
    paths, (first, *others) = list(parts), parts.values()
    for path, other in zip(paths[1:], others, strict=True):
        if other.tokenizer_fingerprint != first.tokenizer_fingerprint:
            raise UserError(
                f"{path} was made with another tokenizer than {paths[0]}: prepare it with that one "
                f"(leftward data prepare … --tokenizer {paths[0]})"
            )
    entries = [
        {"path": path, "weight": weight, "fingerprint": part.fingerprint}
        for (path, part), weight in zip(parts.items(), mix.values(), strict=True)
    ]
    # One dataset is itself; several are another one, which depends on their weights.
    identity = json.dumps([[entry["fingerprint"], entry["weight"]] for entry in entries])
    inherited = {name: first.index.get(name) for name in ("vocab_size", "tokenizer_fingerprint", "eos_id")}
    index = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": hashlib.blake2b(identity.encode(), digest_size=16).hexdigest() if others else first.fingerprint,
        **inherited,
        "split_by": None if others else first.index.get("split_by"),
        "notes": [],
        "mix": entries,
    }
    with files.directory_atomic(out) as directory:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(Path(paths[0]) / name, directory / name)
        files.write_json(directory / INDEX, index)
    return Dataset.open(out)


def is_dataset(path: str) -> bool:
    """Whether a name that was given for text is the directory of a dataset."""
    return (Path(path).expanduser() / INDEX).is_file()


class Windows:
    """The order in which training reads a split: every epoch once through it, in windows at random places.

    Window i of an epoch covers the seq_len + 1 tokens from offset + i·seq_len on: inputs are all but the last, targets
    all but the first. Every epoch draws its own offset and order from (seed, epoch), so that borders between windows
    move and no token is always left out.
    """

    def __init__(self, split: Split, seq_len: int, seed: int) -> None:
        """Raises: UserError where the split is shorter than one window."""
        if len(split) < seq_len + 1:
            raise UserError(
                f"the {split.name} split has {len(split):,} tokens, fewer than one window of {seq_len + 1:,} "
                f"(seq_len {seq_len:,} and the token after it): lower seq_len or give more text"
            )
        self._split = split
        self._seq_len = seq_len
        self._seed = seed
        # The same number in every epoch, so that a position says which epoch it is in by division alone. One window
        # less than fits leaves at least seq_len places to begin at.
        self.per_epoch = max(1, len(split) // seq_len - 1)
        self._epoch = -1
        self._window_starts: NDArray[np.int64] = np.empty(0, dtype=np.int64)  # [per_epoch]

    def fill(self, position: int, batch: Batch, row: int) -> None:
        """Put the window after `position` windows into a row of a batch."""
        start = self._start(*divmod(position, self.per_epoch))
        window = self._split.slice(start, start + self._seq_len + 1)
        batch.inputs[row], batch.targets[row] = window[:-1], window[1:]

    def batch(self, position: int, size: int) -> tuple[NDArray[np.int64], int]:
        """The next `size` windows after `position` windows, as [size, seq_len + 1], and the position after them."""
        windows = np.empty((size, self._seq_len + 1), dtype=np.int64)
        for row in range(size):
            start = self._start(*divmod(position + row, self.per_epoch))
            windows[row] = self._split.slice(start, start + self._seq_len + 1)
        self._split.check_ids(windows)
        return windows, position + size

    def _start(self, epoch: int, index: int) -> int:
        if epoch != self._epoch:
            random = np.random.default_rng([self._seed % (1 << 64), epoch])
            offset = random.integers(len(self._split) - self.per_epoch * self._seq_len)
            self._window_starts = offset + self._seq_len * random.permutation(self.per_epoch)
            self._epoch = epoch
        return int(self._window_starts[index])


def evaluation_batches(
    split: Split, seq_len: int, batch_size: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """`evaluation_rows`, of a split whose documents are not apart: inputs and targets."""
    return ((batch.inputs, batch.targets) for batch in evaluation_rows(split, seq_len, batch_size))


def evaluation_rows(split: Split, seq_len: int, batch_size: int) -> Iterator[Batch]:
    """Batches of at most batch_size rows of seq_len, in which every token but the first is a target exactly once.

    Where documents are apart and nothing separates them, the first token of each is no target. The last row may be
    padded: with input 0 and target `IGNORED`.

    Raises:
        UserError: the split is too short to hold a target.
    """
    targets_total = len(split) - 1
    if targets_total < 1:
        raise UserError(f"the {split.name} split has {len(split)} tokens: it takes 2 to predict one; give more text")
    for first in range(0, targets_total, seq_len * batch_size):
        tokens = split.slice(first, min(first + seq_len * batch_size, targets_total) + 1)
        split.check_ids(tokens)
        count = len(tokens) - 1
        batch = Batch.empty(-(-count // seq_len), seq_len, split.is_apart)
        batch.inputs.flat[:count] = tokens[:-1]
        batch.targets.flat[:count] = tokens[1:]
        if batch.documents is not None:
            numbers = split.documents_at(first, first + batch.documents.size + 1)
            batch.documents[:] = numbers[:-1].reshape(batch.documents.shape)
            if not split.separated:
                batch.targets.flat[np.flatnonzero(np.diff(numbers))] = IGNORED
        yield batch


def _open_split(directory: Path, index: dict[str, Any], name: str) -> Split:
    side = index["splits"][name]
    shards = [_map_shard(directory, shard, index["dtype"]) for shard in side["shards"]]
    ends = read_npy(directory / side["ends"]) if "ends" in side else None
    return Split(name, shards, side, index["vocab_size"], ends=ends, separated=index.get("eos_id") is not None)


def _map_shard(directory: Path, shard: dict[str, Any], dtype: str) -> NDArray[Any]:
    path = directory / shard["name"]
    tokens = read_npy(path)
    if tokens.ndim != 1 or tokens.dtype.name != dtype or len(tokens) != shard["tokens"]:
        raise UserError(
            f"{path} holds {tokens.size:,} × {tokens.dtype}, not {shard['tokens']:,} × {dtype} as {INDEX} says: "
            "prepare the data again"
        )
    return tokens
