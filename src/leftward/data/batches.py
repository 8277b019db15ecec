"""Memory-mapped tokens → batches: which tokens the model sees, in which order, as a pure function of the position.

Everything is numpy; moving a batch to a device is the training loop's business. The whole state of the training order
is one integer, the number of windows consumed, so that a resumed run continues exactly, with any batch size.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leftward import files
from leftward.errors import UserError

FORMAT = "leftward-tokens"
VERSION = 1
INDEX = "dataset.json"
IGNORED = -100
"""The target that no loss counts (PyTorch's cross_entropy ignores it by default)."""


class Split:
    """The tokens of one side, training or validation: one stream over as many files as it takes."""

    def __init__(
        self, name: str, shards: list[NDArray[Any]], counts: dict[str, int], vocab_size: int | None = None
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self._shards = shards
        self._starts = [0]
        for shard in shards:
            self._starts.append(self._starts[-1] + len(shard))
        self.documents = counts["documents"]
        self.characters = counts["characters"]
        self.bytes = counts["bytes"]
        """Of the text in UTF-8: what bits per byte are counted over."""

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


class Dataset:
    """Prepared tokens on disk. Made by `prepare`, opened by `Dataset.open`."""

    def __init__(self, directory: Path, index: dict[str, Any], train: Split, val: Split) -> None:
        self.directory = directory
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
            train, val = (_open_split(directory, index, name) for name in ("train", "val"))
            return cls(directory, index, train, val)
        except (KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): prepare the data again") from None


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
    """Inputs and targets, both [≤ batch_size, seq_len], in which every token but the first is a target exactly once.

    The last row may be padded: with input 0 and target `IGNORED`.

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
        rows = -(-count // seq_len)
        inputs = np.zeros(rows * seq_len, dtype=np.int64)
        targets = np.full(rows * seq_len, IGNORED, dtype=np.int64)
        inputs[:count] = tokens[:-1]
        targets[:count] = tokens[1:]
        yield inputs.reshape(rows, seq_len), targets.reshape(rows, seq_len)


def _open_split(directory: Path, index: dict[str, Any], name: str) -> Split:
    side = index["splits"][name]
    shards = [_map_shard(directory, shard, index["dtype"]) for shard in side["shards"]]
    return Split(name, shards, side, index["vocab_size"])


def _map_shard(directory: Path, shard: dict[str, Any], dtype: str) -> NDArray[Any]:
    path = directory / shard["name"]
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: prepare the data again") from None
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}): prepare the data again") from None
    if tokens.ndim != 1 or tokens.dtype.name != dtype or len(tokens) != shard["tokens"]:
        raise UserError(
            f"{path} holds {tokens.size:,} × {tokens.dtype}, not {shard['tokens']:,} × {dtype} as {INDEX} says: "
            "prepare the data again"
        )
    return np.asarray(tokens)  # still mapped, but without the cost of a memmap object for every slice
