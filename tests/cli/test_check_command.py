"""`leftward check` from outside: a line a proof, the exit code, and what a mistake gives."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from leftward import Config
from leftward.formats.model_directory import save_model
from leftward.proofs.checking import CLAIMS
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder
from terminals import shown_on_a_terminal

PROGRAM = [sys.executable, "-m", "leftward.cli.main", "check"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def leftward(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with one bad number in it."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer.train(["The quick brown fox.\n" * 3], kind="bpe", vocab_size=270)
    config = Config(vocab_size=tokenizer.vocab_size, max_seq_len=64, n_layers=2, d_model=32, n_heads=4)
    decoder = random_decoder(config)
    decoder.blocks[1].attn.o.weight.data[0, 0] = torch.inf
    save_model(path, config, decoder.state_dict(), tokenizer)
    return path


def test_a_preset_in_a_pipe() -> None:
    done = leftward("gpt2", "--seed", "3")
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == len(CLAIMS) + 1
    for line, claim in zip(lines, CLAIMS, strict=False):
        assert re.match(rf"[✓–] {re.escape(claim.name)} +\S", line), line
    assert len({line.index(line[26:].lstrip()) for line in lines[:-1]}) == 1  # one column
    assert re.fullmatch(r"gpt2, scaled down: Decoder, [\d,]+ parameters, .*: \d+ hold, 0 fail, \d+ skipped", lines[-1])


def test_without_argument_the_default_architecture_is_tried() -> None:
    done = leftward("--json")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["passed"] is True and report["subject"].startswith("the Config, scaled down")
    assert [proof["name"] for proof in report["proofs"]] == [claim.name for claim in CLAIMS]


def test_a_failure_is_explained_and_the_exit_code_is_1(broken: Path) -> None:
    done = leftward(broken)
    assert done.returncode == 1 and done.stderr == ""
    lines = done.stdout.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("✗ finite"))
    assert "blocks.1.attn.o.weight" in lines[place]
    assert lines[place + 1].startswith(" " * 20) and "NaN spreads" in lines[place + 1]
    assert lines[-1].startswith(f"{broken}: Decoder, ")
    done = leftward(broken, "--json")
    assert done.returncode == 1
    failed = [proof["name"] for proof in json.loads(done.stdout)["proofs"] if proof["outcome"] == "fail"]
    assert failed[0] == "finite"


def test_a_terminal_gets_colour_and_lines_that_fit(broken: Path) -> None:
    text, code = shown_on_a_terminal([*PROGRAM, str(broken)])
    assert code == 1
    assert "\x1b[32m✓" in text and "\x1b[31m✗" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    assert all(len(line) <= 80 for line in plain[:-1])


def test_a_mistyped_name_is_answered_at_once_in_one_line(tmp_path: Path) -> None:
    done = leftward("llama3-8c")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "leftward: no preset is called 'llama3-8c': did you mean llama3-8b or llama3.1-8b?\n"
    done = leftward(tmp_path)
    assert done.returncode == 2
    assert "is not a model directory" in done.stderr and done.stderr.count("\n") == 1


def test_an_interrupt_ends_it_in_one_line() -> None:
    process = subprocess.Popen(
        [*PROGRAM, "gemma3-27b"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("✓ padding is not counted"):  # the next one trains
            break
    time.sleep(0.3)
    process.send_signal(2)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == "leftward: interrupted\n"
