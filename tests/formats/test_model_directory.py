"""A model directory is read whole or refused in one line that names the file; a failed write harms nothing."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from leftward import Config
from leftward.errors import UserError
from leftward.formats.model_directory import load_model, save_model
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder, random_ids

TEXT = "The quick brown fox jumps over the lazy dog. " * 3


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT], kind="char")


@pytest.fixture
def config(tokenizer: Tokenizer) -> Config:
    return Config(vocab_size=tokenizer.vocab_size, max_seq_len=32, n_layers=2, d_model=16, n_heads=2)


@pytest.fixture
def saved(tmp_path: Path, tokenizer: Tokenizer, config: Config) -> Path:
    save_model(tmp_path / "run", config, random_decoder(config).state_dict(), tokenizer, {"temperature": 0.5})
    return tmp_path / "run"


def test_everything_comes_back(saved: Path, tokenizer: Tokenizer, config: Config) -> None:
    decoder, back, generation = load_model(saved)
    assert decoder.config == config
    assert not decoder.training
    assert back is not None and back.fingerprint() == tokenizer.fingerprint()
    assert generation == {"bos_token_id": 0, "eos_token_id": [0], "temperature": 0.5}
    original = random_decoder(config)
    assert decoder.state_dict().keys() == original.state_dict().keys()
    for name, tensor in original.state_dict().items():
        assert torch.equal(decoder.state_dict()[name], tensor)
    assert sorted(path.name for path in saved.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert "max_length" not in json.loads((saved / "generation_config.json").read_text())


def test_the_tie_survives_and_training_can_go_on(saved: Path) -> None:
    decoder, _, _ = load_model(saved)
    assert decoder.head.weight is decoder.embed.weight
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in decoder.parameters())
    assert not any(buffer.is_meta for buffer in decoder.buffers())
    decoder.train()(random_ids(decoder.config, 2, 8)).sum().backward()
    with torch.no_grad():
        decoder.embed.weight.add_(1)  # a mapped file is copied on write
    assert not torch.equal(load_model(saved)[0].embed.weight, decoder.embed.weight)


def test_transformers_loads_model_and_tokenizer(saved: Path, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(saved)
    ids = tokenizer.encode("The lazy dog")
    assert theirs("The lazy dog", add_special_tokens=False)["input_ids"] == ids
    assert theirs.decode(ids) == "The lazy dog"
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert model.config.eos_token_id == model.config.bos_token_id == 0
    decoder, _, _ = load_model(saved)
    batch = torch.tensor([ids])
    with torch.inference_mode():
        torch.testing.assert_close(model(batch).logits, decoder(batch), atol=1e-4, rtol=0)


def test_dtypes(saved: Path, tmp_path: Path) -> None:
    half, _, _ = load_model(saved, torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    save_model(tmp_path / "half", half.config, half.state_dict())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    full, tokenizer, _ = load_model(tmp_path / "half")
    assert tokenizer is None
    assert full.embed.weight.dtype == torch.float32
    assert torch.equal(full.embed.weight, half.embed.weight.float())


def test_names_of_a_compiled_model_load(tmp_path: Path, config: Config) -> None:
    state = random_decoder(config).state_dict()
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
    save_model(tmp_path, config, compiled)
    assert torch.equal(load_model(tmp_path)[0].embed.weight, state["embed.weight"])
    blocks = {name.replace("blocks.0.", "blocks.0._orig_mod."): tensor for name, tensor in state.items()}
    save_model(tmp_path, config, blocks)
    assert torch.equal(load_model(tmp_path)[0].blocks[0].attn.o.weight, state["blocks.0.attn.o.weight"])


def test_shards_of_an_index(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, saved / part)
    expected, _, _ = load_model(saved)
    (saved / "model.safetensors").unlink()
    index = saved / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: part for part, held in parts.items() for name in held}}))
    decoder, _, _ = load_model(saved)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(decoder.state_dict()[name], tensor)
    _refused(saved, "model-00002", lambda: (saved / "model-00002-of-00002.safetensors").unlink())
    _refused(saved, "not a file beside it", lambda: index.write_text('{"weight_map": {"a": "../secret"}}'))
    _refused(saved, "no weight_map", lambda: index.write_text("{}"))


def test_shards_are_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = Config(vocab_size=50, d_model=16, n_heads=2, n_layers=3, max_seq_len=32)
    decoder = random_decoder(config)
    save_model(tmp_path, config, decoder.state_dict(), max_shard_bytes=6000)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05}.safetensors"
    assert all(path.stat().st_size < 8000 for path in tmp_path.glob("*.safetensors"))
    ids = random_ids(config, 1, 9)
    with torch.inference_mode():
        expected = decoder(ids)
        assert torch.equal(load_model(tmp_path)[0](ids), expected)
        theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(report.values()), report
        torch.testing.assert_close(theirs(ids).logits, expected, atol=1e-5, rtol=1e-5)


def test_eos_of_others(saved: Path) -> None:
    """A list, an int, or only in config.json."""
    path = saved / "generation_config.json"
    path.write_text('{"eos_token_id": [3, 5]}')
    assert load_model(saved)[2] == {"bos_token_id": None, "eos_token_id": [3, 5]}
    path.unlink()
    assert load_model(saved)[2] == {"bos_token_id": 0, "eos_token_id": [0]}
    path.write_text('{"eos_token_id": "end"}')
    _refused(saved, "must be integers")


# ---- untrusted input


def _refused(directory: Path, words: str, break_it: Any = lambda: None) -> None:
    break_it()
    with pytest.raises(UserError) as caught:
        load_model(directory)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_model_there(tmp_path: Path) -> None:
    _refused(tmp_path / "absent", "absent does not exist")
    _refused(tmp_path, "not a model directory: it has no config.json")
    file = tmp_path / "file"
    file.write_text("x")
    _refused(file, "not a model directory: it is not a directory")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[: len(data) // 2], id="half"),
        pytest.param(lambda data: data[:-1], id="last byte cut"),
        pytest.param(lambda data: b"\xff\xfe\x00garbage" * 50, id="garbage"),
        pytest.param(lambda data: b"[1, 2]", id="another JSON"),
        pytest.param(lambda data: b"\xff" * 8 + data[8:], id="huge header"),
        pytest.param(lambda data: pickle.dumps({"a": 1}), id="pickle"),
    ],
)
def test_a_damaged_file_is_named(saved: Path, name: str, damage: Any) -> None:
    path = saved / name
    data = damage(path.read_bytes())
    if name != "model.safetensors" and data == path.read_bytes()[:-1]:
        pytest.skip("only the newline at the end is lost")
    path.write_bytes(data)
    _refused(saved, name)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer_config.json"])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    _refused(saved, f"{saved / name} is missing", (saved / name).unlink)


def test_missing_weights_of_a_training_that_can_go_on(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    (saved / "checkpoints" / "step-00000010").mkdir(parents=True)
    _refused(saved, f"leftward train --resume {saved}")


def test_wrong_weights_are_named_with_their_file(saved: Path) -> None:
    path = saved / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.norm.weight": torch.zeros(17)}, path)
    _refused(saved, f"{path}: tensor model.norm.weight has shape [17]; expected [16]")
    save_file({name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}, path)
    _refused(saved, f"{path}: tensor model.norm.weight is missing; expected with shape [16]")
    save_file({**tensors, "extra": torch.zeros(1)}, path)
    _refused(saved, f"{path}: tensor extra is not expected")


def test_an_unsupported_feature_is_named_with_its_file(saved: Path) -> None:
    path = saved / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "rope_parameters": {"rope_type": "mrope"}}))
    _refused(saved, f"{path}: rotary positions scaled with 'mrope' are not supported yet")


def test_a_tokenizer_that_is_too_large_for_the_model(saved: Path) -> None:
    Tokenizer.train([TEXT + "ÄÖÜ"], kind="char").save(saved)
    _refused(saved, "another model's tokenizer")


# ---- disk faults


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """The system refuses files of over 4 KiB, as a full disk would. Only while nothing else is written: pytest's own
    report may go to a file too."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_refuses_is_one_line_and_the_old_weights_stay(saved: Path, config: Config) -> None:
    before = (saved / "model.safetensors").read_bytes()
    message = r"cannot write .*model\.safetensors: the file would be larger"
    with pytest.raises(UserError, match=message) as caught, small_files():
        save_model(saved, config, random_decoder(config, seed=1).state_dict())
    assert "\n" not in str(caught.value)
    assert (saved / "model.safetensors").read_bytes() == before
    assert not list(saved.glob("*.tmp"))


def test_a_directory_that_cannot_be_made(tmp_path: Path, config: Config) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write"):
        save_model(tmp_path / "file" / "run", config, random_decoder(config).state_dict())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written(saved: Path, config: Config) -> None:
    saved.chmod(0o500)
    with pytest.raises(UserError, match="permission denied"):
        save_model(saved, config, random_decoder(config).state_dict())
    saved.chmod(0o700)
