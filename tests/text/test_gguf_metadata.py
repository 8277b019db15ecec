"""Our tokenizers as GGUF metadata and back: the same ids for any text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leftward.errors import UserError
from leftward.text.tokenizer import Tokenizer

TEXT = "The quick brown fox jumps over the lazy dog; é, ß and 𝄞 too.\n" * 3
OURS = Tokenizer.train([TEXT], kind="bpe", vocab_size=300)
BACK = Tokenizer.from_gguf(OURS.to_gguf())


@given(st.text())
def test_ids_are_the_same(text: str) -> None:
    assert BACK.encode(text, add_bos=True) == OURS.encode(text, add_bos=True)
    assert BACK.decode(BACK.encode(text)) == text


def test_special_tokens_stay_special() -> None:
    assert (BACK.bos_id, BACK.eos_id, BACK.vocab_size) == (OURS.bos_id, OURS.eos_id, OURS.vocab_size)
    assert BACK.encode("<|endoftext|>") == OURS.encode("<|endoftext|>") != [OURS.bos_id]
    assert BACK.encode("<|endoftext|>", parse_special=True) == [OURS.bos_id]


@pytest.mark.parametrize("name", ["gpt-2", "falcon"])
def test_a_real_one_round_trips(name: str, shared_data: Path) -> None:
    from leftward.formats.gguf import GGUF

    metadata = GGUF.open(shared_data / "tokenizers" / f"{name}.gguf").metadata
    first = Tokenizer.from_gguf(metadata)
    again = first.to_gguf()
    assert again["tokenizer.ggml.pre"] == metadata["tokenizer.ggml.pre"]
    assert again["tokenizer.ggml.merges"] == list(metadata["tokenizer.ggml.merges"])
    text = (shared_data / "tokenizers" / f"{name}.gguf.inp").read_text(encoding="utf-8")
    assert Tokenizer.from_gguf(again).encode(text) == first.encode(text)


def test_other_kinds_are_refused() -> None:
    with pytest.raises(UserError, match="can't be written to GGUF yet"):
        Tokenizer.train([TEXT], kind="char").to_gguf()
