"""A model directory from anywhere is a model or one line that names the file: never another error, never memory beyond
what its files are worth, never a file outside it. (GGUF: test_gguf_fuzz.py; pickles: test_pickled.py.)"""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from leftward import Config, load
from leftward.errors import UserError
from leftward.formats.contents import contents_of, lines_of
from leftward.formats.families import FAMILIES
from leftward.formats.llama2c import read_llama2c
from leftward.formats.loading import open_model
from leftward.formats.model_directory import load_model, save_model
from leftward.text.tokenizer import Tokenizer
from random_models import random_decoder

TEXT = "The quick brown fox jumps over the lazy dog. naïve 猫 123 "
CONFIG = Config(vocab_size=400, max_seq_len=8, n_layers=2, d_model=8, n_heads=2, d_ff=8, qk_norm="none")
HOSTILE: list[Any] = [
    *(-1, 0, 1, 2**31 - 1, 2**31, 2**32, 10**9, 2**63, 2**64, 10**4000, -(2**63), 0.5, -0.0, 1e308, float("nan")),
    *(float("inf"), True, None, "", "x", "\n\x1b[31m\u202e", "\ud800", "../x", "/etc/passwd", "x" * 100_000),
    *([], [[]], {}, {"a": {"b": []}}, [0] * 10_000, ["global"] * 10_000),
]


@pytest.fixture(scope="module", autouse=True)
def _little_memory() -> Iterator[None]:
    """Every file here is smaller than 1 MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB; the libraries take some of it


def survives(directory: Path, read: Callable[[], Any]) -> bool:
    """Whether it can be read. Raises: anything but a UserError of one line that names a file there."""
    try:
        read()
    except UserError as error:
        message = str(error)
        assert str(directory) in message, message[:300]
        assert len(message) < 2000 and message.isprintable(), message[:300]
        return False
    return True


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original")
    save_model(path, CONFIG, random_decoder(CONFIG).state_dict(), Tokenizer.train([TEXT * 9], kind="bpe"))
    return path


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "model")


# ---- safetensors


def safetensors(header: dict[str, Any] | bytes, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def tensor(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


NAME = b'"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
DAMAGED = {
    "empty": b"",
    "no header": safetensors(b""),
    "longer than the file": safetensors({"x": tensor()}, bytes(8), length=10**6),
    "longer than any file": safetensors({"x": tensor()}, bytes(8), length=2**64 - 1),
    "2^63 bytes": safetensors({"x": tensor()}, bytes(8), length=2**63),
    "another JSON": safetensors(b"[1]", bytes(8)),
    "deep JSON": safetensors(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "no UTF-8": safetensors(b"{" + NAME.replace(b"x", b"\xff") + b"}", bytes(8)),
    "half a surrogate pair": safetensors(b"{" + NAME.replace(b"x", b"\\ud800") + b"}", bytes(8)),
    "unknown dtype": safetensors({"x": tensor("F17\n\x1b[31m")}, bytes(8)),
    "dtype of another type": safetensors({"x": tensor(3)}, bytes(8)),
    "negative size": safetensors({"x": tensor(shape=[-2])}, bytes(8)),
    "2^63 rows": safetensors({"x": tensor(shape=[2**63])}, bytes(8)),
    "2^64 rows": safetensors({"x": tensor(shape=[2**64])}, bytes(8)),
    "a product that overflows": safetensors({"x": tensor(shape=[2**32, 2**32])}, bytes(8)),
    "a product that overflows to 0": safetensors({"x": tensor(shape=[2**40, 2**40, 0], offsets=[0, 0])}),
    "more numbers than bytes": safetensors({"x": tensor(shape=[3])}, bytes(8)),
    "offsets backwards": safetensors({"x": tensor(offsets=[8, 0])}, bytes(8)),
    "offsets behind the end": safetensors({"x": tensor(offsets=[8, 16])}, bytes(8)),
    "offsets of 2^63": safetensors({"x": tensor(offsets=[2**63, 2**63 + 8])}, bytes(8)),
    "tensors that overlap": safetensors({"x": tensor(), "y": tensor()}, bytes(8)),
    "bytes of no tensor": safetensors({"x": tensor(), "y": tensor(offsets=[16, 24])}, bytes(24)),
    "bytes behind the last": safetensors({"x": tensor()}, bytes(9)),
    "metadata of another type": safetensors({"__metadata__": {"a": 3}, "x": tensor()}, bytes(8)),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_safetensors_are_one_line(directory: Path, kind: str) -> None:
    (directory / "model.safetensors").write_bytes(DAMAGED[kind])
    for read in (load_model, contents_of):
        with pytest.raises(UserError, match=r"model\.safetensors is damaged or not a safetensors file"):
            read(directory)
        assert not survives(directory, functools.partial(read, directory))


def test_a_name_that_stands_twice_is_one_tensor(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(safetensors(b"{" + NAME + b"," + NAME + b"}", bytes(8)))
    assert survives(directory, lambda: contents_of(directory))
    assert not survives(directory, lambda: load_model(directory))


@pytest.mark.parametrize(
    "dtype", ["BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "C64", "F4", "F6_E2M3"]
)
def test_numbers_that_are_no_weights_are_named(directory: Path, dtype: str) -> None:
    bits = {"BOOL": 8}.get(dtype) or int("".join(filter(str.isdigit, dtype.partition("_")[0])))
    header, end = {}, 0
    for name, weight in load_file(directory / "model.safetensors").items():
        header[name] = tensor(dtype, list(weight.shape), [end, end + weight.numel() * bits // 8])
        end += weight.numel() * bits // 8
    (directory / "model.safetensors").write_bytes(safetensors(header, bytes(end)))
    assert not survives(directory, lambda: load_model(directory))
    assert survives(directory, lambda: list(lines_of(contents_of(directory))))


def test_bytes_changed_or_cut_anywhere(directory: Path) -> None:
    path, chance = directory / "model.safetensors", random.Random(0)
    whole = path.read_bytes()
    end = 8 + struct.unpack_from("<Q", whole)[0]
    contents = [whole[:length] for length in [*range(0, end, 29), *range(end, len(whole), 211)]]
    for place in [*range(8), *(chance.randrange(8, end) for _ in range(400))]:
        contents.append(whole[:place] + bytes([chance.randrange(256)]) + whole[place + 1 :])
    for content in contents:
        path.write_bytes(content)
        survives(directory, lambda: load_model(directory))


def test_names_cannot_steer_a_terminal(directory: Path) -> None:
    path, escape = directory / "model.safetensors", "\x1b]0;owned\x07\u202e\n" + "x" * 5000
    save_file({**load_file(path), escape: torch.zeros(1)}, path)
    assert not survives(directory, lambda: load_model(directory))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {escape: path.name}}))
    path.rename(directory / "part.safetensors")
    assert not survives(directory, lambda: load_model(directory))


# ---- shards


def sharded(directory: Path) -> tuple[Path, dict[str, str]]:
    """The index of the directory's weights, now in two files, and its weight_map."""
    tensors = load_file(directory / "model.safetensors")
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(places.values()):
        save_file({name: t.clone() for name, t in tensors.items() if places[name] == shard}, directory / shard)
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return index, places


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        ".",
        "",
        "a\\b",
        "\0",
        "\n",
        "x" * 5000,
        "\ud800",
        "~",
    ],
    ids=range(12),
)
def test_an_index_names_plain_files_beside_it(directory: Path, shard: str) -> None:
    index, places = sharded(directory)
    save_file({"x": torch.zeros(1)}, directory.parent / "x.safetensors")
    index.write_text(json.dumps({"weight_map": {**places, "x": shard}}))
    with pytest.raises(UserError, match="which is not a file beside it"):
        load_model(directory)
    assert not survives(directory, lambda: load_model(directory))


@pytest.mark.parametrize("wrong", [*HOSTILE, *({"weight_map": value} for value in HOSTILE)], ids=lambda v: str(v)[:20])
def test_an_index_of_another_shape(directory: Path, wrong: Any) -> None:
    index, _ = sharded(directory)
    index.write_text(json.dumps(wrong))
    assert not survives(directory, lambda: load_model(directory))


def test_what_index_and_shards_say_of_each_other(directory: Path) -> None:
    index, places = sharded(directory)
    assert survives(directory, lambda: load_model(directory))
    first, second = sorted(set(places.values()))
    name, whole = min(places), load_file(directory / second)

    index.write_text(json.dumps({"weight_map": {**places, "extra": second}}))
    with pytest.raises(UserError, match=rf"tensor extra is missing; expected in {second}"):
        load_model(directory)
    index.write_text(json.dumps({"weight_map": {**places, name: second}}))
    with pytest.raises(UserError, match=rf"tensor {name} is in {first}; expected in {second}"):
        load_model(directory)
    index.write_text(json.dumps({"weight_map": places}))
    save_file({**whole, name: load_file(directory / first)[name]}, directory / second)
    with pytest.raises(UserError, match=rf"tensor {name} is in {first} and in {second}"):
        load_model(directory)
    save_file({**whole, "extra": torch.zeros(1)}, directory / second)
    with pytest.raises(UserError, match=r"index.json: tensor extra is not expected"):
        load_model(directory)
    (directory / second).unlink()
    with pytest.raises(UserError, match=f"{second} is missing"):
        load_model(directory)


@pytest.mark.parametrize("shards", [False, True])
def test_the_hubs_cache_of_symbolic_links_is_read(directory: Path, shards: bool) -> None:
    if shards:
        sharded(directory)
    blobs = directory.parent / "blobs"
    blobs.mkdir()
    for i, path in enumerate(sorted(directory.iterdir())):
        path.rename(blobs / str(i))
        path.symlink_to(Path("..") / "blobs" / str(i))
    assert survives(directory, lambda: load_model(directory))
    (blobs / "0").unlink()
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").symlink_to("tokenizer.json")  # to itself
    assert not survives(directory, lambda: load_model(directory))


# ---- config.json, generation_config.json, tokenizer_config.json


LAYOUT = dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim", "n_inner"), 8)
LAYOUT |= dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions", "max_seq_len"), 400)
LAYOUT |= dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 2)
LAYOUT |= dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_local_experts"), 2)
LAYOUT |= {"sliding_window": 4, "use_sliding_window": True}
MORE_KEYS = (
    *("head_dim", "layer_types", "rope_scaling", "rope_parameters", "partial_rotary_factor", "sliding_window_pattern"),
    *("max_window_layers", "attention_types", "attention_layers", "no_rope_layers", "no_rope_layer_interval", "alibi"),
    *("attn_config", "quantization_config", "leftward", "rotary_dim", "query_pre_attn_scalar", "original_max_position"),
    *("model_type", "bos_token_id", "eos_token_id", "new_decoder_architecture", "num_kv_heads", "rope_theta"),
)


def keys_of(model_type: str) -> list[str]:
    family = next(family for family in FAMILIES if family.model_type == model_type)
    theirs = {setting.theirs for setting in family.settings if hasattr(setting, "theirs")}
    return sorted({*theirs, *family.defaults, *family.constants, *family.dropouts, *LAYOUT, *MORE_KEYS})


@pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES])
def test_any_value_in_config_json(directory: Path, model_type: str) -> None:
    """Each key of each class once with a value of each kind; several at once where chance has it."""
    chance, path = random.Random(model_type), directory / "config.json"
    keys = keys_of(model_type)
    for key in keys:
        for value in chance.sample(HOSTILE, 6) + ([10**9] if "layer" in key or "expert" in key else []):
            wrong = {key: value} | {
                other: chance.choice(HOSTILE) for other in chance.sample(keys, chance.choice([0, 2]))
            }
            path.write_text(json.dumps({"model_type": model_type, **LAYOUT, **wrong}))
            survives(directory, lambda: load_model(directory))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_texts_that_are_hard_to_parse(directory: Path, name: str) -> None:
    path = directory / name
    whole = path.read_bytes()
    inside = lambda value: whole.replace(b"{", b'{"rope_scaling": %b, "eos_token_id": %b,' % (value, value), 1)  # noqa: E731
    deep = [b"[" * depth + b"]" * depth for depth in (100, 500, 800, 900, 940, 960, 980, 1000, 10_000, 100_000)]
    deep += [value.replace(b"[", b'{"a":').replace(b"]", b"}").replace(b":}", b":1}") for value in deep]
    for content in [*map(inside, [*deep, b"1" + b"0" * 5000, b"NaN", b"1e999", b"-", b'"\\ud800"']), *deep]:
        path.write_bytes(content)
        survives(directory, lambda: open_model(directory))
        survives(directory, lambda: list(lines_of(contents_of(directory))))
    for content in (b"", b"\xff", b"\xef\xbb\xbf" + whole, whole[:-3], whole + b"{}", whole.decode().encode("utf-16")):
        path.write_bytes(content)
        assert not survives(directory, lambda: open_model(directory)), content[:10]


SMALLER = {
    "generation_config.json": ("bos_token_id", "eos_token_id"),
    "tokenizer_config.json": (
        "bos_token",
        "pad_token",
        "added_tokens_decoder",
        "extra_special_tokens",
        "add_bos_token",
    ),
}


@pytest.mark.parametrize("name", SMALLER)
def test_any_value_in_the_smaller_files(directory: Path, name: str) -> None:
    content = json.loads((directory / name).read_text())
    for key in SMALLER[name]:
        for value in [*HOSTILE, {"content": 3}, {"0": {"content": "x", "special": 3}}, {"x": "y"}, {"-1": "y"}]:
            (directory / name).write_text(json.dumps({**content, key: value}))
            survives(directory, lambda: open_model(directory))


# ---- tokenizers


@functools.cache
def vocabularies() -> dict[str, bytes]:
    """tokenizer.json files of each kind."""
    pieces = [(b"<unk>", 0.0), (b"<s>", 0.0), (b"</s>", 0.0), *((b"<0x%02X>" % i, 0.0) for i in range(256))]
    pieces += [(character.encode(), -1.0 - i) for i, character in enumerate(sorted(set(TEXT) | {" "}))] + [
        (b" q", -0.5)
    ]
    made = {kind: Tokenizer.train([TEXT], kind=kind) for kind in ("bpe", "word", "char")}
    texts = {kind: tokenizer._library.to_str() for kind, tokenizer in made.items()}
    texts["spm"] = Tokenizer.from_pieces(pieces)._library.to_str()
    unigram = json.loads(texts["spm"])
    unigram["model"] = {
        "type": "Unigram",
        "unk_id": 0,
        "byte_fallback": True,
        "vocab": [[piece, -float(i)] for piece, i in unigram["model"]["vocab"].items()],
    }
    texts["unigram"] = json.dumps(unigram)
    return {kind: text.encode() for kind, text in texts.items()}


def use(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    try:
        ids = tokenizer.encode("quick <s> brown 123", parse_special=True, add_bos=True, add_eos=True)
        tokenizer.decode([*ids, *range(min(tokenizer.vocab_size, 300))])
    except UserError as error:  # of a text, which no file is to blame for
        raise UserError(f"{directory}: {error}") from None


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values stand in JSON; of long lists only the first few."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in list(value if isinstance(value, dict) else range(len(value)))[:8]:
            yield from places(value[key], (*path, key))


@pytest.mark.parametrize("kind", ["bpe", "word", "char", "spm", "unigram"])
def test_a_vocabulary_with_any_value_anywhere(tmp_path: Path, kind: str) -> None:
    chance, whole = random.Random(kind), vocabularies()[kind]
    wrong = [*HOSTILE, {"type": "Sequence"}, {"type": "ByteLevel"}, {"type": "Fuse"}, "(", "(a+)+$", 2**32 - 1]
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for path in places(json.loads(whole)):
        for value in chance.sample(wrong, 3):
            content = inner = json.loads(whole)
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            (tmp_path / "tokenizer.json").write_text(json.dumps(content))
            survives(tmp_path, lambda: use(tmp_path))


@settings(max_examples=300)
@given(data=st.data())
def test_a_vocabulary_with_bytes_changed_or_cut(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.getbasetemp() / "vocabulary"
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer_config.json").write_text("{}")
    content = bytearray(vocabularies()[data.draw(st.sampled_from([*vocabularies()]))])
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    (directory / "tokenizer.json").write_bytes(content)
    survives(directory, lambda: use(directory))


def sentencepiece(pieces: list[tuple[str, float, int]], model_type: int) -> bytes:
    """A tokenizer.model: ModelProto with its pieces, TrainerSpec and NormalizerSpec."""

    def field(number: int, content: bytes) -> bytes:
        assert len(content) < 2**14
        return bytes([number << 3 | 2, len(content) & 127 | 128, len(content) >> 7]) + content

    coded = [field(1, t.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18%c" % kind for t, score, kind in pieces]
    spec = b"\x18%c" % model_type + b"\xc0\x02\x00\xc8\x02\x01\xd0\x02\x02"  # unk_id 0, bos_id 1, eos_id 2
    return b"".join(field(1, piece) for piece in coded) + field(2, spec) + field(3, b"\x18\x01\x20\x01\x28\x01")


@pytest.mark.parametrize("model_type", [1, 2], ids=["unigram", "bpe"])
def test_a_sentencepiece_model_with_bytes_changed_or_cut(tmp_path: Path, model_type: int) -> None:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((f"<0x{i:02X}>", 0.0, 6) for i in range(256))]
    pieces += [(piece, -float(i), 1) for i, piece in enumerate(["▁q", "▁", *"quickbrown", "▁▁▁▁"]) if i != 8]
    whole, chance = sentencepiece(pieces, model_type), random.Random(model_type)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(whole)
    assert survives(tmp_path, lambda: use(tmp_path))
    contents = [whole[:length] for length in range(0, len(whole), 31)]
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(len(changed))] = chance.choice([0, 1, 127, 128, 255, chance.randrange(256)])
        contents.append(bytes(changed))
    for content in contents:
        path.write_bytes(content)
        survives(tmp_path, lambda: use(tmp_path))


def test_a_piece_of_a_million_characters_takes_no_longer_than_many_short_ones(tmp_path: Path) -> None:
    pieces = [(b"<unk>", 0.0), (b"<s>", 0.0), (b"</s>", 0.0), (b"a", -1.0), (b"a" * 400_000, -2.0)]
    assert Tokenizer.from_pieces(pieces).encode("aa")[-2:] == [3, 3]


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt"])
def test_gpt2s_files_changed_or_cut(directory: Path, name: str) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())["model"]
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(content["vocab"]))
    (directory / "merges.txt").write_text("\n".join(" ".join(pair) for pair in content["merges"]))
    assert survives(directory, lambda: use(directory))
    path, chance = directory / name, random.Random(name)
    whole = path.read_bytes()
    for _ in range(200):
        content = bytearray(whole[: chance.choice([len(whole), chance.randrange(len(whole) + 1)])])
        for _ in range(chance.randrange(3) if content else 0):
            content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(content)
        survives(directory, lambda: use(directory))
    for value in HOSTILE if name == "vocab.json" else []:
        path.write_text(json.dumps(value))
        survives(directory, lambda: use(directory))
        path.write_text(json.dumps({"a": value, "b": 1}))
        survives(directory, lambda: use(directory))


# ---- llama2.c


def test_a_model_of_llama2c_cut_at_every_border_or_changed(tmp_path: Path) -> None:
    header, path, chance = (8, 12, 2, 4, 2, 20, 6), tmp_path / "model.bin", random.Random(0)
    sizes = [20 * 8, 2 * 8, 2 * 64, 2 * 32, 2 * 32, 2 * 64, 2 * 8, 2 * 96, 2 * 96, 2 * 96, 8, 6, 6]
    whole = struct.pack("<7i", *header) + bytes(4 * sum(sizes))
    path.write_bytes(whole)
    config, state = read_llama2c(path)
    assert config.n_layers == 2 and sum(t.numel() for t in state.values()) == sum(sizes[:-2])
    ends = [28 + 4 * sum(sizes[:i]) for i in range(len(sizes))]
    contents = [whole[: end + more] for end in ends for more in (-1, 0, 1, 4)] + [whole[:n] for n in range(28)]
    assert not any(survives_as(path, content) for content in contents)
    for _ in range(500):
        place, value = (
            chance.randrange(7),
            chance.choice([0, 1, 2, 2**16, 2**31 - 1, -1, -(2**31), chance.randrange(99)]),
        )
        survives_as(path, whole[: 4 * place] + struct.pack("<i", value) + whole[4 * place + 4 :])
    for start in (b"PK\3\4", b"\x80\2}", b"GGUF", b"24ka", b"{", b"\0" * 28):
        assert not survives_as(path, start + whole[len(start) :])


def survives_as(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    return survives(path.parent, lambda: open_model(path))


# ---- what is no damage of a file


def test_weights_that_are_no_numbers_are_found_when_they_are_used(directory: Path) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    for value in (float("nan"), float("inf")):
        broken = {name: weight.clone() for name, weight in weights.items()}
        broken["model.norm.weight"][3] = value
        save_file(broken, path)
        with pytest.raises(UserError, match="its weights are damaged"):
            load(directory).generate("quick", max_tokens=1)


def test_nothing_is_written(directory: Path) -> None:
    """Not beside the model, not where its files point."""
    index, where = sharded(directory)
    index.write_text(json.dumps({"weight_map": {**where, "x": "../new.safetensors"}}))
    (directory / "tokenizer_config.json").write_text('{"chat_template": "{% include \'../new\' %}"}')
    before = sorted(os.walk(directory.parent))
    survives(directory, lambda: open_model(directory))
    survives(directory, lambda: contents_of(directory))
    assert sorted(os.walk(directory.parent)) == before
