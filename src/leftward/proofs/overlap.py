"""Proofs about a run's data: that batches are shifted by one, and that what is validated on was not trained on.

Text is compared as hashes of runs of tokens whose number is a power of two, chosen so that a run is some bytes long
whatever the tokenizer: the hash of 2n tokens comes from those of n, so that any length costs its logarithm.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from leftward.data.batches import IGNORED, Dataset, Split, Windows, evaluation_batches
from leftward.proofs.report import Fails, Skips
from leftward.proofs.subject import Subject

_SHINGLE = 32  # bytes at least: some six words
_WINDOW = 128  # bytes at least: what nobody writes twice by chance
_PASSAGE = 512
_NEAR = 0.5  # of a passage's shingles
_PASSAGES = 4096  # of the validation split, spread over it
_TRAIN_TOKENS = 32_000_000  # read at most, spread over the split
_CHUNK = 1 << 20

MOST_DOCUMENTS, MOST_COPIED, MOST_NEAR = 0.01, 0.05, 0.05
"""Shares above which a proof fails: of documents, of tokens in copied windows, and of near-duplicate passages. Below
them the share is told: some text recurs (licences, refrains, forms), and moves a loss by no more than itself."""


def batches_are_shifted(subject: Subject) -> str:
    """Every target is the token behind its input; every token but the first is a target once."""
    dataset, length = _dataset(subject), _seq_len(subject)
    # Where the tokens are their own places, a window of training is a row of successive numbers.
    counted = Split("train", [np.arange(8 * length + 5)], {"documents": 1, "characters": 1, "bytes": 1})
    rows, _ = Windows(counted, length, seed=subject.seed).batch(0, 8)
    if not (np.diff(rows) == 1).all():
        raise Fails(f"the windows of training are not whole: one reads the places {rows[0][:6].tolist()} …")
    val, targets_seen = dataset.val, 0
    for inputs, targets in evaluation_batches(val, length, 16):
        real = targets != IGNORED
        stream = val.slice(targets_seen, targets_seen + int(real.sum()) + 1)
        if not (np.array_equal(inputs[real], stream[:-1]) and np.array_equal(targets[real], stream[1:])):
            raise Fails(_misfit(inputs, targets))
        targets_seen += int(real.sum())
        if targets_seen > 1 << 20:
            return f"8 windows of training, and the first {targets_seen:,} targets of validation"
    if targets_seen != len(val) - 1:
        raise Fails(f"{targets_seen:,} tokens are targets of validation, of {len(val) - 1:,}")
    return f"8 windows of training, and all {targets_seen:,} targets of validation"


def _misfit(inputs: NDArray[Any], targets: NDArray[Any]) -> str:
    if np.array_equal(inputs, targets):
        return "targets are the inputs themselves: they are not shifted"
    return f"targets are not the tokens behind their inputs: {inputs[0][:5].tolist()} → {targets[0][:5].tolist()}"


def documents_are_not_shared(subject: Subject) -> str:
    """Whole documents of validation that training has too."""
    dataset = _dataset(subject)
    border = dataset.index.get("eos_id")
    if border is None:
        raise Skips("the tokens have no separator between documents")
    if dataset.index.get("split_by") == "characters":
        raise Skips("the data is a single document, cut in two")
    least = _power_of_two(_SHINGLE, dataset)
    known = {key for span in _spans(dataset.train) for key, _ in _documents(span, border, least)}
    found = [(key, document) for span in _spans(dataset.val) for key, document in _documents(span, border, least)]
    if not found:
        raise Skips(f"no document of validation has {_SHINGLE} bytes")
    copies = [document for key, document in found if key in known]
    share = len(copies) / len(found)
    what = f"{len(copies):,} of {len(found):,} documents of validation are in training too ({share:.2%})"
    return _verdict(what, share, MOST_DOCUMENTS, copies[0] if copies else None, subject)


def windows_are_not_shared(subject: Subject) -> str:
    """Long runs of tokens of validation that stand in training, letter for letter."""
    found = _compare(subject)
    n_tokens = found.passages.size
    covered = np.zeros(found.passages.shape, dtype=bool)
    for row, start in zip(*np.nonzero(found.windows), strict=True):
        covered[row, start : start + found.window] = True
    share = float(covered.mean())
    what = f"{share:.2%} of {n_tokens:,} tokens of validation stand in runs of {found.window} that training has too"
    first = next(iter(zip(*np.nonzero(found.windows), strict=True)), None)
    example = None if first is None else found.passages[first[0], first[1] : first[1] + found.window]
    return _verdict(what + found.remark, share, MOST_COPIED, example, subject)


def passages_are_not_near(subject: Subject) -> str:
    """Passages of validation of which training has most of the short runs: copies with changes."""
    found = _compare(subject)
    shares = found.shingles.mean(axis=1)
    near = np.flatnonzero(shares >= _NEAR)
    share = len(near) / len(shares)
    what = (
        f"{len(near):,} of {len(shares):,} passages of {found.passages.shape[1]} tokens ({share:.2%}) have at least "
        f"{_NEAR:.0%} of their runs of {found.shingle} in training"
    )
    example = found.passages[shares.argmax()] if len(near) else None
    return _verdict(what + found.remark, share, MOST_NEAR, example, subject)


def _verdict(what: str, share: float, most: float, example: NDArray[Any] | None, subject: Subject) -> str:
    if example is not None and subject.language_model is not None:
        text = " ".join(subject.language_model.tokenizer.decode(example.tolist()).split())
        what += f", such as “{text[:60]}{'…' if len(text) > 60 else ''}”"
    if share > most:
        raise Fails(f"{what}; up to {most:.0%} may be chance")
    return what


class _Found(NamedTuple):
    """What training has of the passages of validation."""

    passages: NDArray[Any]
    """[P, L] tokens."""
    shingle: int
    window: int
    shingles: NDArray[np.bool_]
    """[P, L − shingle + 1]: whether training has the run that begins there."""
    windows: NDArray[np.bool_]
    """[P, L − window + 1]"""
    remark: str
    """How much of training was read, where not all."""


def _compare(subject: Subject) -> _Found:
    dataset = _dataset(subject)
    return _compared(dataset.directory, dataset.fingerprint)


@functools.lru_cache(maxsize=1)  # two proofs ask for it
def _compared(directory: Path, fingerprint: str) -> _Found:
    dataset = Dataset.open(directory)
    shingle, window = _power_of_two(_SHINGLE, dataset), _power_of_two(_WINDOW, dataset)
    length = shingle * (_PASSAGE // _SHINGLE)
    passages = _passages(dataset.val, length, window)
    of_val = [_Wanted(hashes) for hashes in _hashes(passages, (shingle, window))]
    spans = _spans(dataset.train)
    for span in spans:
        for start in range(0, len(span), _CHUNK):
            chunk = np.asarray(span[start : start + _CHUNK + window - 1])[None]
            if chunk.shape[1] >= shingle:
                for wanted, hashes in zip(of_val, _hashes(chunk, (shingle, window)), strict=True):
                    wanted.look_in(hashes[0])
    read = sum(map(len, spans))
    remark = "" if read == len(dataset.train) else f" ({read / len(dataset.train):.0%} of training was read)"
    return _Found(passages, shingle, window, of_val[0].found(), of_val[1].found(), remark)


class _Wanted:
    """Hashes that are looked for in a long stream of others."""

    _BITS = 24

    def __init__(self, hashes: NDArray[np.uint64]) -> None:
        self._shape = hashes.shape
        self._sorted, self._inverse = np.unique(hashes, return_inverse=True)
        self._is_found = np.zeros(len(self._sorted), dtype=bool)
        # A table of the leading bits answers for nearly all of the stream that there is no need to search.
        self._table = np.zeros(1 << self._BITS, dtype=bool)
        self._table[self._leading(self._sorted)] = True

    def _leading(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return hashes >> np.uint64(64 - self._BITS)

    def look_in(self, stream: NDArray[np.uint64]) -> None:
        likely = stream[self._table[self._leading(stream)]]
        places = np.searchsorted(self._sorted, likely)
        places[places == len(self._sorted)] = 0
        self._is_found[places[self._sorted[places] == likely]] = True

    def found(self) -> NDArray[np.bool_]:
        return self._is_found[self._inverse].reshape(self._shape)


_ODD = np.uint64(0x9E3779B97F4A7C15)


def _hashes(tokens: NDArray[Any], lengths: tuple[int, ...]) -> list[NDArray[np.uint64]]:
    """For each of `lengths`, growing powers of two: [rows, T − length + 1], a hash of every run of that many tokens."""
    hashes = _mixed(tokens.astype(np.uint64) + np.uint64(1))
    width, results = 1, []
    for length in lengths:
        while width < length:
            hashes = _mixed(hashes[:, :-width] * _ODD + hashes[:, width:])
            width *= 2
        results.append(hashes)
    return results


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits in which every bit depends on every other (Stafford's variant of MurmurHash3's)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _power_of_two(n_bytes: int, dataset: Dataset) -> int:
    """How many tokens spell at least `n_bytes`, on average, as a power of two."""
    tokens = n_bytes * len(dataset.val) / max(1, dataset.val.bytes)
    return 1 << max(1, int(np.ceil(np.log2(tokens))))


def _passages(split: Split, length: int, least: int) -> NDArray[Any]:
    """[P, length] of the split, one behind the other or, where that is too many, spread over it."""
    if len(split) < least:
        raise Skips(f"the {split.name} split has {len(split)} tokens: too few to compare runs of {least}")
    length = min(length, len(split))
    n = min(_PASSAGES, len(split) // length)
    return np.stack([split.slice(start, start + length) for start in np.linspace(0, len(split) - length, n, dtype=int)])


def _spans(split: Split) -> list[NDArray[Any]]:
    """The tokens of a split, or, where they are too many, 16 spans of them."""
    if len(split) <= _TRAIN_TOKENS:
        return [split.slice(0, len(split))]
    length = _TRAIN_TOKENS // 16
    return [split.slice(start, start + length) for start in np.linspace(0, len(split) - length, 16, dtype=int)]


def _documents(tokens: NDArray[Any], border: int, least: int) -> list[tuple[bytes, NDArray[Any]]]:
    """A hash of each document of at least that many tokens, and the document."""
    borders = np.flatnonzero(tokens == border)
    found = []
    for start, end in zip(borders[:-1] + 1, borders[1:], strict=True):
        if end - start >= least:
            document = tokens[start:end]
            found.append((hashlib.blake2b(document.tobytes(), digest_size=12).digest(), document))
    return found


def _dataset(subject: Subject) -> Dataset:
    if subject.run is None:
        raise Skips("there is no run, whose data this is about")
    return Dataset.open(subject.run.directory / "tokens")


def _seq_len(subject: Subject) -> int:
    return min(subject.context or 64, len(_dataset(subject).val) - 1, 256)
