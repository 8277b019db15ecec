"""llama2.c's files: the 260K-parameter model of stories says its own story, and damaged files are one line."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leftward.errors import UserError
from leftward.formats.gguf import GGUF, write_gguf
from leftward.formats.gguf_models import from_gguf, to_gguf
from leftward.formats.llama2c import read_llama2c, read_tok512
from leftward.formats.model_directory import build_decoder
from leftward.model.decoder import Decoder

# run.c's own output: greedy from BOS (id 1), 200 steps.
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high.\n"
    "Lily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. She said, \"I want to "
    "play with your ball, but I can't find it.\"\n"
    "Lily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to do.\"\n"
    "Lily didn't want to help her mom, so she"
)
HEADER = (8, 12, 2, 4, 2, 10, 6)  # dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len


def told(decoder: Decoder, pieces: list[tuple[bytes, float]]) -> str:
    ids = torch.tensor([[1]])
    with torch.inference_mode():
        for _ in range(200):
            ids = torch.cat((ids, decoder(ids)[:, -1].argmax(-1, keepdim=True)), dim=1)
    said = b"".join(pieces[i][0] for i in ids[0, 1:].tolist()).removeprefix(b" ")
    return re.sub(rb"<0x(..)>", lambda byte: bytes.fromhex(byte[1].decode()), said).decode()


def test_the_model_of_stories_tells_its_story(shared_data: Path, tmp_path: Path) -> None:
    config, state = read_llama2c(shared_data / "stories260K" / "stories260K.bin")
    assert (config.d_model, config.d_ff, config.n_layers, config.n_heads) == (64, 172, 5, 8)
    assert (config.n_kv_heads, config.vocab_size, config.max_seq_len) == (4, 512, 512)
    pieces = read_tok512(shared_data / "stories260K" / "tok512.bin")
    assert len(pieces) == 512
    assert pieces[:3] == [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0)]
    assert told(build_decoder(config, state), pieces) == STORY
    for kind in ("F32", "F16"):
        write_gguf(tmp_path / "stories.gguf", *to_gguf(config, state, kind=kind))
        back, restored = from_gguf(GGUF.open(tmp_path / "stories.gguf"))
        assert back == config
        if kind == "F32":
            assert all(torch.equal(restored[name], state[name]) for name in state)
        assert told(build_decoder(back, restored), pieces) == STORY


def size_of(header: tuple[int, ...]) -> int:
    """The numbers behind a header, counted by hand."""
    dim, hidden, layers, heads, kv_heads, vocab, length = header
    kv_dim = kv_heads * dim // heads
    attention = 2 * dim * dim + 2 * kv_dim * dim
    numbers = abs(vocab) * dim + layers * (2 * dim + attention + 3 * hidden * dim) + dim + length * (dim // heads)
    return numbers + (abs(vocab) * dim if vocab < 0 else 0)


def write_model(path: Path, header: tuple[int, ...]) -> bytes:
    numbers = torch.randn(size_of(header), generator=torch.Generator().manual_seed(0))
    content = struct.pack("<7i", *header) + numbers.numpy().tobytes()
    path.write_bytes(content)
    return content


@pytest.mark.parametrize("vocab_size", [10, -10])
def test_a_head_of_its_own_is_read_and_pairs_are_put_apart(tmp_path: Path, vocab_size: int) -> None:
    header = (*HEADER[:5], vocab_size, HEADER[6])
    content = write_model(tmp_path / "model.bin", header)
    config, state = read_llama2c(tmp_path / "model.bin")
    assert config.tie_embeddings == (vocab_size > 0)
    numbers = torch.frombuffer(bytearray(content[28:]), dtype=torch.float32)
    assert torch.equal(state["embed.weight"], numbers[:80].view(10, 8))
    assert ("head.weight" in state) == (vocab_size < 0)
    if vocab_size < 0:
        assert torch.equal(state["head.weight"], numbers[-80:].view(10, 8))
    q = numbers[80 + 16 :][:64].view(8, 8)  # of the first layer, behind the norms of both
    assert torch.equal(state["blocks.0.attn.qkv.weight"][:2], q[:2])  # a head of 2 has one pair
    decoder = build_decoder(config, state)
    assert decoder(torch.tensor([[1, 2, 3]])).isfinite().all()


def test_files_cut_anywhere_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    content = write_model(path, HEADER)
    for length in [*range(40), len(content) - 4, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match=r"model\.bin is damaged"):
            read_llama2c(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(UserError, match=f"expected {len(content)} bytes .* found {len(content) + 1}"):
        read_llama2c(path)
    path.write_bytes(b"24ka" + content[4:])
    with pytest.raises(UserError, match="a later version"):
        read_llama2c(path)
    with pytest.raises(UserError, match="does not exist"):
        read_llama2c(tmp_path / "absent.bin")
    with pytest.raises(UserError, match="is no file"):
        read_llama2c(tmp_path)


@settings(max_examples=200)
@given(
    place=st.integers(0, 6),
    value=st.sampled_from([-(2**31), -1, 0, 1, 3, 7, 2**16, 2**31 - 1]) | st.integers(-(2**31), 2**31 - 1),
)
def test_headers_that_lie_are_one_line(tmp_path_factory: pytest.TempPathFactory, place: int, value: int) -> None:
    path = tmp_path_factory.mktemp("lies") / "model.bin"
    content = write_model(path, HEADER)
    header = (*HEADER[:place], value, *HEADER[place + 1 :])
    path.write_bytes(struct.pack("<7i", *header) + content[28:])
    try:
        config, state = read_llama2c(path)
    except UserError as error:
        assert str(error).startswith(f"{path} is ")
        assert "\n" not in str(error)
        return
    assert 4 * size_of(header) == len(content) - 28
    build_decoder(config, state)


@settings(max_examples=200)
@given(data=st.data())
def test_vocabularies_are_read_or_one_line(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("words") / "tok.bin"
    pieces = data.draw(st.lists(st.tuples(st.binary(max_size=6), st.floats(width=32, allow_nan=False)), max_size=6))
    content = struct.pack("<i", 6) + b"".join(struct.pack("<fi", score, len(b)) + b for b, score in pieces)
    path.write_bytes(content)
    assert read_tok512(path) == pieces
    cut = data.draw(st.integers(0, len(content)))
    damage = data.draw(st.binary(max_size=8))
    path.write_bytes(content[:cut] + damage + content[cut + len(damage) :])
    try:
        found = read_tok512(path)
    except UserError as error:
        assert str(error).startswith(f"{path} is damaged")
        assert "\n" not in str(error)
        return
    assert all(len(piece) <= len(content) + 8 and not math.isnan(score) for piece, score in found)
