"""What a file claims, without loading it: names, shapes, sums; and nothing that steers a terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from leftward import Config
from leftward.errors import UserError
from leftward.formats.contents import contents_of, lines_of
from leftward.formats.gguf import write_gguf
from leftward.formats.gguf_models import to_gguf
from leftward.formats.model_directory import save_model
from random_models import random_decoder

CONFIG = Config(vocab_size=16, max_seq_len=8, n_layers=1, d_model=32, n_heads=2, d_ff=32, qk_norm="none")


def test_gguf_safetensors_and_directories_say_the_same_sums(tmp_path: Path) -> None:
    decoder = random_decoder(CONFIG)
    write_gguf(tmp_path / "model.gguf", *to_gguf(CONFIG, decoder.state_dict()))
    save_model(tmp_path / "run", CONFIG, decoder.state_dict())
    paths = (tmp_path / "model.gguf", tmp_path / "run" / "model.safetensors", tmp_path / "run")
    for path in paths:
        contents = contents_of(path)
        assert contents["parameters"] == decoder.n_parameters
        assert contents["nbytes"] == 4 * decoder.n_parameters
        assert {tensor["kind"] for tensor in contents["tensors"]} == {"F32"}
        json.dumps(contents)
    assert contents_of(paths[0])["metadata"]["llama.block_count"] == 1
    assert contents_of(paths[2])["metadata"]["hidden_size"] == 32
    lines = list(lines_of(contents_of(paths[0])))
    assert "llama.embedding_length = 32" in lines
    assert "blk.0.attn_q.weight  F32  [32, 32]" in lines


def test_what_a_file_says_cannot_steer_a_terminal(tmp_path: Path) -> None:
    escape = "\x1b]0;owned\x07\u202e\n"
    metadata = {escape: escape, "tokens": ["a"] * 50_000, "long": "x" * 1_000_000}
    write_gguf(tmp_path / "model.gguf", metadata, {escape: ("F32", torch.zeros(4))})
    text = "\n".join(lines_of(contents_of(tmp_path / "model.gguf")))
    assert all(line.isprintable() for line in text.split("\n"))
    assert "tokens = 50,000 values, ['a', 'a', 'a', …]" in text
    assert len(text) < 1000


def test_the_command_prints_lines_or_json(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", {"general.name": "Ada"}, {"x": ("F32", torch.zeros(4))})
    script = (
        "import sys, typer\nfrom leftward.cli.inspect_file import inspect_file\n"
        "app = typer.Typer()\napp.command()(inspect_file)\n"
        "try: app(sys.argv[1:])\nfinally: assert 'torch' not in sys.modules"
    )
    for more in ([], ["--json"]):
        command = [sys.executable, "-c", script, str(tmp_path / "model.gguf"), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        if more:
            assert json.loads(done.stdout)["metadata"] == {"general.name": "Ada"}
        else:
            assert "general.name = Ada" in done.stdout.splitlines()


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("GGML")
    (tmp_path / "bad.safetensors").write_bytes(b"\xff" * 40)
    for path, message in [
        (tmp_path / "notes.txt", "is neither GGUF, safetensors nor a model directory"),
        (tmp_path / "bad.safetensors", "is damaged or not a safetensors file"),
        (tmp_path, "has no config.json"),
        (tmp_path / "absent", "does not exist"),
    ]:
        with pytest.raises(UserError, match=message):
            contents_of(path)
