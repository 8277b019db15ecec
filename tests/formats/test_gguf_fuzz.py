"""Any bytes are a GGUF file or one line that says why not: cut everywhere, changed anywhere, counts of any size."""

from __future__ import annotations

import functools
import random
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leftward import Config
from leftward.errors import UserError
from leftward.formats.gguf import GGUF, write_gguf
from leftward.formats.gguf_models import from_gguf, to_gguf
from random_models import random_decoder

HOSTILE = [0, 1, 2, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@functools.cache
def model(directory: Path) -> bytes:
    """A small file with everything in it, a part of its tensors quantised."""
    config = Config(
        vocab_size=8, max_seq_len=8, n_layers=1, d_model=32, n_heads=2, n_kv_heads=1, d_ff=32, qk_norm="none"
    )
    texts = {"tokenizer.ggml.tokens": ["a", "é"], "nested": [[1, 2], [3]], "scores": [0.5, -1.0], "flag": True}
    decoder = random_decoder(config)
    write_gguf(directory / "whole.gguf", *to_gguf(config, decoder.state_dict(), kind="Q8_0", metadata=texts))
    return (directory / "whole.gguf").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return model(tmp_path_factory.mktemp("whole"))


def read(path: Path, content: bytes) -> bool:
    """Whether `content` is a model. Raises: anything but a UserError of one line that names the file."""
    path.write_bytes(content)
    try:
        _, state = from_gguf(GGUF.open(path))
    except UserError as error:
        assert str(path) in str(error), error
        assert "\n" not in str(error)
        assert len(str(error)) < 2000
        return False
    assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())
    return True


def header_size(path: Path) -> int:
    return min(info.offset for info in GGUF.open(path).tensors.values())


def test_a_file_cut_anywhere_is_no_model(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "cut.gguf"
    assert read(path, whole)
    end = header_size(path)
    padding = -sum(info.nbytes for info in list(GGUF.open(path).tensors.values())[-1:]) % 32
    for length in [*range(end), *range(end, len(whole) - padding, 97)]:
        assert not read(path, whole[:length])


def test_bytes_changed_anywhere_in_the_header_are_a_model_or_one_line(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "changed.gguf"
    read(path, whole)
    end, random_bytes = header_size(path), random.Random(0)
    for place in range(end):
        value = random_bytes.choice([0, 1, 127, 128, 255, random_bytes.randrange(256)])
        read(path, whole[:place] + bytes([value]) + whole[place + 1 :])


@settings(max_examples=500)
@given(data=st.data())
def test_numbers_of_any_size_anywhere_are_a_model_or_one_line(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("numbers") / "numbers.gguf"
    for _ in range(data.draw(st.integers(1, 3))):
        width = data.draw(st.sampled_from([4, 8]))
        place = data.draw(st.integers(0, min(len(whole), 3000) - width))
        value = data.draw(st.sampled_from(HOSTILE)) % (1 << 8 * width)
        whole = whole[:place] + value.to_bytes(width, "little") + whole[place + width :]
    read(path, whole)


@settings(max_examples=300)
@given(content=st.binary(max_size=200))
def test_any_bytes_behind_a_good_beginning_are_one_line(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "any.gguf"
    assert not read(path, b"GGUF\3\0\0\0" + content)


def test_a_small_file_takes_little_memory(tmp_path: Path, whole: bytes) -> None:
    """What Python allocates for a file whose every count is a lie; torch's share is bounded by the tensors' bytes."""
    path = tmp_path / "lies.gguf"
    read(path, whole)
    places = random.Random(1).sample(range(8, 1500), 300)
    tracemalloc.start()
    for place in places:
        read(path, whole[:place] + (2**40).to_bytes(8, "little") + whole[place + 8 :])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
