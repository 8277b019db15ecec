"""`lw.plan`: names, directories, fields and Configs."""

import json
from pathlib import Path

import pytest

from leftward import Config
from leftward.config import ConfigError
from leftward.errors import UserError
from leftward.planning import plan

LLAMA = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
# V·d·2 + L (d·h·dh + 2·d·kv·dh + h·dh·d + 3·d·dff + 2·d) + d
LLAMA_PARAMETERS = 2 * 100 * 32 + 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA))
    return path


def test_a_preset_by_name():
    result = plan("gpt2")
    assert (result.name, result.parameters.total, result.seq_len) == ("gpt2", 124_439_808, 1024)
    assert plan("llama3-8b", seq_len=8192, dtype="bf16").flops.forward_full == 158_140_695_838_720


def test_a_model_directory_by_path_or_name(directory):
    assert plan(directory).parameters.total == plan(str(directory)).parameters.total == LLAMA_PARAMETERS


def test_fields_and_configs():
    fields = {"vocab_size": 65, "n_layers": 2, "d_model": 32}
    assert plan(fields).config == plan(Config(**fields)).config == Config(**fields)
    assert plan(fields).name is None


def test_a_directory_named_like_a_preset_is_reached_by_path(directory, monkeypatch):
    monkeypatch.chdir(directory.parent)
    directory.rename("gpt2")
    assert plan("gpt2").parameters.total == 124_439_808
    assert plan("./gpt2").parameters.total == plan(Path("gpt2")).parameters.total == LLAMA_PARAMETERS


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("gtp2", "no preset is called 'gtp2': did you mean gpt2"),
        ("runs/none", "runs/none does not exist"),
        (Path("none"), "none does not exist"),
        ({"n_layers": 3}, "vocab_size is missing"),
        ({"vocab_size": 9, "n_layer": 3}, "unknown key n_layer"),
    ],
)
def test_what_is_no_model_is_said(what, message):
    with pytest.raises(UserError, match=message):
        plan(what)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("[1]", "must hold an object"),
        ("{", "damaged"),
        ("{}", "config.json: no model_type"),
    ],
)
def test_a_directory_that_is_no_model_is_said(directory, content, message):
    (directory / "config.json").unlink()
    if content is not None:
        (directory / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        plan(directory)


def test_an_architecture_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="d_model 33 is not divisible by n_heads 4"):
        plan({"vocab_size": 9, "d_model": 33})
