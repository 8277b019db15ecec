"""GGUF files as llama.cpp itself reads them: our ids of any text, our logits, our greedy text.

llama-cpp-python is compiled where it is installed, which takes minutes, so it is no part of the test extra:
pip install llama-cpp-python. Where a virtual machine shows instructions of its processor that it hasn't (a crash in the
first quantised product): CMAKE_ARGS=-DGGML_NATIVE=OFF pip install --no-binary :all: --no-deps llama-cpp-python.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gguf_models import CASES, EVERY_BIAS, GEMMA3, IDS, PLAIN, drawn
from test_llama2c import STORY
from tokenizers import pre_tokenizers
from torch import Tensor

from leftward import Config
from leftward.errors import UserError
from leftward.formats.converting import write_gguf_model
from leftward.formats.gguf import GGUF, write_gguf
from leftward.formats.gguf_models import from_gguf, to_gguf
from leftward.formats.llama2c import read_tok512
from leftward.formats.loading import open_model
from leftward.formats.model_directory import build_decoder
from leftward.model.decoder import Decoder
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder, random_ids
from text import test_foreign_tokenizers as foreign

llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is absent: pip install llama-cpp-python (some minutes)")

N_TOKENS = 40
BPE = Tokenizer.train(foreign.PROSE, kind="bpe", vocab_size=290)
# The kind of the cached keys and values: 16 bits, its default, would hide what we look for.
FP32 = 0


def opened(path: Path, **settings: Any) -> Any:
    return llama_cpp.Llama(str(path), n_threads=1, verbose=False, **settings)


def run(path: Path, ids: Sequence[int], n_ctx: int = 96) -> Tensor:
    """llama.cpp's logits [T, V] of one pass over `ids`."""
    llama = opened(path, n_ctx=n_ctx, n_ubatch=n_ctx, logits_all=True, type_k=FP32, type_v=FP32)
    llama.eval(ids)
    return torch.tensor(llama.scores[: len(ids)])


def greedy(path: Path, ids: Sequence[int], n_tokens: int, n_ctx: int = 96) -> list[int]:
    chosen = opened(path, n_ctx=n_ctx, type_k=FP32, type_v=FP32).generate(list(ids), temp=0.0)
    return [token_id for token_id, _ in zip(chosen, range(n_tokens), strict=False)]


def as_llama_cpp_turns(decoder: Decoder) -> Decoder:
    """The same, with yarn's borders rounded: llama.cpp knows no other way, gpt-oss's for one."""
    scaling = decoder.config.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return decoder
    config = replace(decoder.config, rope_scaling=replace(scaling, truncate=True))
    return build_decoder(config, decoder.state_dict())


# ---- models


@pytest.mark.parametrize(("architecture", "values"), CASES, ids=IDS)
def test_logits_and_greedy_text_are_ours(tmp_path: Path, architecture: str, values: dict[str, Any]) -> None:
    """Its vocabulary is larger than the tokenizer's, as many are."""
    decoder = drawn({**values, "vocab_size": 300})
    path = tmp_path / "model.gguf"
    write_gguf(path, *to_gguf(decoder.config, decoder.state_dict(), metadata=BPE.to_gguf()))
    decoder = as_llama_cpp_turns(decoder)
    # llama.cpp looks GELU up in a table of 16-bit numbers.
    tolerance = 5e-3 if decoder.config.feed_forward in ("gelu", "gelu_tanh", "geglu_tanh") else 1e-5
    ids = random_ids(decoder.config, 1, N_TOKENS)
    with torch.inference_mode():
        ours = decoder(ids)[0]
        assert ours.std() > 0.02  # something to compare
        torch.testing.assert_close(run(path, ids[0].tolist()), ours, atol=tolerance, rtol=0)
        prompt = BPE.encode("The quick brown fox", add_bos=True)
        continued = greedy(path, prompt, 16)
        logits = decoder(torch.tensor([prompt + continued]))[0, len(prompt) - 1 : -1]  # [16, V]
    assert len(continued) == 16
    chosen = logits.gather(1, torch.tensor(continued)[:, None])[:, 0]
    assert (logits.max(dim=1).values - chosen <= 2 * tolerance).all()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "gpt-oss"])
def test_every_kind_of_number_is_read(tmp_path: Path, architecture: str, kind: str) -> None:
    """Near what we read from the same file: llama.cpp rounds what it multiplies quantised weights with, too."""
    values = next(values for name, values in CASES if name == architecture)
    wide: dict[str, Any] = {"d_model": 256, "d_ff": 256, "n_heads": 8, "n_kv_heads": 2, "head_dim": 32}
    wide |= {"vocab_size": 300, "embed_scale": 16.0 if architecture == "gemma3" else 1.0}
    decoder = random_decoder(Config(**{**values, **wide}), std=0.05)
    path = tmp_path / "model.gguf"
    write_gguf(path, *to_gguf(decoder.config, decoder.state_dict(), kind=kind, metadata=BPE.to_gguf()))
    decoder = as_llama_cpp_turns(build_decoder(*from_gguf(GGUF.open(path))))
    ids = random_ids(decoder.config, 1, N_TOKENS)
    with torch.inference_mode():
        ours = decoder(ids)[0]
    error = (run(path, ids[0].tolist()) - ours).norm() / ours.norm()
    # An expert that is chosen by a hair may be another one there.
    assert error < (2e-3 if kind == "F16" else 0.25 if decoder.config.n_experts else 0.1)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({**PLAIN, **EVERY_BIAS, "n_experts": 4, "n_experts_per_token": 2}, "ff_bias"),
        (
            {
                **GEMMA3,
                "rope_scaling": {"kind": "yarn", "factor": 4.0, "attention_factor": 1.3},
            },
            "rope_scaling",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(values: dict[str, Any], field: str) -> None:
    decoder = random_decoder(Config(**values))
    with pytest.raises(UserError, match=f"but for .*{field}"):
        to_gguf(decoder.config, decoder.state_dict())


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_stories260k_tells_its_story(tmp_path: Path, shared_data: Path, dtype: str) -> None:
    path = tmp_path / "stories.gguf"
    write_gguf_model(path, open_model(shared_data / "stories260K" / "stories260K.bin"), dtype, None, "stories260K")
    llama = opened(path, n_ctx=256)
    assert len(llama.tokenize(b"I believe the meaning of life is", add_bos=True)) == 18
    assert llama.tokenize(b"", add_bos=True) == [1]
    ids = greedy(path, [1], 200, n_ctx=256)
    assert llama.detokenize(ids, prev_tokens=[1]).decode().lstrip(" ") == STORY


# ---- tokenizers


def vocabulary(tokenizer: Tokenizer, tmp_path: Path, **settings: Any) -> Any:
    """llama.cpp's reading of it."""
    path = tmp_path / "vocabulary.gguf"
    write_gguf(path, {"general.architecture": "llama", **tokenizer.to_gguf(**settings)}, {})
    return opened(path, vocab_only=True)


def sentencepiece(model_type: str, prefix: bool) -> Callable[[Path], Tokenizer]:
    def load(directory: Path) -> Tokenizer:
        _, data = foreign.trained_by_sentencepiece(model_type, model_type == "bpe", prefix)
        (directory / "tokenizer.model").write_bytes(data)
        return Tokenizer.load(directory)

    return load


def of_library(make: Callable[[], Any], *steps: Any) -> Callable[[Path], Tokenizer]:
    def load(directory: Path) -> Tokenizer:
        library = make()
        if steps:
            library.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
        library.save(str(directory / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": "</s>"}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer.load(directory)

    return load


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
_THREE_DIGITS = pre_tokenizers.Split(tokenizers.Regex("[0-9][0-9][0-9]"), "isolated")
TOKENIZERS: dict[str, Callable[[Path], Tokenizer]] = {
    "bpe": lambda directory: BPE,
    "char": lambda directory: Tokenizer.train(["".join(foreign.PROSE + foreign.ODD) + "猫é½𝄞"], kind="char"),
    "gpt2": of_library(foreign.gpt2),
    "llama3": of_library(foreign.llama_3),
    "qwen": of_library(foreign.qwen),
    "smollm": of_library(foreign.gpt2, pre_tokenizers.Digits(individual_digits=True), _BYTES),
    "sentencepiece": sentencepiece("bpe", True),
    "sentencepiece without a space first": sentencepiece("bpe", False),
    "unigram": sentencepiece("unigram", True),
    "unigram without a space first": sentencepiece("unigram", False),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_of_any_text_are_ours(name: str, tmp_path: Path) -> None:
    ours = TOKENIZERS[name](tmp_path)
    theirs = vocabulary(ours, tmp_path)
    assert (theirs.token_bos(), theirs.token_eos()) == (ours.bos_id, ours.eos_id)

    @settings(max_examples=300)
    @given(foreign.ANY_TEXT)
    def same(text: str) -> None:
        text = text.replace("e\u0301", "é")  # NFC, which llama.cpp leaves to others
        if name.startswith("unigram"):  # whose library takes the names of control tokens apart in another way
            text = text.replace("<", "(")
            if not text.strip(" "):  # llama.cpp's space of the first word comes with the word
                return
        for special in (False, True):
            try:
                ids = ours.encode(text, parse_special=special)
            except UserError:  # what one token a character can't write
                return
            assert theirs.tokenize(text.encode(), add_bos=False, special=special) == ids

    same()


@pytest.mark.parametrize("name", ["falcon", "gpt-2", "llama-spm", "tok512"])
def test_ids_of_a_real_vocabulary_are_ours(name: str, tmp_path: Path, shared_data: Path) -> None:
    """Of the file as it was published, and of ours."""
    path = shared_data / "tokenizers" / f"{name}.gguf"
    if path.exists():
        ours = Tokenizer.from_gguf(GGUF.open(path).metadata)
    else:
        ours = Tokenizer.from_pieces(read_tok512(shared_data / "stories260K" / "tok512.bin"))
    readings = [vocabulary(ours, tmp_path), *([opened(path, vocab_only=True)] if path.exists() else [])]

    @given(st.one_of(foreign.ANY_TEXT, st.sampled_from(foreign.PROSE)))
    def same(text: str) -> None:
        try:
            ids = ours.encode(text)
        except UserError:  # Falcon has no tokens for some bytes
            return
        assert [theirs.tokenize(text.encode(), add_bos=False) for theirs in readings] == [ids] * len(readings)

    same()


def test_ends_are_where_llama_cpp_looks_for_them(tmp_path: Path) -> None:
    ours = Tokenizer.train(foreign.PROSE, vocab_size=300, special_tokens=["<|endoftext|>", "<over>"])
    theirs = vocabulary(ours, tmp_path, eot_id=1)
    assert theirs.tokenize(b"The", add_bos=True) == ours.encode("The", add_bos=True)
    model = theirs._model.vocab
    assert llama_cpp.llama_vocab_eot(model) == 1
    assert [token_id for token_id in range(300) if llama_cpp.llama_vocab_is_eog(model, token_id)] == [0, 1]
