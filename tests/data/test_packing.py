"""Rows of documents: every token once, nothing seen that belongs to another document, and little padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leftward.data import packing
from leftward.data.batches import IGNORED, Batch, Split, evaluation_rows
from leftward.data.packing import Documents, best_fit
from leftward.errors import UserError

COUNTS = {"documents": 1, "characters": 0, "bytes": 0}


def split_of(lengths: list[int], separated: bool = True, closed: bool = True, shard: int = 1 << 30) -> Split:
    """Documents of so many tokens, apart. Every token is its own place, from 1 on, so that it says where it stood;
    where documents are `separated` the first of each is its separator, and one more closes the split."""
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens = np.arange(1, int(ends[-1]) + (separated and closed) + 1, dtype=np.uint32)
    shards = [tokens[i : i + shard] for i in range(0, len(tokens), shard)] or [tokens]
    return Split("train", shards, COUNTS, ends=ends, separated=separated).apart()


def epoch_of(split: Split, seq_len: int, seed: int = 0, epoch: int = 0) -> tuple[Batch, Documents]:
    documents = Documents(split, seq_len, seed)
    batch = Batch.empty(documents.per_epoch, seq_len, apart=True)
    for row in range(documents.per_epoch):
        documents.fill(epoch * documents.per_epoch + row, batch, row)
    return batch, documents


def pairs_by_hand(lengths: list[int], separated: bool, closed: bool) -> list[tuple[int, int]]:
    """What is to be learned, as (input, target): every token from the one before it in its document, and the separator
    that follows it from its last."""
    pairs, start = [], 1
    for number, length in enumerate(lengths):
        followed = separated and (closed or number < len(lengths) - 1)
        stop = start + length
        pairs += [(token, token + 1) for token in range(start, stop) if token + 1 < stop or followed]
        start = stop
    return pairs


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=60)


@given(
    lengths=LENGTHS,
    seq_len=st.integers(1, 17),
    group=st.integers(1, 20),
    separated=st.booleans(),
    closed=st.booleans(),
    shard=st.integers(1, 50),
    seed=st.integers(0, 2**70),
    epoch=st.integers(0, 2),
)
def test_every_token_is_learned_once_from_its_own_document(
    lengths: list[int], seq_len: int, group: int, separated: bool, closed: bool, shard: int, seed: int, epoch: int
) -> None:
    lengths = [max(length, separated) for length in lengths]
    split = split_of(lengths, separated, closed, shard)
    wanted = pairs_by_hand(lengths, separated, closed)
    last = sum(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_GROUP", group)
        if not wanted:
            with pytest.raises(UserError, match="no two tokens in one document"):
                Documents(split, seq_len, seed)
            return
        batch = epoch_of(split, seq_len, seed, epoch)[0]
    assert batch.documents is not None
    learned = batch.targets != IGNORED
    pairs = zip(batch.inputs[learned].tolist(), batch.targets[learned].tolist(), strict=True)
    assert sorted(pairs) == sorted(wanted)
    assert split.n_targets == batch.n_targets == len(wanted)
    real = batch.inputs > 0
    assert sorted(batch.inputs[real].tolist()) == list(range(1, last + 1))  # each token once
    assert (batch.targets[~real] == IGNORED).all()
    document = np.repeat(np.arange(len(lengths)), lengths)
    for inputs, numbers, is_real in zip(batch.inputs, batch.documents, real, strict=True):
        steps = np.diff(numbers)
        assert numbers[0] == 0 and set(steps.tolist()) <= {0, 1}
        assert (np.diff(is_real.astype(int)) <= 0).all()  # padding is behind everything
        for number in range(numbers[-1] + 1):
            piece = inputs[numbers == number]
            if piece[0]:  # one stretch of one document
                assert (np.diff(piece) == 1).all() and len(set(document[piece - 1])) == 1
            else:
                assert (piece == 0).all()


@given(lengths=st.lists(st.integers(1, 30), max_size=80), space=st.integers(30, 60))
def test_best_fit_decreasing(lengths: list[int], space: int) -> None:
    """Against the rule as it is said: each into the fullest row that it fits into."""
    rows = best_fit(np.array(lengths, dtype=np.int64), space)
    used: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, u in enumerate(used) if u + length <= space]
        if fitting:
            used[max(fitting, key=lambda i: used[i])] += length
        else:
            used.append(length)
    ours = np.bincount(rows, weights=lengths) if lengths else np.empty(0)
    assert sorted(ours.tolist()) == sorted(used)


def test_documents_are_whole_where_they_fit() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 500)
    batch = epoch_of(split_of(lengths.tolist()), 128)[0]
    assert batch.documents is not None
    starts = {1 + int(end - length): int(length) for end, length in zip(np.cumsum(lengths), lengths, strict=True)}
    pieces = [
        inputs[numbers == number].tolist()
        for inputs, numbers in zip(batch.inputs, batch.documents, strict=True)
        for number in range(numbers[-1] + 1)
    ]
    whole = [piece for piece in pieces if len(piece) == starts.get(piece[0])]
    assert len(whole) == (lengths <= 128).sum()


@pytest.mark.parametrize(("mean", "least"), [(30, 0.99), (300, 0.98), (3000, 0.98)])
def test_rows_are_full(mean: int, least: float) -> None:
    """Of lengths as texts have them (log-normal), some two rows of 100 places are padding at most."""
    lengths = np.random.default_rng(0).lognormal(np.log(mean), 1.0, 3000).astype(int) + 1
    _, documents = epoch_of(split_of(lengths.tolist()), 1024)
    assert documents.filling > least


def test_epochs_and_seeds_differ_and_are_the_same_again() -> None:
    split = split_of(np.random.default_rng(1).integers(1, 50, 200).tolist())
    first, second = (epoch_of(split, 64, epoch=epoch)[0] for epoch in (0, 1))
    other = epoch_of(split, 64, seed=1)[0]
    again = epoch_of(split, 64)[0]
    assert (first.inputs == again.inputs).all() and (first.targets == again.targets).all()
    assert (first.inputs != second.inputs).any()
    assert first.inputs.shape != other.inputs.shape or (first.inputs != other.inputs).any()


def test_a_group_is_spread_over_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that documents of one source, which stand together, don't make whole batches."""
    monkeypatch.setattr(packing, "_GROUP", 50)
    split = split_of([10] * 1000)
    documents = Documents(split, 22, 0)
    batch = Batch.empty(25, 22, apart=True)
    for row in range(25):
        documents.fill(row, batch, row)
    places = np.sort(batch.inputs[batch.inputs > 0])
    assert np.diff(places).max() < 4 * 11_000 / 50


# ---- evaluation


@given(lengths=LENGTHS, seq_len=st.integers(1, 12), batch_size=st.integers(1, 5), separated=st.booleans())
def test_evaluation_knows_documents(lengths: list[int], seq_len: int, batch_size: int, separated: bool) -> None:
    lengths = [max(length, separated) for length in lengths]
    split = split_of(lengths, separated)
    if len(split) < 2:
        return
    batches = list(evaluation_rows(split, seq_len, batch_size))
    inputs = np.concatenate([batch.inputs.ravel() for batch in batches])
    targets = np.concatenate([batch.targets.ravel() for batch in batches])
    numbers = np.concatenate([batch.documents.ravel() for batch in batches if batch.documents is not None])
    learned = targets != IGNORED
    assert list(zip(inputs[learned], targets[learned], strict=True)) == pairs_by_hand(lengths, separated, True)
    assert learned.sum() == split.n_targets
    document = np.repeat(np.arange(len(lengths)), lengths)
    n = min(len(document), len(split) - 1)
    assert (numbers[:n] == document[:n]).all()


def test_without_an_index_documents_are_not_known(tmp_path: Path) -> None:
    split = Split("train", [np.arange(5)], COUNTS)
    with pytest.raises(UserError, match=r"the train split doesn't say where its documents end.*prepare it again"):
        split.apart()
