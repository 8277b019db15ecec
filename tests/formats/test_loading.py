"""What `lw.load` and `leftward convert` take and give: every format through one door, and the same model from each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_llama2c import STORY

import leftward as lw
from leftward import Config
from leftward.errors import UserError
from leftward.formats.loading import open_config, open_model
from leftward.formats.model_directory import save_model
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder, random_ids

TEXT = "The quick brown fox jumps over the lazy dog.\n"
TOKENIZER = Tokenizer.train([TEXT * 3], kind="bpe", vocab_size=280)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    config = Config(vocab_size=TOKENIZER.vocab_size, d_model=64, n_heads=2, n_layers=2, max_seq_len=64)
    save_model(tmp_path / "model", config, random_decoder(config, std=0.2).state_dict(), TOKENIZER)
    return tmp_path / "model"


def leftward(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leftward.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_model_through_gguf_and_back_is_the_same(directory: Path, tmp_path: Path) -> None:
    done = leftward("convert", directory, tmp_path / "model.gguf", "--to", "gguf")
    assert done.returncode == 0, done.stderr
    first, second = lw.load(directory), lw.load(tmp_path / "model.gguf")
    ids = random_ids(first.config, 2, 20)
    with torch.inference_mode():
        assert torch.equal(first.decoder(ids), second.decoder(ids))
    assert second.generate("The", max_tokens=20, seed=1) == first.generate("The", max_tokens=20, seed=1)
    done = leftward("convert", tmp_path / "model.gguf", tmp_path / "back", "--to", "hf")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()


def test_the_config_alone_is_the_models(directory: Path, tmp_path: Path, shared_data: Path) -> None:
    assert leftward("convert", directory, tmp_path / "model.gguf", "--to", "gguf").returncode == 0
    for path in (directory, tmp_path / "model.gguf", shared_data / "stories260K" / "stories260K.bin"):
        assert open_config(path) == open_model(path).decoder.config
    for name, message in (("none", "none does not exist"), ("none.gguf", "none.gguf does not exist")):
        with pytest.raises(UserError, match=message):
            open_config(tmp_path / name)


def test_quantised_weights_are_near(directory: Path, tmp_path: Path) -> None:
    done = leftward("convert", directory, tmp_path / "q.gguf", "--to", "gguf", "--quantize", "q8_0")
    assert done.returncode == 0, done.stderr
    first, second = lw.load(directory), lw.load(tmp_path / "q.gguf")
    ids = random_ids(first.config, 2, 20)
    with torch.inference_mode():
        exact = first.decoder(ids)
        error = (second.decoder(ids) - exact).norm() / exact.norm()
    assert 0 < error < 0.05  # 8 bits a weight


def test_a_class_stays_the_class(directory: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        num_key_value_heads=1, sliding_window=None, max_position_embeddings=32,
    )  # fmt: skip
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path / "theirs")
    done = leftward("convert", tmp_path / "theirs", tmp_path / "ours", "--max-shard-gb", "0.000005")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "mistral"
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 1
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_there_and_back_gives_the_same_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, head_dim=16,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).to(dtype).save_pretrained(tmp_path / "theirs")
    for source, out, to in (("theirs", "hf", "hf"), ("theirs", "ours.gguf", "gguf"), ("ours.gguf", "back", "hf")):
        done = leftward("convert", tmp_path / source, tmp_path / out, "--to", to)
        assert done.returncode == 0, done.stderr
    theirs, hf, back = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "hf", "back"))
    assert theirs.keys() == hf.keys() == back.keys()
    for name, tensor in theirs.items():
        assert hf[name].dtype == dtype and torch.equal(hf[name], tensor), name
        assert torch.equal(back[name].to(dtype), tensor), name  # a GGUF file keeps vectors in fp32
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert again.dtype == dtype


@pytest.mark.parametrize("way", [None, "--to hf", "--to gguf", "--to gguf --dtype fp16"])
def test_stories260k_says_its_story(shared_data: Path, tmp_path: Path, way: str | None) -> None:
    path = shared_data / "stories260K" / "stories260K.bin"
    if way is not None:
        source, path = path, tmp_path / ("hf" if way == "--to hf" else "stories.gguf")
        done = leftward("convert", source, path, *way.split())
        assert done.returncode == 0, done.stderr
    assert lw.load(path).generate("", max_tokens=200, temperature=0) == STORY


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["missing.gguf", "out"], "does not exist"),
        (["MODEL", "out", "--to", "onnx"], "to is 'onnx'"),
        (["MODEL", "out", "--dtype", "int8"], "dtype is 'int8'"),
        (["MODEL", "out", "--quantize", "q8_0"], "--quantize is for --to gguf"),
        (["MODEL", "out.gguf", "--to", "gguf", "--quantize", "q9"], "quantize is 'q9'"),
        (["MODEL", "out.gguf", "--to", "gguf", "--quantize", "i8"], "quantize is 'i8': f32, f16, bf16, q4_0"),
        (["MODEL", "out.gguf", "--to", "gguf", "--quantize", "q3_k"], "quantize is 'q3_k'"),
        (["MODEL", "MODEL"], "exists: give another place"),
        (["MODEL", "out", "--max-shard-gb", "0"], "max-shard-gb is 0"),
    ],
)
def test_mistakes_are_one_line(directory: Path, tmp_path: Path, arguments: list[str], expected: str) -> None:
    real = {"MODEL": directory, "out": tmp_path / "out", "out.gguf": tmp_path / "out.gguf"}
    done = leftward("convert", *(real.get(argument, argument) for argument in arguments))
    assert done.returncode == 2 and expected in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.gguf").exists()


def test_a_hub_name_without_a_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="owner/nothing is no path here, and the hub does not give it"):
        open_model("owner/nothing")
