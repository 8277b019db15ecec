"""Rows of whole documents: each row holds several that fit, and they don't see each other.

Documents are packed by best fit (Ding et al. 2024, arXiv 2404.10830: "Fewer Truncations Improve Language Modeling"), in
groups, so that memory is that of one group whatever the size. A group's documents are spread evenly over the split.
Only a document that is longer than a row is cut, into rows; nothing is left out: every token is in an epoch once.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from leftward.data.batches import IGNORED, Batch, Split
from leftward.errors import UserError

_GROUP = 8192  # documents


class Documents:
    """The order in which training reads a split by rows of documents: a function of the position, as `Windows` is."""

    def __init__(self, split: Split, seq_len: int, seed: int) -> None:
        """Packs everything once, to learn how many rows there are: about a second for a million documents.

        Args:
            split: with its documents apart.
            seq_len: tokens in a row.

        Raises:
            UserError: there is nothing to learn from.
        """
        assert split.is_apart and split.ends is not None
        if split.n_targets < 1:
            raise UserError(f"the {split.name} split has no two tokens in one document: give more text")
        self._split, self._ends = split, split.ends
        self._seq_len = seq_len
        self._seed = seed % (1 << 64)
        n = len(self._ends)
        # Steps of the golden section fall evenly over the documents; without a common divisor they meet each once.
        self._step = next(step for step in range(max(1, round(n * 0.618)), 2 * n + 1) if math.gcd(step, n) == 1)
        self._packed = functools.lru_cache(maxsize=2)(self._pack)
        self._rows = functools.lru_cache(maxsize=2)(self._shuffle_rows)
        self._shuffled = functools.lru_cache(maxsize=2)(self._shuffle)
        self._n_rows = np.array([self._pack(group).n_rows for group in range(-(-n // _GROUP))])  # [groups]
        self.per_epoch = int(self._n_rows.sum())
        self.filling = int(self._ends[-1]) / (self.per_epoch * seq_len)
        """The share of places in rows that hold a token."""

    def fill(self, position: int, batch: Batch, row: int) -> None:
        """Put the row after `position` rows into a row of a batch that holds padding."""
        assert batch.documents is not None
        epoch, index = divmod(position, self.per_epoch)
        groups, firsts = self._shuffled(epoch)
        place = int(np.searchsorted(firsts, index, side="right")) - 1
        group = int(groups[place])
        packed, chosen = self._packed(group), self._rows(epoch, group)[index - firsts[place]]
        at = number = 0
        for number, piece in enumerate(range(packed.offsets[chosen], packed.offsets[chosen + 1])):
            start, length = int(packed.starts[piece]), int(packed.lengths[piece])
            stop = at + length
            # With the token behind them, if there is one: the last target.
            tokens = self._split.slice(start, min(start + length + 1, len(self._split)))
            batch.inputs[row, at:stop] = tokens[:length]
            batch.targets[row, at : at + len(tokens) - 1] = tokens[1:]
            if packed.end_documents[piece] and not self._split.separated:
                batch.targets[row, stop - 1] = IGNORED
            batch.documents[row, at:stop] = number
            at = stop
        batch.documents[row, at:] = number + 1  # padding is by itself

    def _shuffle(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The groups in the order of an epoch, and how many rows come before each: both [groups]."""
        groups = np.random.default_rng([self._seed, epoch]).permutation(len(self._n_rows))
        rows = self._n_rows[groups]
        return groups, np.cumsum(rows) - rows

    def _shuffle_rows(self, epoch: int, group: int) -> NDArray[np.int64]:
        """The rows of a group in the order of an epoch."""
        return np.random.default_rng([self._seed, epoch, group]).permutation(self._n_rows[group])

    def _pack(self, group: int) -> _Packed:
        n, space = len(self._ends), self._seq_len
        documents = (self._seed % n + self._step * np.arange(group * _GROUP, min((group + 1) * _GROUP, n))) % n
        ends = self._ends[documents]
        starts = np.where(documents > 0, self._ends[documents - 1], 0)
        whole, rest = np.divmod(ends - starts, space)  # rows that a document fills, and what is left of it
        of_row = np.repeat(np.arange(len(documents)), whole)  # [rows that are full]: the document
        places = np.arange(len(of_row)) - np.repeat(np.cumsum(whole) - whole, whole)
        left = np.flatnonzero(rest)
        rows = np.concatenate([np.arange(len(of_row)), len(of_row) + best_fit(rest[left], space)])
        order = np.argsort(rows, kind="stable")
        n_rows = int(rows.max(initial=-1)) + 1
        piece_starts = np.concatenate([starts[of_row] + space * places, (ends - rest)[left]])
        lengths = np.concatenate([np.full(len(of_row), space), rest[left]])
        stops = np.concatenate([ends[of_row], ends[left]])
        return _Packed(
            n_rows,
            np.searchsorted(rows[order], np.arange(n_rows + 1)),
            piece_starts[order],
            lengths[order],
            (piece_starts + lengths == stops)[order],
        )


class _Packed(NamedTuple):
    """The rows of a group of documents, as pieces of the split."""

    n_rows: int
    offsets: NDArray[np.int64]
    """[rows + 1]: each row's first piece."""
    starts: NDArray[np.int64]
    """[pieces]: where each begins in the split."""
    lengths: NDArray[np.int64]
    """[pieces]"""
    end_documents: NDArray[np.bool_]
    """[pieces]"""


def best_fit(lengths: NDArray[np.int64], space: int) -> NDArray[np.int64]:
    """The row of each piece: the longest first, each into the row that has the least space left for it.

    Args:
        lengths: [pieces], from 1 to `space`.
        space: of an empty row.
    """
    rows = np.empty(len(lengths), dtype=np.int64)
    rows_with: list[list[int]] = [[] for _ in range(space)]  # by the space that is left in them
    spaces = 0  # bit s is set where a row has s left: the least that suffices is found in one step
    n_rows = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = spaces >> length
        if fitting:
            found = length + (fitting & -fitting).bit_length() - 1
            row = rows_with[found].pop()
            if not rows_with[found]:
                spaces ^= 1 << found
        else:
            found, row, n_rows = space, n_rows, n_rows + 1
        rows[piece] = row
        if left := found - length:
            rows_with[left].append(row)
            spaces |= 1 << left
    return rows
