"""The order of training: a function of the position alone, whatever the batch, the ranks and the mixture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leftward.data.batches import IGNORED, Batch, Dataset, Part, Split, Windows, is_dataset, link
from leftward.data.order import Order, Packing, share
from leftward.data.prepare import Settings, prepare
from leftward.errors import UserError
from leftward.text.tokenizer import Tokenizer

INDEX = {"vocab_size": 1 << 20, "fingerprint": "f", "tokenizer_fingerprint": "t", "notes": []}


def dataset_of(start: int, documents: int, length: int = 13) -> Dataset:
    """Tokens that are numbers from `start` on, so that one says of which dataset it is."""
    n = documents * length
    tokens = np.arange(start, start + n + 1)
    counts = {"documents": documents, "characters": n, "bytes": n}
    ends = np.arange(1, documents + 1) * length
    split = Split("train", [tokens], counts, 1 << 20, ends=ends)
    return Dataset(Path(f"from-{start}"), INDEX, split, split)


def mixture(parts: list[tuple[Dataset, float]]) -> Dataset:
    train = Split.joined([part.train for part, _ in parts])
    return Dataset(Path("mix"), INDEX, train, train, [Part(part, weight) for part, weight in parts])


def same(a: Batch, b: Batch) -> bool:
    return all(np.array_equal(x, y) if x is not None else y is None for x, y in zip(a, b, strict=True))


def joined(batches: list[Batch]) -> Batch:
    return Batch(*(None if column[0] is None else np.concatenate(column) for column in zip(*batches, strict=True)))  # type: ignore[arg-type]


MIX = [(0, 40, 3.0), (10_000, 9, 0.5), (20_000, 100, 1.5)]


def make_order(packing: Packing, n_parts: int, seed: int = 0) -> Order:
    parts = [(dataset_of(start, documents), weight) for start, documents, weight in MIX[:n_parts]]
    dataset = parts[0][0] if n_parts == 1 else mixture(parts)
    return Order(dataset, 16, seed, packing)


def test_one_dataset_in_windows_is_as_ever() -> None:
    """Inputs and targets are the windows, shifted by one."""
    dataset = dataset_of(0, 100)
    batch, position = Order(dataset, 16, seed=5).batch(7, 90)
    windows, _ = Windows(dataset.train, 16, seed=5).batch(7, 90)
    assert position == 97
    assert batch.documents is None
    assert (batch.inputs == windows[:, :-1]).all() and (batch.targets == windows[:, 1:]).all()
    assert batch.inputs.dtype == batch.targets.dtype == np.int64
    assert batch.n_targets == 90 * 16


@given(
    packing=st.sampled_from(["concatenate", "documents"]),
    n_parts=st.integers(1, 3),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    ranks=st.integers(1, 4),
    start=st.integers(0, 1000),
)
def test_neither_batch_size_nor_ranks_change_the_rows(
    packing: Packing, n_parts: int, sizes: list[int], ranks: int, start: int
) -> None:
    total = sum(sizes) * ranks
    whole, after = make_order(packing, n_parts).batch(start, total)
    position, batches = start, []
    for size in sizes:  # each rank an object of its own, as it were another process
        for rank in range(ranks):
            first, rows = share(position, size * ranks, rank, ranks)
            batches.append(make_order(packing, n_parts).batch(first, rows)[0])
        position += size * ranks
    assert position == after == start + total
    assert same(joined(batches), whole)


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    assert [share(24, 12, rank, 3) for rank in range(3)] == [(24, 4), (28, 4), (32, 4)]
    with pytest.raises(UserError, match="batch_size 16 is not divisible by 3 ranks: take a multiple of 3"):
        share(0, 16, 0, 3)


@given(weights=st.lists(st.floats(0.001, 1000), min_size=1, max_size=6), position=st.integers(0, 10**12))
def test_shares_of_a_mixture_are_those_of_the_weights(weights: list[float], position: int) -> None:
    """At every position, to less than a row for every dataset; and exactly one takes the next row."""
    order = Order(mixture([(dataset_of(1000 * i, 5), weight) for i, weight in enumerate(weights)]), 16, 0)
    taken, after = order._taken(position), order._taken(position + 1)
    assert sum(taken) == position
    for n, weight in zip(taken, weights, strict=True):
        assert abs(n - position * weight / sum(weights)) < len(weights) + 1e-3
    assert sorted(b - a for a, b in zip(taken, after, strict=True)) == [0] * (len(weights) - 1) + [1]


@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_rows_of_a_mixture_are_whole_rows_of_its_parts(packing: Packing) -> None:
    """Each dataset gives the rows that it would give alone, in its own order: the order of a part is not disturbed."""
    batch, _ = make_order(packing, 3).batch(0, 500)
    real = np.where(batch.targets != IGNORED, batch.targets, 0)
    of_row = real.max(axis=1) // 10_000
    assert ((real // 10_000 == of_row[:, None]) | (real == 0)).all() or packing == "concatenate"
    assert np.bincount(of_row).tolist() == [300, 50, 150]
    for number, (start, documents, _) in enumerate(MIX):
        alone, _ = Order(dataset_of(start, documents), 16, number, packing).batch(0, 500)
        rows = of_row == number
        assert (batch.inputs[rows] == alone.inputs[: rows.sum()]).all()
        assert (batch.targets[rows] == alone.targets[: rows.sum()]).all()


def test_epochs_are_counted_for_each_dataset() -> None:
    order = make_order("concatenate", 3)
    per_epoch = [max(1, (documents * 13 + 1) // 16 - 1) for _, documents, _ in MIX]
    wanted = {f"from-{s}": n / e for (s, *_), n, e in zip(MIX, (300, 50, 150), per_epoch, strict=True)}
    assert order.epochs(500) == wanted
    assert order.epochs(0) == dict.fromkeys(wanted, 0.0)


def test_ids_that_no_vocabulary_has_are_named() -> None:
    dataset = dataset_of(1 << 20, 50)
    for packing in ("concatenate", "documents"):
        with pytest.raises(UserError, match="the train split holds token"):
            Order(dataset, 16, 0, packing).batch(0, 4)  # type: ignore[arg-type]


# ---- datasets of datasets


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


@pytest.fixture
def prepared(tmp_path: Path) -> dict[str, Path]:
    """Three datasets, of which the last has another tokenizer."""
    tokenizer = Tokenizer.train(["abcdefg "], kind="char")
    for name, letters, tokens in (("a", "abc", tokenizer), ("b", "de", tokenizer), ("c", "fg", None)):
        texts = ["".join(letters[(i * j) % len(letters)] for j in range(30)) for i in range(20)]
        settings = Settings(paths=(write(tmp_path / f"{name}.jsonl", texts),), tokenizer="char")
        prepare(settings, tmp_path / name, seed=0, tokenizer=tokens)
    return {name: tmp_path / name for name in "abc"}


def contents(dataset: Dataset, side: str) -> list[int]:
    split = getattr(dataset, side)
    return split.slice(0, len(split)).tolist()


def test_a_link_to_one_dataset_is_that_dataset(prepared: dict[str, Path], tmp_path: Path) -> None:
    linked = link({str(prepared["a"]): 2.0}, tmp_path / "run" / "tokens")
    original = Dataset.open(prepared["a"])
    assert linked.fingerprint == original.fingerprint
    assert linked.index["split_by"] == "keys" and linked.index["eos_id"] == 0
    for side in ("train", "val"):
        assert contents(linked, side) == contents(original, side)
        assert getattr(linked, side).bytes == getattr(original, side).bytes
    assert Tokenizer.load(linked.directory).fingerprint() == linked.tokenizer_fingerprint
    assert not list(linked.directory.glob("*.npy"))
    orders = [Order(dataset, 8, 3, "documents").batch(5, 40)[0] for dataset in (linked, original)]
    assert same(*orders)
    assert is_dataset(str(prepared["a"])) and not is_dataset(str(tmp_path / "a.jsonl"))


def test_a_mixture_knows_all_its_tokens(prepared: dict[str, Path], tmp_path: Path) -> None:
    linked = link({str(prepared["a"]): 1.0, str(prepared["b"]): 3.0}, tmp_path / "tokens")
    originals = [Dataset.open(prepared[name]) for name in "ab"]
    for side in ("train", "val"):
        first, second = (contents(original, side) for original in originals)
        assert first[-1] == second[0] == 0
        assert contents(linked, side) == first[:-1] + second  # one separator between them, not two
        split = getattr(linked, side)
        assert split.documents == sum(getattr(original, side).documents for original in originals)
        assert np.flatnonzero(np.array(contents(linked, side)) == 0).tolist() == [0, *split.ends.tolist()]
    batch, _ = Order(linked, 8, 0).batch(0, 40)
    letters = [Tokenizer.load(prepared["a"]).decode(row) for row in batch.inputs.tolist()]
    assert sum(set(row) <= set("abc") for row in letters) == 10
    assert sum(set(row) <= set("de") for row in letters) == 30
    assert linked.fingerprint not in [original.fingerprint for original in originals]
    other = link({str(prepared["a"]): 1.0, str(prepared["b"]): 2.0}, tmp_path / "other")
    assert other.fingerprint != linked.fingerprint


def test_what_cannot_be_mixed(prepared: dict[str, Path], tmp_path: Path) -> None:
    a, b, c = (str(prepared[name]) for name in "abc")
    with pytest.raises(UserError, match=r"/c was made with another tokenizer than .*/a: prepare it with that one"):
        link({a: 1.0, c: 1.0}, tmp_path / "tokens")
    with pytest.raises(UserError, match=r"dataset\.json is missing"):
        link({a: 1.0, str(tmp_path): 1.0}, tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()
    link({a: 1.0, b: 1.0}, tmp_path / "tokens")
    index = json.loads((prepared["b"] / "dataset.json").read_text())
    (prepared["b"] / "dataset.json").write_text(json.dumps({**index, "fingerprint": "other"}))
    with pytest.raises(UserError, match=r"/b does not hold the tokens that it held when .*tokens was made"):
        Dataset.open(tmp_path / "tokens")


def index_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "dataset.json").read_text())  # type: ignore[no-any-return]


def test_a_dataset_of_an_older_version_can_be_read_in_windows(prepared: dict[str, Path]) -> None:
    index = index_of(prepared["a"])
    for side in index["splits"].values():
        del side["ends"]
    (prepared["a"] / "dataset.json").write_text(json.dumps(index))
    dataset = Dataset.open(prepared["a"])
    Order(dataset, 8, 0).batch(0, 4)
    with pytest.raises(UserError, match="was prepared by an older version"):
        Order(dataset, 8, 0, "documents")
