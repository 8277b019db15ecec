"""The GGUF container: what the `gguf` package writes and reads, and what a damaged or hostile file is told."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leftward.errors import UserError
from leftward.formats.gguf import GGUF, write_gguf
from leftward.formats.kinds import KINDS

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "an.int": 7,
    "a.negative": -7,
    "a.large": 2**63,
    "a.float": 0.5,
    "a.flag": True,
    "a.text": "Straße 🚲\n",
    "ints": [3, -1, 2],
    "floats": [0.25, -1.5],
    "flags": [True, False],
    "texts": ["", "a", "é"],
    "nested": [[1, 2], [3]],
    "empty": [],
}


def tensors() -> dict[str, tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": ("F32", torch.randn(3, 5, generator=generator)),
        "b": ("F16", torch.randn(7, generator=generator)),
        "c": ("Q8_0", torch.randn(2, 3, 64, generator=generator)),
        "d": ("BF16", torch.randn(2, 2, 2, 4, generator=generator)),
    }


def packed(text: str | bytes) -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content)) + content


def entry(key: str | bytes, number: int, value: bytes) -> bytes:
    return packed(key) + struct.pack("<I", number) + value


def info(
    name: str | bytes, shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0, axes: int | None = None
) -> bytes:
    n_axes = len(shape) if axes is None else axes
    return packed(name) + struct.pack(f"<I{len(shape)}QIQ", n_axes, *shape, kind, offset)


def file(
    entries: list[bytes] = [],  # noqa: B006
    infos: list[bytes] = [],  # noqa: B006
    data: bytes = bytes(64),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_entries: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    counts = (
        len(infos) if n_tensors is None else n_tensors,
        len(entries) if n_entries is None else n_entries,
    )
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(infos)
    return header + bytes(-len(header) % 32) + data


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, METADATA, tensors())
    gguf = GGUF.open(path)
    assert gguf.version == 3
    assert gguf.metadata == METADATA
    assert [(name, i.kind, i.shape) for name, i in gguf.tensors.items()] == [
        (name, kind, tuple(tensor.shape)) for name, (kind, tensor) in tensors().items()
    ]
    for name, (kind, tensor) in tensors().items():
        atol = {"F32": 0.0, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2}[kind]
        torch.testing.assert_close(gguf.tensor(name, torch.float32), tensor, atol=atol, rtol=0)
        assert len(gguf.raw(name)) == gguf.tensors[name].nbytes
    assert gguf.tensor("a", torch.bfloat16).dtype == torch.bfloat16
    assert list(tmp_path.iterdir()) == [path]  # nothing temporary is left


def test_the_gguf_package_reads_what_is_written(tmp_path: Path) -> None:
    package = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    write_gguf(path, METADATA, tensors())
    reader = package.GGUFReader(path)
    found = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    plain = {key: value for key, value in METADATA.items() if key not in ("nested", "empty")}
    assert {key: found[key] for key in plain} == plain
    types = {key: [kind.name for kind in field.types] for key, field in reader.fields.items()}
    assert types["an.int"] == ["UINT32"]  # what llama.cpp asks for
    assert types["a.negative"] == ["INT32"]
    assert types["a.large"] == ["UINT64"]
    assert types["a.float"] == ["FLOAT32"]
    assert types["ints"] == ["ARRAY", "INT32"]
    assert types["floats"] == ["ARRAY", "FLOAT32"]
    ours = GGUF.open(path)
    for tensor in reader.tensors:
        assert tensor.tensor_type.name == ours.tensors[tensor.name].kind
        assert tuple(tensor.shape[::-1]) == ours.tensors[tensor.name].shape
        assert tensor.data_offset == ours.tensors[tensor.name].offset
        numbers = package.dequantize(tensor.data, tensor.tensor_type).reshape(ours.tensors[tensor.name].shape)
        assert torch.equal(ours.tensor(tensor.name), torch.from_numpy(np.array(numbers, dtype=np.float32)))


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_what_the_gguf_package_writes_is_read(tmp_path: Path, alignment: int) -> None:
    package = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = package.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    kinds = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 7, "int32": -7}
    kinds |= {"uint64": 2**63, "int64": -(2**62)}
    for kind, value in kinds.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_float32("a.float32", 0.1)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "häß")
    writer.add_array("texts", ["a", "bc"])
    writer.add_array("ints", [1, 2, 3])
    numbers = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    writer.add_tensor("plain", numbers)
    quants = package.quantize(numbers, package.GGMLQuantizationType.Q4_1)
    writer.add_tensor("quants", quants, raw_dtype=package.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    gguf = GGUF.open(path)
    assert {key: gguf.metadata[f"a.{key}"] for key in kinds} == kinds
    assert gguf.metadata["a.float32"] == pytest.approx(0.1)
    assert gguf.metadata["a.float64"] == 0.1
    assert gguf.metadata["a.bool"] is True
    assert gguf.metadata["a.string"] == "häß"
    assert gguf.metadata["texts"] == ["a", "bc"]
    assert gguf.metadata["ints"] == [1, 2, 3]
    assert torch.equal(gguf.tensor("plain"), torch.from_numpy(numbers))
    assert gguf.tensors["quants"].shape == (4, 64)
    assert gguf.raw("quants").tolist() == quants.flatten().tolist()
    assert gguf.tensors["quants"].offset % alignment == 0


def test_a_tensor_is_the_file_until_it_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, {}, tensors())
    before = path.read_bytes()
    gguf = GGUF.open(path)
    tensor = gguf.tensor("a")
    assert tensor.data_ptr() == gguf.raw("a").data_ptr()
    tensor.zero_()
    assert path.read_bytes() == before
    assert gguf.tensor("a").abs().max() == 0  # the same memory
    assert GGUF.open(path).tensor("a").abs().max() > 0


def test_real_vocabularies_are_read(shared_data: Path) -> None:
    for path in sorted((shared_data / "tokenizers").glob("*.gguf")):
        gguf = GGUF.open(path)
        assert not gguf.tensors
        assert len(gguf.metadata["tokenizer.ggml.tokens"]) > 30_000


def test_version_2_is_version_3(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(file([], [info("x")], version=2))
    assert GGUF.open(tmp_path / "a.gguf").version == 2


NESTED = struct.pack("<IQ", 9, 1) * 9 + struct.pack("<IQ", 4, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected at least 1 bytes, found 0"),
        (b"PK\x03\x04 something else", "is no GGUF file: it begins with b'PK"),
        (file(version=1), "expected GGUF version 2 and 3, little endian, found version 1"),
        (file(version=4), "found version 4"),
        (file(version=3 << 24), "found big-endian version 3"),
        (file(n_entries=2**63), "9223372036854775808 metadata entries: expected at most"),
        (file(n_tensors=2**63), "9223372036854775808 tensors: expected at most"),
        (file([entry(b"\xff\xfe", 4, bytes(4))]), "the key of metadata entry 0: expected UTF-8, found b'\\xff\\xfe'"),
        (file([entry("k", 8, packed(b"\xff"))]), "'k': expected UTF-8"),
        (file([entry("k", 4, bytes(4))] * 2), "metadata key 'k': expected once, found a second time"),
        (file([entry("k", 13, bytes(4))]), "metadata key 'k': expected a type from 0 to 12, found 13"),
        (file([entry("k", 9, struct.pack("<IQ", 99, 1))]), "metadata key 'k': expected a type"),
        (file([entry("k", 9, struct.pack("<IQ", 0, 2**63))]), "elements of 'k': expected at most"),
        (file([entry("k", 9, struct.pack("<IQ", 12, 2**61 + 1))]), "elements of 'k': expected at most"),
        (file([entry("k", 9, struct.pack("<IQ", 8, 2**62))]), "elements of 'k': expected at most"),
        (file([entry("k", 9, struct.pack("<IQ", 9, 2**62))]), "elements of 'k': expected at most"),
        (file([entry("k", 9, struct.pack("<IQ", 8, 2) + packed("a") + packed(b"\xff"))]), "element 1 of 'k'"),
        (file([entry("k", 9, struct.pack("<IQQ", 8, 1, 2**63))]), "expected element 0 of 'k'"),
        (file([entry("k", 9, NESTED)]), "metadata key 'k': expected at most 8 arrays in one another"),
        (file([entry("k", 8, struct.pack("<Q", 2**63))]), "the end of the file"),
        (file([entry("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment: expected a power of two"),
        (file([entry("general.alignment", 4, struct.pack("<I", 33))]), "general.alignment"),
        (file([entry("general.alignment", 4, struct.pack("<I", 1 << 31))]), "general.alignment"),
        (file([entry("general.alignment", 8, packed("32"))]), "general.alignment"),
        (file([], [info("x", (4,), axes=5)]), "tensor 'x': expected at most 4 axes, found 5"),
        (file([], [info("x", (4,), axes=2**31)]), "tensor 'x': expected at most 4 axes"),
        (file([], [info("x", (2**63, 2))]), "tensor 'x': expected 73786976294838206464 bytes from byte"),
        (file([], [info("x", (2**32, 2**32))]), "tensor 'x': expected"),
        (file([], [info("x", (2**63, 0))]), "tensor 'x': expected no axis of length 0"),
        (
            file([], [info("x", (33,), kind=8)]),
            "tensor 'x': expected rows of a multiple of 32 numbers (Q8_0), found 33",
        ),
        (file([], [info("x", (), kind=12)]), "tensor 'x': expected rows of a multiple of 256"),
        (file([], [info("x", kind=99)]), "tensor 'x': expected a kind that is known (F32, F16, "),
        (file([], [info("x", offset=1)]), "tensor 'x': expected an offset that is a multiple of 32, found 1"),
        (file([], [info("x", offset=2**63)]), "tensor 'x': expected 16 bytes from byte"),
        (file([], [info("x", offset=64)]), "tensor 'x': expected 16 bytes from byte"),
        (file([], [info("x", (17,))]), "found the end of the file at"),
        (file([], [info("x")] * 2), "tensor 'x': expected once, found a second time"),
        (file([], [info("x", (16,)), info("y", offset=32)]), "tensor 'y': expected bytes of its own, found some that"),
        (file([], [info("x"), info("y")]), "tensor 'y': expected bytes of its own"),
        (file([], [info(b"\xff")]), "the name of tensor 0: expected UTF-8"),
    ],
)
def test_damaged_and_hostile_files_are_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        GGUF.open(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        GGUF.open(tmp_path / "absent.gguf")
    with pytest.raises(UserError, match="is no file"):
        GGUF.open(tmp_path)


def test_a_tensor_that_is_not_there_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(file([], [info("x", (128,), kind=KINDS["Q1_0"].number)]))
    with pytest.raises(UserError, match=r"model\.gguf: tensor y is missing"):
        GGUF.open(path).tensor("y")
    with pytest.raises(UserError, match=r"model\.gguf: tensor x: numbers of kind Q1_0 can't be read: F32, "):
        GGUF.open(path).tensor("x")


@pytest.mark.parametrize(
    ("metadata", "stored", "message"),
    [
        ({}, {"x": ("Q8_0", torch.zeros(2, 33))}, "tensor x of shape [2, 33] can't be stored as Q8_0"),
        ({}, {"x": ("F31", torch.zeros(2))}, "can't be stored as F31"),
        ({}, {"x": ("Q8_0", torch.full((32,), torch.nan))}, "tensor x: it holds numbers that are infinite or none"),
        ({"k": None}, {}, "metadata of GGUF can't hold [None]"),
        ({"k": [1, "a"]}, {}, "it must be of one type"),
        ({"k": ["a", 1]}, {}, "it must be of one type"),
        ({"k": 2**64}, {}, "metadata of GGUF can't hold"),
    ],
)
def test_what_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, metadata: dict[str, Any], stored: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        write_gguf(tmp_path / "model.gguf", metadata, stored)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())
