"""Preparing much: kills, shards, processes and copies change nothing in what is made, to the byte."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from leftward import files
from leftward.data import merge as merging
from leftward.data import prepare as module
from leftward.data import sources
from leftward.data.batches import Dataset
from leftward.data.encoding import Encoder, Text, encoders
from leftward.data.merge import merge
from leftward.data.prepare import Settings, prepare, prepare_shard
from leftward.data.work import partial
from leftward.errors import UserError
from leftward.formats.gguf import GGUF
from leftward.text.tokenizer import Tokenizer

SMALL = {"_UNIT_BYTES": 20_000, "_PART_BYTES": 15_000, "_BATCH_CHARACTERS": 3_000}
WORDS = ["the", "of", "and", "wolf", "sheep", "naïve", "猫", "Волк", "λύκος", "\t", "runs", "\n"]


def document(seed: int, words: int = 0) -> str:
    random_ = random.Random(seed)
    return " ".join(
        random_.choice(WORDS) + str(random_.randrange(20)) for _ in range(words or random_.randrange(3, 90))
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of everything: plain and compressed, long and short, with copies, bad lines and empty documents."""
    directory = tmp_path_factory.mktemp("text")
    lines = [json.dumps({"text": document(i % 300)}) for i in range(400)]
    lines[37], lines[250], lines[390] = "{", json.dumps({"text": "  "}), json.dumps({"texts": "x"})
    (directory / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with gzip.open(directory / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": document(i)}) + "\n" for i in range(280, 500))
    for i in range(3):
        (directory / f"c{i}.txt").write_text(document(1000 + i, words=3000), encoding="utf-8")
    return directory


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units, parts, batches and shards so small that there are many."""
    for name, value in SMALL.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(merging, "_SHARD_TOKENS", 5_000)
    monkeypatch.setattr(files, "_sync", lambda path: None)  # for a power cut only, and slow


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def settings_of(text: Path, **options: Any) -> Settings:
    return Settings(paths=(str(text),), vocab_size=300, bad_lines="skip", **options)


# ---- kills

SCRIPT = """
import os, signal, sys
from pathlib import Path
from leftward import files
from leftward.data import merge, prepare
from leftward.data.npy import NpyWriter
from leftward.data.settings import Settings

text, out, small, deadly = sys.argv[1], Path(sys.argv[2]), eval(sys.argv[3]), int(sys.argv[4])
vars(prepare).update(small)
merge._SHARD_TOKENS = 5_000
calls = 0
def counted(function):
    def wrapped(*args, **kwargs):
        global calls
        calls += 1
        if calls == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapped
files._sync = counted(lambda path: None)  # for a power cut only, and slow
NpyWriter.append = counted(NpyWriter.append)
NpyWriter.close = counted(NpyWriter.close)
settings = Settings(paths=(text,), vocab_size=300, bad_lines="skip", dedup="exact")
prepare.prepare(settings, out, seed=3, processes=2)
print(calls)
"""


def command(text: Path, out: Path, deadly: int = 0) -> list[str]:
    return [sys.executable, "-c", SCRIPT, str(text), str(out), repr(SMALL), str(deadly)]


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], int]:
    """What is made, and in how many writes."""
    out = tmp_path_factory.mktemp("whole") / "out"
    done = subprocess.run(command(text, out), check=True, capture_output=True, text=True)
    return contents(out), int(done.stdout)


def test_there_is_much_to_kill(uninterrupted: tuple[dict[str, bytes], int]) -> None:
    made, writes = uninterrupted
    assert writes > 300
    assert len([name for name in made if name.startswith("train-0")]) > 4


@pytest.mark.parametrize("moment", range(12))
def test_a_killed_process_goes_on_to_the_byte(
    text: Path, tmp_path: Path, uninterrupted: tuple[dict[str, bytes], int], moment: int, small: None
) -> None:
    """SIGKILL at a random write of each twelfth of all; then another number of processes goes on."""
    whole, writes = uninterrupted
    deadly = random.Random(moment).randrange(moment * writes // 12 + 1, (moment + 1) * writes // 12 + 1)
    killed = subprocess.run(command(text, tmp_path / "out", deadly), capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "out").exists()
    prepare(settings_of(text, dedup="exact"), tmp_path / "out", seed=3, processes=0)
    assert contents(tmp_path / "out") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_process_killed_again_and_again_ends(
    text: Path, tmp_path: Path, uninterrupted: tuple[dict[str, bytes], int]
) -> None:
    """From outside, at moments of the clock."""
    random_ = random.Random(0)
    for _ in range(10):
        process = subprocess.Popen(command(text, tmp_path / "out"), stdout=subprocess.DEVNULL)
        time.sleep(random_.uniform(0.3, 1.5))
        process.kill()
        process.wait()
    subprocess.run(command(text, tmp_path / "out"), check=True, stdout=subprocess.DEVNULL)
    assert contents(tmp_path / "out") == uninterrupted[0]


def test_what_was_done_is_not_done_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    """After an interruption, only texts whose parts were not whole are encoded."""
    encoded: list[str] = []
    encode = Encoder.__call__

    def interrupted(self: Encoder, texts: list[Text]) -> Any:
        encoded.extend(text.text for text in texts)
        if len(encoded) > 400 and not resumed:
            raise KeyboardInterrupt
        return encode(self, texts)

    monkeypatch.setattr(Encoder, "__call__", interrupted)
    resumed = False
    with pytest.raises(KeyboardInterrupt):
        prepare(settings_of(text), tmp_path / "out", seed=0)
    before, resumed = len(encoded), True
    encoded.clear()
    prepare(settings_of(text), tmp_path / "out", seed=0)
    n = 400 + 220 + 3 - 3  # documents
    assert n - before <= len(encoded) <= n - before + 150  # a part's worth is done twice


# ---- the same command, and another one


def test_the_same_command_on_a_finished_dataset_does_nothing(text: Path, tmp_path: Path) -> None:
    prepare(settings_of(text), tmp_path / "out", seed=0)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    _, dataset = prepare(settings_of(text), tmp_path / "out", seed=0)
    assert dataset.index["report"]["documents"] == 400 + 220 + 3 - 3
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for change in ({"seed": 1}, {"settings": settings_of(text, val_fraction=0.2)}):
        with pytest.raises(UserError, match="out already exists"):
            prepare(**{"settings": settings_of(text), "seed": 0, **change}, out=tmp_path / "out")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"out\.partial was begun with seed 0, not 1: give that command again, or remove"),
        ({"dedup": "exact"}, "was begun with dedup 'none', not 'exact'"),
        ({"bad_lines": "stop"}, "was begun with bad_lines 'skip', not 'stop'"),
        ("longer", r"a\.txt changed since .*out\.partial was begun: remove"),
        ("other", r"a\.txt changed since .*out\.partial was begun: remove"),
        ("more", r"there are 2 files to read, and were 1 when .*out\.partial was begun"),
    ],
)
def test_another_command_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, message: str) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("some text " * 100)
    options: dict[str, Any] = {"paths": (str(folder),), "tokenizer": "char", "bad_lines": "skip"}

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_encode", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(Settings(**options), tmp_path / "out", seed=0)
    match change:
        case "longer":
            (folder / "a.txt").write_text("some text " * 101)
        case "other":
            (folder / "a.txt").write_text("some_text " * 100)
            os.utime(folder / "a.txt", (1, 1))
        case "more":
            (folder / "b.txt").write_text("more")
        case _:
            options |= {name: value for name, value in change.items() if name != "seed"}
    seed = change.get("seed", 0) if isinstance(change, dict) else 0
    with pytest.raises(UserError, match=message):
        prepare(Settings(**options), tmp_path / "out", seed=seed)
    assert (tmp_path / "out.partial" / "shard-1-of-1" / "survey.json").exists()  # what was done stays


def test_one_process_at_a_time(text: Path, tmp_path: Path) -> None:
    def again(*_: object) -> None:
        with pytest.raises(UserError, match="is in use by another process"):
            prepare(settings_of(text), tmp_path / "out", seed=0)

    prepare(settings_of(text), tmp_path / "out", seed=0, on_progress=again)


# ---- shards


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([document(i) for i in range(300)], vocab_size=300)


@pytest.mark.parametrize("of", [2, 3, 7])
def test_shards_are_what_one_process_makes(
    text: Path, tmp_path: Path, tokenizer: Tokenizer, of: int, small: None
) -> None:
    settings = settings_of(text, dedup="near")
    prepare(settings, tmp_path / "one", seed=5, tokenizer=tokenizer)
    order = random.Random(of).sample(range(1, of + 1), of)
    for number in order:
        assert not (tmp_path / "out").exists()
        dataset = prepare_shard(settings, tmp_path / "out", number, of, seed=5, tokenizer=tokenizer)
        assert (dataset is not None) == (number == order[-1])
    assert contents(tmp_path / "out") == contents(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out"]
    # a scheduler may start one again
    assert prepare_shard(settings, tmp_path / "out", 1, of, seed=5, tokenizer=tokenizer) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out"]


def test_shards_share_out_the_work(text: Path, tmp_path: Path, tokenizer: Tokenizer, small: None) -> None:
    sizes = []
    for number in (1, 2, 3, 4):
        prepare_shard(settings_of(text), tmp_path / f"{number}", number, 4, seed=0, tokenizer=tokenizer)
        parts = (partial(tmp_path / f"{number}") / f"shard-{number}-of-4" / "parts").glob("*/part.json")
        sizes.append(sum(json.loads(path.read_text())["bytes"] for path in parts))
    assert min(sizes) > sum(sizes) / 16


def test_shards_of_their_own_directories_are_merged(
    text: Path, tmp_path: Path, tokenizer: Tokenizer, small: None
) -> None:
    prepare(settings_of(text), tmp_path / "one", seed=5, tokenizer=tokenizer)
    places = [tmp_path / name for name in ("a", "b", "c")]
    for number, place in enumerate(places[:2], 1):
        prepare_shard(settings_of(text), place, number, 3, seed=5, tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"not all shards are finished.*--shard 3/3"):
        merge(tmp_path / "out", places)
    with pytest.raises(UserError, match=r"nothing to merge in .*out\.partial"):
        merge(tmp_path / "out")
    prepare_shard(settings_of(text), places[2], 3, 3, seed=4, tokenizer=tokenizer)
    with pytest.raises(UserError, match="was begun with seed 5, not 4"):
        merge(tmp_path / "out", places)
    prepare_shard(settings_of(text), tmp_path / "d", 3, 3, seed=5, tokenizer=tokenizer)
    merge(tmp_path / "out", [*places[:2], tmp_path / "d"])
    assert contents(tmp_path / "out") == contents(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.partial", "one", "out"]


def test_shards_at_the_same_time(text: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Four processes on one directory, as a scheduler starts them."""
    prepare(settings_of(text), tmp_path / "one", seed=5, tokenizer=tokenizer)
    script = """
import sys
from pathlib import Path
from leftward.data.prepare import Settings, prepare_shard
from leftward.formats.gguf import GGUF
from leftward.text.tokenizer import Tokenizer
text, out, tokenizer, number = sys.argv[1:]
settings = Settings(paths=(text,), vocab_size=300, bad_lines="skip")
prepare_shard(settings, Path(out), int(number), 4, seed=5, tokenizer=Tokenizer.load(tokenizer))
"""
    arguments = [sys.executable, "-c", script, str(text), str(tmp_path / "out"), str(tmp_path / "one")]
    processes = [subprocess.Popen([*arguments, str(number)]) for number in (1, 2, 3, 4)]
    assert [process.wait() for process in processes] == [0] * 4
    if not (tmp_path / "out").exists():  # two that ended in the same moment both left it to the other
        merge(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


@pytest.mark.parametrize(
    ("number", "of", "options", "message"),
    [
        (0, 2, {}, "shard is 0/2"),
        (3, 2, {}, "shard is 3/2"),
        (1, 2, {"tokenizer": None}, "shards need a ready tokenizer"),
        (1, 2, {"paths": ("-",)}, "standard input can't be shared out"),
    ],
)
def test_shards_that_can_not_be(
    text: Path, tmp_path: Path, tokenizer: Tokenizer, number: int, of: int, options: dict[str, Any], message: str
) -> None:
    settings = Settings(paths=options.get("paths", (str(text),)))
    with pytest.raises(UserError, match=message):
        prepare_shard(settings, tmp_path / "out", number, of, seed=0, tokenizer=options.get("tokenizer", tokenizer))
    assert list(tmp_path.iterdir()) == []


def test_a_single_document_has_no_shards(text: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    settings = Settings(paths=(str(text / "c0.txt"),))
    with pytest.raises(UserError, match="a single document, which can't be shared out"):
        prepare_shard(settings, tmp_path / "out", 1, 2, seed=0, tokenizer=tokenizer)


# ---- processes


def test_processes_encode_as_one_does(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(tmp_path)
    jobs = [(i, [Text(document(10 * i + j), j % 3, True, True) for j in range(i % 7)]) for i in range(60)]
    alone = Encoder(tokenizer, seed=4, near=True)
    with encoders(tokenizer, tmp_path, 4, True, 3) as encode:
        results = list(encode(iter(jobs)))
    assert [job for job, _ in results] == list(range(60))  # in order
    for (_, texts), (_, encoded) in zip(jobs, results, strict=True):
        expected = alone(texts)
        assert encoded.tokens.dtype == np.uint16
        assert encoded.tokens.tolist() == expected.tokens.tolist()
        assert encoded.rows.tobytes() == expected.rows.tobytes()
        assert encoded.letters == expected.letters
        assert (encoded.signatures == expected.signatures).all()
        # against the tokenizer itself
        ids = [i for text in texts for i in [tokenizer.eos_id, *tokenizer.encode(text.text)]]
        assert encoded.tokens.tolist() == ids


def test_a_mistake_in_a_process_is_one_line(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["abc"], kind="char")
    tokenizer.save(tmp_path)
    jobs = [(0, [Text("abc", 0, True, True)]), (1, [Text("abd", 0, True, True)])]
    with pytest.raises(UserError, match="lacks the character 'd'"):
        with encoders(tokenizer, tmp_path, 0, False, 2) as encode:
            list(encode(jobs))


@pytest.mark.skipif(sys.platform == "win32", reason="no signals there")
def test_a_process_that_was_killed_is_one_line_and_the_command_goes_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def remembered(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))
        return started[-1]

    def kill_one(stage: str, done: int, total: int | None) -> None:
        if stage == "encoding" and done > 20_000:
            started[0].kill()

    monkeypatch.setattr(subprocess, "Popen", remembered)
    with pytest.raises(UserError, match=r"a process that encodes ended \(exit code -9.*--processes"):
        prepare(settings_of(text), tmp_path / "out", seed=0, processes=2, on_progress=kill_one)
    assert all(process.wait() is not None for process in started)
    prepare(settings_of(text), tmp_path / "out", seed=0, processes=2)
    prepare(settings_of(text), tmp_path / "one", seed=0, processes=0)
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


# ---- copies


def documents_of(dataset: Dataset, tokenizer: Tokenizer, side: str) -> list[str]:
    """By where dataset.json says that they end."""
    split = getattr(dataset, side)
    starts = [0, *split.ends.tolist()[:-1]]
    return [tokenizer.decode(split.slice(*span).tolist()) for span in zip(starts, split.ends.tolist(), strict=True)]


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def test_exact_copies_are_left_out(tmp_path: Path, small: None) -> None:
    texts = [document(i % 40) for i in range(100)] + [document(7, words=4000)] * 2
    settings = Settings(paths=(write(tmp_path / "a.jsonl", texts),), dedup="exact")
    tokenizer, dataset = prepare(settings, tmp_path / "out", seed=1)
    kept = documents_of(dataset, tokenizer, "train") + documents_of(dataset, tokenizer, "val")
    assert sorted(kept) == sorted(set(texts))
    assert dataset.index["report"]["left_out"]["exact_copies"] == 102 - 41
    assert "61 copies of other documents left out" in dataset.notes
    assert dataset.index["report"]["documents"] == dataset.train.documents + dataset.val.documents == 41
    assert dataset.train.bytes + dataset.val.bytes == sum(len(text.encode()) for text in set(texts))
    first = {text: place for place, text in reversed(list(enumerate(texts)))}
    for side in ("train", "val"):  # the first of them stays where it was
        places = [first[text] for text in documents_of(dataset, tokenizer, side)]
        assert places == sorted(places)


@pytest.mark.parametrize("dedup", ["none", "exact", "near"])
def test_documents_in_many_pieces_and_parts_stay_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dedup: Any, small: None
) -> None:
    """Read a few hundred characters at a time, so that most documents are in several pieces, and many in two parts."""
    monkeypatch.setattr(sources, "_PIECE", 300)
    monkeypatch.setattr(module, "_PART_BYTES", 2_000)
    texts = [document(i, words=20 + 70 * (i % 9)) for i in range(60)]
    texts += texts[8:60:9]  # copies of the longest
    texts += [text[:400] + text[400:].swapcase() for text in texts[8:60:9]]  # which begin alike
    settings = Settings(paths=(write(tmp_path / "a.jsonl", texts),), dedup=dedup, val_fraction=0.4)
    tokenizer, dataset = prepare(settings, tmp_path / "out", seed=1)
    train, val = (documents_of(dataset, tokenizer, side) for side in ("train", "val"))
    assert sorted(train + val) == sorted(texts if dedup == "none" else set(texts))
    assert not set(train) & set(val)
    assert min(len(train), len(val)) > 10


@pytest.mark.parametrize("dedup", ["exact", "near"])
def test_validation_keeps_what_training_has_too(tmp_path: Path, dedup: Any) -> None:
    """Training loses the copy: never validation, which would be left with what is easy."""
    train = [document(i, words=40) for i in range(30)]
    val = [*train[5:9], *(document(i, words=40) for i in range(100, 105))]
    paths, val_paths = (write(tmp_path / "train.jsonl", train),), (write(tmp_path / "val.jsonl", [*val, val[0]]),)
    tokenizer, dataset = prepare(Settings(paths=paths, val_paths=val_paths, dedup=dedup), tmp_path / "out", seed=1)
    assert documents_of(dataset, tokenizer, "val") == val
    assert documents_of(dataset, tokenizer, "train") == [text for text in train if text not in val]


def runs_of_words(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def jaccard(a: str, b: str) -> float:
    ours, theirs = runs_of_words(a), runs_of_words(b)
    return len(ours & theirs) / len(ours | theirs)


def test_near_copies_are_left_out(tmp_path: Path, small: None) -> None:
    """Against the share of common runs of five words, counted for every pair: what is far above the threshold goes,
    what is far below it stays, and of two on both sides it is validation's that stays."""
    originals = [" ".join(f"w{w}" for w in np.random.default_rng(i).integers(0, 500, 300)) for i in range(40)]

    def changed(text: str, every: int) -> str:
        return " ".join("changed" if i % every == every - 1 else word for i, word in enumerate(text.split()))

    near, far = [changed(text, 150) for text in originals], [changed(text, 12) for text in originals]
    assert min(map(jaccard, originals, near)) > 0.93 and max(map(jaccard, originals, far)) < 0.5
    texts = [text for three in zip(originals, near, far, strict=True) for text in three]
    settings = Settings(paths=(write(tmp_path / "a.jsonl", texts),), dedup="near", near_threshold=0.8)
    tokenizer, dataset = prepare(settings, tmp_path / "out", seed=1)
    train, val = (documents_of(dataset, tokenizer, side) for side in ("train", "val"))
    kept = train + val
    assert not any(jaccard(a, b) > 0.8 for i, a in enumerate(kept) for b in kept[:i])
    assert set(far) <= set(kept)
    assert len(kept) == 80
    assert dataset.index["report"]["left_out"]["near_copies"] == 40
    # Without dedup the split would be the same: what was for validation is there, or another near copy of it is.
    _, whole = prepare(Settings(paths=settings.paths), tmp_path / "whole", seed=1, tokenizer=tokenizer)
    for text in documents_of(whole, tokenizer, "val"):
        assert text in val or any(jaccard(text, other) > 0.8 for other in val)


def test_near_copies_of_scripts_without_spaces(tmp_path: Path) -> None:
    one = "".join(chr(0x4E00 + i) for i in np.random.default_rng(0).integers(0, 2000, 400))
    texts = [one, one[:200] + "猫" + one[201:], one[::-1], "words with spaces " + one[:60]]
    settings = Settings(paths=(write(tmp_path / "a.jsonl", texts),), dedup="near", val_fraction=0.3)
    _, dataset = prepare(settings, tmp_path / "out", seed=1)
    assert dataset.index["report"]["left_out"]["near_copies"] == 1


def test_documents_of_signs_alone_are_not_all_alike(tmp_path: Path) -> None:
    signs = ["!!! ???", "{}[]();", "😀 😀 🚀", "— — — …", "★☆★ ☆☆"]
    words = [f"number {n} speaks of {n * n} sheep and of {n + 7} wolves" for n in range(20)]
    settings = Settings(paths=(write(tmp_path / "a.jsonl", [*signs, signs[2], *words]),), dedup="near")
    _, dataset = prepare(settings, tmp_path / "out", seed=1)
    assert dataset.train.documents + dataset.val.documents == len(signs) + len(words)
    assert dataset.index["report"]["left_out"]["near_copies"] == 0


@pytest.mark.parametrize("threshold, copies", [(0.001, 3), (0.9, 2), (0.99, 1), (1.0, 1)])
def test_near_copies_at_every_threshold(tmp_path: Path, threshold: float, copies: int) -> None:
    # A changed word is in 5 of 400 runs of words: 395 of 405 are in both, 0.975. Of half the text 199 of 405 are, 0.49.
    one = [f"word{n}" for n in range(404)]
    texts = [one, [*one[:200], "other", *one[201:]], [*one[:203], *["and"] * 201], one[::-1]]
    lines = [*map(" ".join, texts), " ".join(one) + "!", *(f"alone {n} {n * n} {n + 3} {n + 5}" for n in range(20))]
    settings = Settings(paths=(write(tmp_path / "a.jsonl", lines),), dedup="near", near_threshold=threshold)
    _, dataset = prepare(settings, tmp_path / "out", seed=1)
    assert dataset.index["report"]["left_out"]["near_copies"] == copies


def test_near_copies_need_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(UserError, match="needs datasketch: pip install datasketch"):
        prepare(Settings(paths=("builtin:python-reference",), dedup="near"), tmp_path / "out", seed=0)
    with pytest.raises(UserError, match="near_threshold is 0"):
        monkeypatch.undo()
        prepare(Settings(paths=("x",), dedup="near", near_threshold=0), tmp_path / "out", seed=0)


# ---- what is told


def test_the_report_by_hand(tmp_path: Path) -> None:
    texts = ["abc", "дом и", "猫猫 (!)", "a" * 50 + "bc", "naïve", "ab"]
    lines = [json.dumps({"text": text}) for text in texts]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*lines[:2], "{", *lines[2:], '{"text": " "}', "[]"]), encoding="utf-8")
    settings = Settings(paths=(str(path),), tokenizer="char", val_fraction=0.3, bad_lines="skip")
    _, dataset = prepare(settings, tmp_path / "out", seed=0)
    report = dataset.index["report"]
    assert report["documents"] == 6
    assert report["characters"] == sum(map(len, texts)) == 3 + 5 + 6 + 52 + 5 + 2
    assert report["bytes"] == 3 + 9 + 10 + 52 + 6 + 2
    assert report["tokens"] == report["characters"] + 6 + 2  # a separator before each, and one at each end
    assert report["bytes_per_token"] == pytest.approx(82 / 81)
    letters = {"Latin": 3 + 52 + 5 + 2, "Cyrillic": 4, "Han": 2}
    assert report["scripts"] == pytest.approx({name: n / 68 for name, n in letters.items()})
    assert list(report["scripts"]) == ["Latin", "Cyrillic", "Han"]
    longest = report["longest"]
    assert (longest["tokens"], longest["bytes"], longest["begins"]) == (53, 52, ("a" * 50 + "bc")[:60])
    side = getattr(dataset, longest["split"])
    assert side.ends[longest["document"]] - ([0, *side.ends][longest["document"]]) == 53
    assert report["left_out"] == {
        "bad_lines": 2,
        "empty_documents": 1,
        "empty_files": 0,
        "files_of_other_kinds": 0,
        "exact_copies": 0,
        "near_copies": 0,
    }
    assert [line.rsplit(": ", 1)[0] for line in report["bad_lines"]][1] == f"{path}:9"
    listed = (tmp_path / "out" / "rejected.log").read_text().splitlines()
    assert [line.split(" ")[0] for line in listed] == [f"{path}:3:", f"{path}:9:"]


def test_every_bad_line_is_listed_with_its_number(tmp_path: Path, small: None) -> None:
    """Whatever range of the file it is read in."""
    bad = sorted(random.Random(0).sample(range(1, 1000), 60))
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join("{" if i in bad else json.dumps({"text": document(i)}) for i in range(1, 1000)))
    assert path.stat().st_size > 5 * SMALL["_UNIT_BYTES"]
    _, dataset = prepare(Settings(paths=(str(path),), bad_lines="skip"), tmp_path / "out", seed=0)
    listed = (tmp_path / "out" / "rejected.log").read_text().splitlines()
    assert [int(line.split(":")[1]) for line in listed] == bad
    assert dataset.index["bad_lines"] == 60
    assert len(dataset.index["report"]["bad_lines"]) == 10


@pytest.mark.parametrize("special_tokens", [("<|endoftext|>",), ()])
def test_where_documents_end(tmp_path: Path, special_tokens: tuple[str, ...], small: None) -> None:
    texts = [document(i, words=2000 if i == 9 else 0) for i in range(60)]
    path = write(tmp_path / "a.jsonl", texts)
    settings = Settings(paths=(path,), special_tokens=special_tokens)
    tokenizer, dataset = prepare(settings, tmp_path / "out", seed=0)
    for split in (dataset.train, dataset.val):
        ends = split.ends
        assert ends is not None and ends.dtype == np.int64
        ids = split.slice(0, len(split))
        if special_tokens:
            assert np.flatnonzero(ids == tokenizer.eos_id).tolist() == [0, *ends.tolist()]
        else:
            assert ends[-1] == len(split)
    kept = documents_of(dataset, tokenizer, "train") + documents_of(dataset, tokenizer, "val")
    assert sorted(kept) == sorted(texts)


def test_where_a_single_document_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789")
    tokenizer, dataset = prepare(
        Settings(paths=(str(tmp_path / "a.txt"),), tokenizer="char", val_fraction=0.3), tmp_path / "out", seed=0
    )
    assert dataset.train.ends is not None and dataset.val.ends is not None
    assert (dataset.train.ends.tolist(), dataset.val.ends.tolist()) == ([8], [3])
    assert tokenizer.decode(dataset.val.slice(0, 3).tolist()) == "789"


def test_nothing_but_copies_is_no_validation(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["one"] * 5)
    for dedup in ("none", "exact"):
        with pytest.raises(UserError, match="begin alike"):
            prepare(Settings(paths=(path,), dedup=dedup), tmp_path / "out", seed=0)  # type: ignore[arg-type]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]


# ---- long texts


def long_text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())[:300_000] + "猫" * 20_000 + document(0, words=5000)


@pytest.mark.parametrize("name", ["gpt-2", "falcon", "llama-spm", "bpe", "word", "char"])
def test_a_long_text_is_encoded_as_a_whole(shared_data: Path, name: str) -> None:
    """However it is cut on the way: against one call of the tokenizer."""
    text = long_text()
    if name in ("bpe", "word", "char"):
        tokenizer = Tokenizer.train([text], kind=name)  # type: ignore[arg-type]
    else:
        gguf = GGUF.open(shared_data / "tokenizers" / f"{name}.gguf")
        tokenizer = Tokenizer.from_gguf(gguf.metadata)
    encoder = Encoder(tokenizer, 0, False)
    for starts in (True, False):
        encoded = encoder([Text(text, 0, starts, True)])
        before = ([2, 1] if name == "llama-spm" else [tokenizer.eos_id]) if starts else []  # its </s>, then its <s>
        assert encoded.tokens.tolist() == [*before, *tokenizer.encode_batch([text], starts=[starts])[0].tolist()]
        assert encoded.rows["tokens"].tolist() == [len(encoded.tokens)]
    assert len(encoder._cut(text)) == (1 if name == "char" else pytest.approx(90, abs=20))


def test_a_tokenizer_whose_tokens_span_spaces_gets_texts_whole(tmp_path: Path) -> None:
    text = "one of the first of the one of the people in the U.S. it is not one of the end of the line " * 500
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.decoder = tokenizers.decoders.ByteLevel()
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([text[:2000]], trainer)
    tokenizer = Tokenizer(library, {})
    assert any(" of " in tokenizer.decode([i]) for i in tokenizer.encode(text))
    encoder = Encoder(tokenizer, 0, False)
    assert encoder._cut(text) == [text]
    assert encoder([Text(text, 0, True, True)]).tokens.tolist() == tokenizer.encode(text)
