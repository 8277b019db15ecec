"""`leftward bench generate`: what it counts is right; what it can't measure is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import leftward as lw
from leftward import Config, speed
from leftward.cli.main import app
from leftward.errors import UserError
from leftward.formats.model_directory import save_model
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder

CONFIG = Config(vocab_size=257, max_seq_len=1024, n_layers=2, d_model=32, n_heads=2, n_kv_heads=1, d_ff=64)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = Tokenizer.train(["some text"], kind="bpe", vocab_size=257)
    save_model(tmp_path / "model", CONFIG, random_decoder(CONFIG).state_dict(), tokenizer)
    return tmp_path / "model"


# Numbers of the matrices: q, k, v and o, gate, up and down of two layers; the head, which is the embedding.
NUMBERS = 2 * (32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 64) + 257 * 32


@pytest.mark.parametrize(("dtype", "nbytes"), [("fp32", 4 * NUMBERS), ("bf16", 2 * NUMBERS)])
def test_bytes_of_a_token(model: Path, dtype: str, nbytes: int) -> None:
    assert speed.bytes_per_token(lw.load(model, dtype=dtype)) == nbytes  # type: ignore[arg-type]


def test_measures(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_cold_start", lambda path, dtype, text: 1.0)
    monkeypatch.setattr(speed, "OUTPUT", 8)
    done = CliRunner().invoke(app, ["bench", "generate", str(model), "--repeats", "1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    (ours,) = found["speeds"]
    assert ours["name"] == "leftward"
    assert min(ours["prefill"], ours["decode"], ours["together"], found["bandwidth"]) > 0
    assert found["bytes_per_token"] == 4 * NUMBERS
    assert found["decode_limit"] == pytest.approx(found["bandwidth"] / (4 * NUMBERS))
    told = CliRunner().invoke(app, ["bench", "generate", str(model), "--repeats", "1"])
    assert "of it are reached" in told.stdout


def test_what_it_can_not_measure(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vllm: it can be transformers or llama.cpp"):
        speed.measure(model, rivals=["vllm"])
    with pytest.raises(UserError, match=r"llama.cpp: it (reads .gguf files|is not installed)"):
        speed.measure(model, rivals=["llama.cpp"])
    with pytest.raises(UserError, match="context is 3: 4 tokens are needed"):
        speed.measure(digits(tmp_path / "short", 3))


def digits(path: Path, context: int) -> Path:
    """A model whose tokenizer knows nothing but digits."""
    tokenizer = Tokenizer.train(["0123456789"], kind="char")
    config = Config(vocab_size=tokenizer.vocab_size, max_seq_len=context, n_layers=1, d_model=32)
    save_model(path, config, random_decoder(config).state_dict(), tokenizer)
    return path


@pytest.mark.parametrize("context", [4, 24])
def test_measures_a_short_context_and_a_small_alphabet(
    tmp_path: Path, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "_ARRAY", 1 << 10)
    done = CliRunner().invoke(app, ["bench", "generate", str(digits(tmp_path, context)), "--repeats", "1"])
    assert done.exit_code == 0, done.output
    prompt = context // 4
    assert f"written: {context - prompt} tokens behind {prompt}, greedily; read: {context - 1} tokens" in done.stdout
