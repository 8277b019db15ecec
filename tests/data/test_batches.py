"""Batches: every token is seen, none at the wrong place, and a position is the whole state."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leftward.data.batches import IGNORED, Dataset, Split, Windows, evaluation_batches
from leftward.errors import UserError

COUNTS = {"documents": 1, "characters": 0, "bytes": 0}


def split_of(length: int, shard: int = 1 << 30) -> Split:
    """Tokens 0, 1, 2 …, so that a token says where it stood."""
    tokens = np.arange(length, dtype=np.uint16)
    return Split("train", [tokens[i : i + shard] for i in range(0, length, shard)] or [tokens], COUNTS)


@given(length=st.integers(1, 60), shard=st.integers(1, 20), data=st.data())
def test_a_slice_crosses_shards(length: int, shard: int, data: st.DataObject) -> None:
    split = split_of(length, shard)
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    assert len(split) == length
    assert split.slice(start, stop).tolist() == list(range(start, stop))


@given(length=st.integers(2, 90), seq_len=st.integers(1, 12), shard=st.integers(1, 20), seed=st.integers(0, 2**40))
def test_an_epoch_covers_the_split_in_windows(length: int, seq_len: int, shard: int, seed: int) -> None:
    split = split_of(length, shard)
    if length < seq_len + 1:
        with pytest.raises(UserError, match=f"{length} tokens, fewer than one window of {seq_len + 1}"):
            Windows(split, seq_len, seed)
        return
    windows = Windows(split, seq_len, seed)
    epoch, position = windows.batch(0, windows.per_epoch)
    assert epoch.dtype == np.int64
    assert epoch.shape == (windows.per_epoch, seq_len + 1)
    assert position == windows.per_epoch
    # Every window runs on without a border in it, and next windows meet in one token: the last target, the first input.
    assert (np.diff(epoch, axis=1) == 1).all()
    starts = np.sort(epoch[:, 0])
    assert (np.diff(starts) == seq_len).all()
    assert length - windows.per_epoch * seq_len < 2 * seq_len + 1  # little is left out of an epoch


def test_no_token_is_always_left_out() -> None:
    """Over epochs each token becomes a target, the tail as well [build-nanogpt 105]."""
    for length in (9, 16, 23, 40):
        windows = Windows(split_of(length), 8, seed=3)
        tokens, _ = windows.batch(0, 200 * windows.per_epoch)
        assert set(tokens[:, 1:].ravel().tolist()) == set(range(1, length))


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8), other=st.integers(1, 9), seed=st.integers(0, 2**20))
def test_the_position_is_the_whole_state(sizes: list[int], other: int, seed: int) -> None:
    """Any batch sizes, and a fresh object in the middle, give the same windows [open_lm 67]."""
    split = split_of(50)
    position, rows = 0, []
    for size in sizes:
        batch, position = Windows(split, 7, seed).batch(position, size)
        rows.append(batch)
    assert position == sum(sizes)
    again = Windows(split, 7, seed)
    at, others = 0, []
    while at < position:
        batch, at = again.batch(at, min(other, position - at))
        others.append(batch)
    assert (np.concatenate(rows) == np.concatenate(others)).all()


def test_epochs_and_seeds_differ() -> None:
    windows = Windows(split_of(1000), 10, seed=1)
    first, position = windows.batch(0, windows.per_epoch)
    second, _ = windows.batch(position, windows.per_epoch)
    other, _ = Windows(split_of(1000), 10, seed=2).batch(0, windows.per_epoch)
    assert (first != second).any()
    assert (first != other).any()


@given(length=st.integers(2, 90), seq_len=st.integers(1, 12), batch_size=st.integers(1, 5), shard=st.integers(1, 20))
def test_evaluation_sees_every_target_once(length: int, seq_len: int, batch_size: int, shard: int) -> None:
    seen: list[int] = []
    batches = list(evaluation_batches(split_of(length, shard), seq_len, batch_size))
    for inputs, targets in batches:
        assert inputs.dtype == targets.dtype == np.int64
        assert inputs.shape == targets.shape == (len(inputs), seq_len)
        assert len(inputs) <= batch_size
        real = targets != IGNORED
        assert (targets[real] == inputs[real] + 1).all()
        assert (inputs[~real] == 0).all()
        seen += targets[real].tolist()
    assert seen == list(range(1, length))
    assert len(batches) == -(-(length - 1) // (seq_len * batch_size))


def test_evaluation_of_less_than_two_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="has 1 tokens: it takes 2"):
        list(evaluation_batches(split_of(1), 8, 2))


# ---- opening


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A dataset written by hand: what dataset.json and the shards must be."""
    np.save(tmp_path / "train-00000.npy", np.arange(5, dtype=np.uint8))
    np.save(tmp_path / "train-00001.npy", np.arange(5, 8, dtype=np.uint8))
    np.save(tmp_path / "val-00000.npy", np.arange(4, dtype=np.uint8))
    sides = {
        "train": [{"name": "train-00000.npy", "tokens": 5}, {"name": "train-00001.npy", "tokens": 3}],
        "val": [{"name": "val-00000.npy", "tokens": 4}],
    }
    index = {
        "format": "leftward-tokens",
        "version": 1,
        "fingerprint": "f",
        "tokenizer_fingerprint": "t",
        "dtype": "uint8",
        "vocab_size": 10,
        "notes": ["a note"],
        "splits": {
            name: {"documents": 2, "characters": 30, "bytes": 33, "tokens": sum(s["tokens"] for s in shards)}
            | {"shards": shards}
            for name, shards in sides.items()
        },
    }
    (tmp_path / "dataset.json").write_text(json.dumps(index))
    return tmp_path


def test_open(dataset: Path) -> None:
    opened = Dataset.open(dataset)
    assert (len(opened.train), len(opened.val), opened.vocab_size) == (8, 4, 10)
    assert opened.train.slice(3, 7).tolist() == [3, 4, 5, 6]
    assert (opened.val.bytes, opened.val.characters, opened.val.documents) == (33, 30, 2)
    assert (opened.fingerprint, opened.tokenizer_fingerprint, opened.notes) == ("f", "t", ["a note"])


def test_a_damaged_dataset_is_refused_by_name(dataset: Path) -> None:
    shard = dataset / "train-00001.npy"
    whole = shard.read_bytes()
    for broken, message in [
        (whole[:-1], r"train-00001\.npy is damaged"),
        (whole[:20], r"train-00001\.npy is damaged"),
        (b"", r"train-00001\.npy is damaged"),
        (b"text", r"train-00001\.npy is damaged"),
    ]:
        shard.write_bytes(broken)
        with pytest.raises(UserError, match=message):
            Dataset.open(dataset)
    np.save(shard, np.arange(2, dtype=np.uint8))
    with pytest.raises(UserError, match=r"train-00001\.npy holds 2 × uint8, not 3 × uint8"):
        Dataset.open(dataset)
    np.save(shard, np.arange(3, dtype=np.uint16))
    with pytest.raises(UserError, match=r"train-00001\.npy holds 3 × uint16, not 3 × uint8"):
        Dataset.open(dataset)
    shard.unlink()
    with pytest.raises(UserError, match=r"train-00001\.npy is missing"):
        Dataset.open(dataset)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "does not describe a dataset"),
        ({"version": 2}, "is of version 2, this program reads 1"),
        ({"splits": {"train": {}}}, r"damaged \(KeyError: 'shards'\)"),
        ({"splits": None}, "damaged"),
    ],
)
def test_a_damaged_index_is_refused(dataset: Path, change: dict[str, object], message: str) -> None:
    path = dataset / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=rf"dataset\.json.*{message}"):
        Dataset.open(dataset)
    path.write_text("{")
    with pytest.raises(UserError, match=r"dataset\.json is damaged"):
        Dataset.open(dataset)
    path.unlink()
    with pytest.raises(UserError, match=r"dataset\.json is missing"):
        Dataset.open(dataset)
