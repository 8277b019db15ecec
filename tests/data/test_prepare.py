"""Preparing data: the split, the layout of tokens, the shards and what is written down about them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leftward.data import encoding, merge, sources
from leftward.data import prepare as module
from leftward.data.batches import Split
from leftward.data.prepare import Settings, prepare
from leftward.errors import UserError
from leftward.text.tokenizer import KINDS, Kind, Tokenizer

BUILTIN = "builtin:python-reference"


def write_documents(path: Path, documents: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return str(path)


def decoded_documents(tokenizer: Tokenizer, split: Split) -> list[str]:
    """The documents of a split, from its tokens."""
    ids = split.slice(0, len(split)).tolist()
    assert ids[0] == ids[-1] == tokenizer.eos_id
    documents: list[list[int]] = []
    for token in ids[:-1]:
        if token == tokenizer.eos_id:
            documents.append([])
        else:
            documents[-1].append(token)
    return [tokenizer.decode(document) for document in documents]


# ---- one document


def test_tiny_shakespeare_is_split_as_in_nanogpt(shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "tinyshakespeare" / "input.txt"
    text = path.read_text(encoding="utf-8")
    tokenizer, dataset = prepare(Settings(paths=(str(path),), tokenizer="char"), tmp_path / "out", seed=0)
    assert tokenizer.vocab_size == 65 + 1
    assert (dataset.train.characters, dataset.val.characters) == (1_003_854, 111_540)
    assert (len(dataset.train), len(dataset.val)) == (1 + 1_003_854, 111_540)
    assert dataset.train.slice(0, 1).tolist() == [tokenizer.eos_id]
    assert tokenizer.decode(dataset.train.slice(1, len(dataset.train))) == text[:1_003_854]
    assert tokenizer.decode(dataset.val.slice(0, len(dataset.val))) == text[1_003_854:]
    assert dataset.notes == [
        "the data is a single document: training has its first 1,003,854 characters, validation the last 111,540"
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_single_document_is_cut_exactly(tmp_path: Path, kind: Kind) -> None:
    text = "".join(f"Zeile {i}: naïve 猫\r\n" for i in range(40_000))  # several pieces, and no cut on their borders
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    tokenizer, dataset = prepare(
        Settings(paths=(str(tmp_path / "a.txt"),), tokenizer=kind, val_fraction=0.3), tmp_path / "out", seed=0
    )
    head = len(text) * 7 // 10
    assert dataset.train.characters == head
    assert dataset.val.bytes == len(text[head:].encode())
    train = dataset.train.slice(1, len(dataset.train))
    stream = tokenizer.stream_decoder(context=train)
    tail = "".join(stream.feed(i) for i in dataset.val.slice(0, len(dataset.val))) + stream.flush()
    assert tokenizer.decode(train) == text[:head]
    assert tail == text[head:]


@given(characters=st.integers(2, 5_000_000), thousandths=st.integers(1, 999))
def test_the_cut_is_free_of_rounding(characters: int, thousandths: int) -> None:
    """int(10 · (1 - 0.9)) is 0 in binary; here it is 1."""
    head = module.head_of(characters, thousandths / 1000)
    assert head == characters * (1000 - thousandths) // 1000
    assert module.head_of(1_115_394, 0.1) == 1_003_854


# ---- many documents


def test_documents_are_split_whole_and_separated(tmp_path: Path) -> None:
    tokenizer, dataset = prepare(Settings(paths=(BUILTIN,)), tmp_path / "out", seed=7)
    report = sources.Report()
    everything = [piece.text for piece in sources.read(sources.find([BUILTIN], report), report)]
    train, val = decoded_documents(tokenizer, dataset.train), decoded_documents(tokenizer, dataset.val)
    assert sorted(train + val) == sorted(everything)
    assert [text for text in everything if text in set(train)] == train  # in their order
    assert (dataset.train.documents, dataset.val.documents) == (len(train), len(val))
    for split, texts in ((dataset.train, train), (dataset.val, val)):
        assert split.characters == sum(map(len, texts))
        assert split.bytes == sum(len(text.encode()) for text in texts)
        assert len(split) == sum(len(tokenizer.encode(text)) for text in texts) + len(texts) + 1
    total = dataset.train.bytes + dataset.val.bytes
    assert 0.1 <= dataset.val.bytes / total < 0.2
    assert dataset.notes == []


def test_without_special_tokens_nothing_separates(tmp_path: Path) -> None:
    path = write_documents(tmp_path / "a.jsonl", ["abc", "bca", "cab"])
    settings = Settings(paths=(path,), tokenizer="char", special_tokens=())
    _, dataset = prepare(settings, tmp_path / "out", seed=0)
    assert (len(dataset.train), len(dataset.val)) == (6, 3)


def test_the_split_depends_on_the_seed_only(tmp_path: Path) -> None:
    runs = [
        prepare(Settings(paths=(BUILTIN,), tokenizer="char"), tmp_path / str(i), seed=seed)[1]
        for i, seed in enumerate((1, 1, 2, 2**63 + 5, -1))
    ]
    same, again, *others = (run.val.slice(0, len(run.val)).tolist() for run in runs)
    assert same == again
    assert runs[0].fingerprint == runs[1].fingerprint
    assert same not in others
    assert len({run.fingerprint for run in runs}) == 4


@pytest.mark.parametrize("threshold", [10_000, 50])
def test_copies_of_a_document_stay_on_one_side(tmp_path: Path, threshold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few documents, where the split is exact, and with many, where each is drawn by itself."""
    monkeypatch.setattr(merge, "_EXACT_SPLIT_DOCUMENTS", threshold)
    documents = [f"document {i % 70}" for i in range(210)]
    path = write_documents(tmp_path / "a.jsonl", documents)
    tokenizer, dataset = prepare(Settings(paths=(path,), val_fraction=0.2), tmp_path / "out", seed=3)
    train, val = decoded_documents(tokenizer, dataset.train), decoded_documents(tokenizer, dataset.val)
    assert dataset.index["split_by"] == ("keys" if threshold > 210 else "threshold")
    assert sorted(train + val) == sorted(documents)
    assert not set(train) & set(val)
    assert all(val.count(text) == 3 for text in val)
    assert 0.1 < len(val) / 210 < 0.35


def test_small_documents_among_large_ones_stay_on_both_sides(tmp_path: Path) -> None:
    documents = [*(f"small {i}" for i in range(40)), "large " * 1000, "larger " * 1000]
    path = write_documents(tmp_path / "a.jsonl", documents)
    tokenizer, dataset = prepare(Settings(paths=(path,), tokenizer="char"), tmp_path / "out", seed=0)
    train = decoded_documents(tokenizer, dataset.train)
    assert len([text for text in train if text.startswith("small")]) >= 19


def test_a_document_larger_than_the_share_stays_in_training(tmp_path: Path) -> None:
    for seed in range(5):
        documents = ["large " * 1000, *(f"small {i}" for i in range(20))]
        path = write_documents(tmp_path / f"{seed}.jsonl", documents)
        _, dataset = prepare(
            Settings(paths=(path,), tokenizer="char", val_fraction=0.01), tmp_path / f"out{seed}", seed=seed
        )
        assert dataset.val.bytes < 0.02 * dataset.train.bytes
    two = write_documents(tmp_path / "two.jsonl", ["one " * 100, "two " * 90])
    _, dataset = prepare(Settings(paths=(two,), tokenizer="char"), tmp_path / "two", seed=0)
    assert (dataset.val.bytes, dataset.train.bytes) == (360, 400)
    assert dataset.notes == ["documents are few and large: validation holds 47% of the bytes"]


def test_validation_text_of_its_own(tmp_path: Path) -> None:
    train = write_documents(tmp_path / "train.jsonl", ["abc", "bcd"])
    (tmp_path / "val.txt").write_text("xyz")
    settings = Settings(paths=(train,), val_paths=(str(tmp_path / "val.txt"),), tokenizer="char", val_fraction=0)
    tokenizer, dataset = prepare(settings, tmp_path / "out", seed=0)
    assert decoded_documents(tokenizer, dataset.train) == ["abc", "bcd"]
    assert decoded_documents(tokenizer, dataset.val) == ["xyz"]
    assert dataset.index["val_fraction"] is None


def test_a_ready_tokenizer_is_used_as_it_is(tmp_path: Path) -> None:
    ready = Tokenizer.train(["abcd"], kind="char")
    path = write_documents(tmp_path / "a.jsonl", ["ab", "cd"])
    tokenizer, dataset = prepare(Settings(paths=(path,)), tmp_path / "out", seed=0, tokenizer=ready)
    assert tokenizer is ready
    assert dataset.tokenizer_fingerprint == ready.fingerprint() == Tokenizer.load(tmp_path / "out").fingerprint()
    other = write_documents(tmp_path / "b.jsonl", ["ab", "cx"])
    with pytest.raises(UserError, match=r"lacks the character 'x'"):
        prepare(Settings(paths=(other,)), tmp_path / "other", seed=0, tokenizer=ready)
    assert not list(tmp_path.glob("other*"))


def test_text_that_looks_like_a_separator_is_text(tmp_path: Path) -> None:
    texts = ["one<|endoftext|>two", "three", "four"]
    path = write_documents(tmp_path / "a.jsonl", texts)
    tokenizer, dataset = prepare(Settings(paths=(path,)), tmp_path / "out", seed=0)
    found = decoded_documents(tokenizer, dataset.train) + decoded_documents(tokenizer, dataset.val)
    assert sorted(found) == sorted(texts)


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one two three")))
    settings = Settings(paths=("-",), tokenizer="char", val_fraction=0.5)
    _, dataset = prepare(settings, tmp_path / "out", seed=0)
    assert dataset.train.characters == 6
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "dataset.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "train-00000.npy",
        "train-documents.npy",
        "val-00000.npy",
        "val-documents.npy",
    ]


def test_what_was_left_out_is_said(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    lines = ['{"text": "one"}', "{", '{"text": " "}', '{"text": "two"}']
    (tmp_path / "data" / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "data" / "b.txt").touch()
    (tmp_path / "data" / "c.png").touch()
    settings = Settings(paths=(str(tmp_path / "data"),), bad_lines="skip", tokenizer_bytes=2)
    _, dataset = prepare(settings, tmp_path / "out", seed=0)
    bad, *others = dataset.notes[1:]
    assert bad.startswith("1 bad lines left out, the first: ")
    assert "a.jsonl:2: not JSON" in bad
    assert others == [
        "1 empty documents left out",
        "1 empty files left out",
        "1 files of other kinds left out",
        "3 bytes of text not seen by the tokenizer's training",
    ]
    assert dataset.index["bad_lines"] == 1


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, int, int | None]] = []
    settings = Settings(paths=(BUILTIN,), tokenizer="char")
    prepare(settings, tmp_path / "out", seed=0, on_progress=lambda *step: told.append(step))
    total = told[-1][1]
    assert told[-1] == ("encoding", total, total)
    assert ("reading", total, None) in told


# ---- shards


def test_shards_are_filled_and_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(Settings(paths=(BUILTIN,)), tmp_path / "whole", seed=0)[1]
    monkeypatch.setattr(merge, "_SHARD_TOKENS", 10_000)
    monkeypatch.setattr(module, "_BATCH_CHARACTERS", 7_000)
    parted = prepare(Settings(paths=(BUILTIN,)), tmp_path / "parted", seed=0)[1]
    counts = [shard["tokens"] for shard in parted.index["splits"]["train"]["shards"]]
    assert set(counts[:-1]) == {10_000}
    assert len(counts) == -(-len(whole.train) // 10_000)
    assert (whole.train.slice(0, len(whole.train)) == parted.train.slice(0, len(parted.train))).all()
    for path in (tmp_path / "parted").glob("*-0*.npy"):
        assert np.load(path).dtype == np.uint16


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_the_type_fits_the_vocabulary(vocab_size: int, dtype: str) -> None:
    assert np.dtype(encoding.smallest_type(vocab_size)).name == dtype
    assert np.array(vocab_size - 1).astype(encoding.smallest_type(vocab_size)) == vocab_size - 1


def test_ids_above_16_bits_survive(tmp_path: Path) -> None:
    characters = [chr(0x10000 + i) for i in range(70_000)]
    path = write_documents(tmp_path / "a.jsonl", ["".join(characters), "".join(characters[::-1])])
    tokenizer, dataset = prepare(Settings(paths=(path,), tokenizer="char"), tmp_path / "out", seed=0)
    assert dataset.index["dtype"] == "uint32"
    assert decoded_documents(tokenizer, dataset.val)[0] in ("".join(characters), "".join(characters[::-1]))


# ---- what is refused; nothing is left behind


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("", {}, "is empty"),
        (" \n\t\n", {}, r"no documents in .*data\.txt"),
        ("x", {}, "validation split would be empty: 1 characters"),
        ("x\nx\nx", {"document_separator": "\n"}, "validation split would be empty: all 3 documents begin alike"),
        ("text", {"val_fraction": 0.0}, r"val_fraction is 0\.0"),
        ("text", {"val_fraction": 1.0}, r"val_fraction is 1\.0"),
        ("text", {"vocab_size": 9999}, "larger than the corpus supports"),
        ("text", {"tokenizer": "chars"}, "did you mean char"),
    ],
)
def test_data_that_does_not_do_is_refused(
    tmp_path: Path, content: str, options: dict[str, object], message: str
) -> None:
    path = tmp_path / "data.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        prepare(Settings(paths=(str(path),), **options), tmp_path / "out", seed=0)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == [path]


def test_only_bad_lines_is_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "x"}\n' * 3)
    with pytest.raises(UserError, match=r"no documents in .*; 3 bad lines, the first: .*a\.jsonl:1: no field 'text'"):
        prepare(Settings(paths=(str(path),), bad_lines="skip"), tmp_path / "out", seed=0)


def test_a_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    prepare(Settings(paths=(BUILTIN,), tokenizer="char"), tmp_path / "out", seed=0)  # an empty one will do
    before = (tmp_path / "out" / "dataset.json").read_bytes()
    with pytest.raises(UserError, match="out already exists"):
        prepare(Settings(paths=(BUILTIN,), tokenizer="char"), tmp_path / "out", seed=1)
    assert (tmp_path / "out" / "dataset.json").read_bytes() == before


def test_text_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one two three four")

    def change(stage: str, done: int, total: int | None) -> None:
        path.write_text("one two three fore")

    with pytest.raises(UserError, match="the text changed"):
        prepare(Settings(paths=(str(path),), tokenizer="char"), tmp_path / "out", seed=0, on_progress=change)
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_line_and_what_was_done_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(paths=(BUILTIN,), tokenizer="char")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for writer in (module.NpyWriter, merge._Side):
        with monkeypatch.context() as patch:
            patch.setattr(writer, "append", full)
            with pytest.raises(UserError, match=r"cannot write .*: the disk is full"):
                prepare(settings, tmp_path / "out", seed=0)
        assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    monkeypatch.setattr(module, "_encode", full)  # which was done before the disk was full again
    prepare(settings, tmp_path / "out", seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ---- memory

_MEASURE = """
import resource, sys
from pathlib import Path
from leftward.data import prepare as module
from leftward.data.prepare import Settings, prepare
module._PART_BYTES = 1 << 22
settings = Settings(paths=(sys.argv[1],), tokenizer=sys.argv[3], tokenizer_bytes=1_000_000, dedup=sys.argv[4])
prepare(settings, Path(sys.argv[2]), seed=0, processes=int(sys.argv[5]))
for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
    print(resource.getrusage(who).ru_maxrss // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
@pytest.mark.parametrize("shape", ["one document", "many documents"])
@pytest.mark.parametrize(
    ("kind", "dedup", "processes", "megabytes"), [("char", "exact", 0, (8, 32)), ("bpe", "none", 2, (3, 24))]
)
def test_memory_does_not_grow_with_the_data(
    tmp_path: Path, shape: str, kind: Kind, dedup: str, processes: int, megabytes: tuple[int, int]
) -> None:
    """Data of a size and of four times that are prepared within a few megabytes of the same memory."""
    line = "The quick brown fox jumps over the lazy dog and goes home again, number {:07d}.\n"
    peaks = []
    for count in (size * 1_000_000 // len(line) // 100 * 100 for size in megabytes):
        path = tmp_path / f"{count}.{'txt' if shape == 'one document' else 'jsonl'}"
        with path.open("w") as file:
            for i in range(count // 100):
                text = "".join(line.format(i * 100 + j) for j in range(100))
                file.write(text if shape == "one document" else json.dumps({"text": text}) + "\n")
        command = [sys.executable, "-c", _MEASURE, path, tmp_path / f"out{count}", kind, dedup, str(processes)]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "2"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        peaks.append([int(peak) for peak in done.stdout.split()])
    assert all(large - small < megabytes[1] / 2 for small, large in zip(*peaks, strict=True)), peaks
