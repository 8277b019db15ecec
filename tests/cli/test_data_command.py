"""`leftward data` from outside: what it prints, makes, refuses, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leftward.data.batches import Dataset
from leftward.text.tokenizer import Tokenizer

PROGRAM = [sys.executable, "-m", "leftward.cli.main", "data"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
BUILTIN = "builtin:python-reference"


def leftward(*arguments: str | Path, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [*PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT, input=stdin)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "a.jsonl"
    lines = [json.dumps({"text": f"The {n % 90} sheep saw the wolf, o λύκος, {n % 90} times."}) for n in range(100)]
    path.write_text("\n".join([*lines[:50], "{", *lines[50:]]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def dataset(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    out = tmp_path_factory.mktemp("out") / "sheep"
    done = leftward("prepare", text, "--out", out, "--kind", "char", "--skip-bad-lines", "--dedup", "exact", "--json")
    return out, done


def test_prepare_reports_what_it_made(text: Path, dataset: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = dataset
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["documents"] == 90
    assert report["left_out"]["exact_copies"] == 10
    assert report["left_out"]["bad_lines"] == 1 and report["bad_lines"][0].startswith(f"{text}:51: not JSON")
    assert report["scripts"]["Latin"] > 0.8 > 0.2 > report["scripts"]["Greek"] > 0.1
    opened = Dataset.open(out)
    assert report["splits"]["train"]["tokens"] == len(opened.train)
    assert opened.train.documents + opened.val.documents == 90


def test_report_is_the_same_again_and_for_people(dataset: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = dataset
    assert leftward("report", out, "--json").stdout == done.stdout
    shown = leftward("report", out)
    assert shown.returncode == 0 and shown.stderr == ""
    first, training, validation, letters, longest, *notes = shown.stdout.splitlines()
    opened = Dataset.open(out)
    assert first == f"{out}: vocabulary {opened.vocab_size}, fingerprint {opened.fingerprint}"
    assert training.startswith(f"training: {opened.train.documents} documents, {len(opened.train):,} tokens, ")
    assert validation.startswith(f"validation: {opened.val.documents} documents, {len(opened.val):,} tokens, ")
    assert letters.startswith("letters: Latin 8") and "Greek 1" in letters
    assert longest.startswith("longest document: ") and "“The " in longest
    assert any(note.startswith("1 bad lines left out") for note in notes)
    assert any(note == "10 copies of other documents left out" for note in notes)


def test_a_tokenizer_of_another_dataset_and_shards(
    text: Path, tmp_path: Path, dataset: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    common = ["prepare", text, "--skip-bad-lines", "--tokenizer", dataset[0]]
    assert leftward(*common, "--out", tmp_path / "one").returncode == 0
    for number in (1, 2):
        done = leftward(*common, "--out", tmp_path / f"{number}", "--shard", f"{number}/2")
        assert done.returncode == 0 and done.stdout == ""
        assert (
            done.stderr == f"share {number}/2 of {tmp_path / str(number)} is done; the dataset is made when all are\n"
        )
    merged = leftward("merge", tmp_path / "1", tmp_path / "2", "--out", tmp_path / "two", "--json")
    assert json.loads(merged.stdout)["fingerprint"] == Dataset.open(tmp_path / "one").fingerprint
    for number in (2, 1):
        done = leftward(*common, "--out", tmp_path / "three", "--shard", f"{number}/2")
    assert done.stdout.startswith(f"{tmp_path / 'three'}: vocabulary ")
    files = ["dataset.json", "train-00000.npy", "train-documents.npy", "val-00000.npy", "tokenizer.json"]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()


def test_standard_input_and_a_run_that_trains_on_it(tmp_path: Path) -> None:
    done = leftward("prepare", "-", "--out", tmp_path / "in", stdin="one two three four " * 50)
    assert done.returncode == 0, done.stderr
    assert "a single document: training has its first 855 characters, validation the last 95" in done.stdout
    command = [*PROGRAM[:-1], "train", "--data", str(tmp_path / "in"), "--out", str(tmp_path / "run")]
    settings = ["training.max_steps=2", "training.seq_len=8", "model.n_layers=1", "model.d_model=16", "model.n_heads=2"]
    trained = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert trained.returncode == 0, trained.stderr
    shown = leftward("report", tmp_path / "run")
    assert shown.stdout.splitlines()[0] == "100.0% of the tokens are of:"
    assert shown.stdout.splitlines()[1].startswith(f"{tmp_path / 'in'}: vocabulary ")
    assert json.loads(leftward("report", tmp_path / "run", "--json").stdout)["mix"][0]["documents"] == 2


def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    """The processes that encode are told too, as by a terminal, and end with the command."""
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"text": f"number {i} " * 400}) + "\n" for i in range(5000))
    Tokenizer.train(["number 0123456789 "]).save(tmp_path / "tokenizer")
    command = [
        *PROGRAM,
        "prepare",
        str(path),
        "--out",
        str(tmp_path / "out"),
        "--tokenizer",
        str(tmp_path / "tokenizer"),
    ]
    process = subprocess.Popen(
        [*command, "--processes", "2"], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True
    )
    parts = tmp_path / "out.partial" / "shard-1-of-1" / "parts"
    while not (parts.exists() and any(parts.iterdir())):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "interrupted; the same command goes on"
    assert "Traceback" not in stderr
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "none.txt", "--out", "OUT"], "none.txt does not exist"),
        (["prepare", BUILTIN], "Missing option '--out'"),
        (["prepare", BUILTIN, "--out", "OUT", "--kind", "bep"], "kind is 'bep': did you mean bpe?"),
        (["prepare", BUILTIN, "--out", "OUT", "--dedup", "exakt"], "dedup is 'exakt': did you mean exact?"),
        (["prepare", BUILTIN, "--out", "OUT", "--shard", "1"], "shard is '1': write it as I/N"),
        (["prepare", BUILTIN, "--out", "OUT", "--shard", "1/2"], "shards need a ready tokenizer"),
        (["prepare", BUILTIN, "--out", "OUT", "--shard", "3/2"], "shard is 3/2"),
        (["prepare", BUILTIN, "--out", "OUT", "--tokenizer", "none"], "none does not exist: give a directory with a"),
        (["prepare", BUILTIN, "--out", "OUT", "--tokenizer", "x", "--vocab-size", "300"], "leave them out"),
        (["prepare", BUILTIN, "--out", "OUT", "--processes", "-1"], "processes is -1"),
        (["prepare", BUILTIN, "--out", "OUT", "--val-fraction", "1"], "val_fraction is 1.0"),
        (["merge", "OUT"], "there is nothing to merge in OUT.partial"),
        (["merge", "OUT", "OTHER"], "say with --out where"),
        (["report", "OUT"], "dataset.json is missing"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    out = str(tmp_path / "OUT")
    done = leftward(*(out if argument == "OUT" else argument for argument in arguments))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("leftward: ")
    assert message in done.stderr.replace(out, "OUT")
    assert list(tmp_path.iterdir()) == []
