"""The GGUF container: metadata and tensors in one memory-mapped file, read and written.

What the bytes of a tensor mean is quants.py's business, what the names mean gguf_models.py's. A file is untrusted:
every count and offset in it is checked before it is believed, and what is wrong is one line.

The layout, little endian (docs/gguf.md in ggml's repository): "GGUF", version u32, number of tensors u64, number of
metadata entries u64; the entries (key, type u32, value); the tensors' names, dimensions, kinds and offsets; then, from
a multiple of the alignment on, their bytes.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from leftward.errors import UserError
from leftward.files import write_atomic
from leftward.formats.kinds import KINDS
from leftward.formats.mapping import map_file

if TYPE_CHECKING:  # torch is imported where a tensor is asked for: what a file claims is read without it
    import torch
    from torch import Tensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Number of a metadata type → struct's letter for it.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TYPE_OF = {letter: number for number, letter in _NUMBERS.items()}
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MOST_AXES = 4
_DEEPEST = 8  # arrays in arrays; llama.cpp writes none at all
_LONGEST_HEADER = 1 << 27  # bytes; the largest vocabularies take a tenth of it


class TensorInfo(NamedTuple):
    """What a file says about a tensor."""

    kind: str
    """A key of KINDS."""
    shape: tuple[int, ...]
    """In torch's order, the axis that runs fastest last."""
    offset: int
    """Of the first byte, from the beginning of the file."""
    nbytes: int


class GGUF:
    """An open file: its `metadata`, what it says about its `tensors`, and these on demand."""

    def __init__(
        self, path: Path, data: mmap.mmap, version: int, metadata: dict[str, Any], tensors: dict[str, TensorInfo]
    ) -> None:
        self.path, self.version, self.metadata, self.tensors = path, version, metadata, tensors
        self._data = data

    @classmethod
    def open(cls, path: Path | str) -> GGUF:
        """Map `path` into memory and read all but the tensors' bytes.

        Raises:
            UserError: it is missing, not GGUF, of a version or byte order not known here, cut short, or contradicts
                itself.
        """
        path = Path(path)
        data = map_file(path)
        with memoryview(data) as view:
            header = _Header(path, view)
            version, n_tensors = header.version_and_count()
            metadata = header.metadata()
            alignment = _alignment(path, metadata)
            tensors = header.tensors(n_tensors, alignment)
        return cls(path, data, version, metadata, tensors)

    def raw(self, name: str) -> Tensor:
        """The bytes of a tensor, uint8 [nbytes], still in the file. Raises: UserError, where there is none."""
        import torch

        if name not in self.tensors:
            raise UserError(f"{self.path}: tensor {name} is missing")
        info = self.tensors[name]
        return torch.frombuffer(self._data, dtype=torch.uint8, count=info.nbytes, offset=info.offset)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor's numbers in its shape, in `dtype`; None: floats as they are stored, all else in fp32.

        Raises: UserError, where there is none, or its kind can't be read.
        """
        from leftward.formats.quants import dequantise

        raw = self.raw(name)
        kind, shape, _, _ = self.tensors[name]
        try:
            return dequantise(kind, raw, dtype).view(shape)
        except UserError as error:
            raise UserError(f"{self.path}: tensor {name}: {error}") from None


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, Tensor]]) -> None:
    """Write a file of version 3, whole or not at all; one tensor at a time is in memory in its new kind.

    Args:
        metadata: bool, int, float, str, or lists of one of these. A whole number is written as u32, where it fits, or
            as i32 in a list; a float as f32: the types that llama.cpp asks for.
        tensors: for each name the kind to write and the numbers.

    Raises:
        UserError: a row that doesn't divide into blocks of the kind, or a kind or number that can't be written; the
            disk refuses.
    """
    alignment = _alignment(path, metadata)
    header = [struct.pack("<4sIQQ", _MAGIC, _VERSIONS[-1], len(tensors), len(metadata))]
    header += [_packed(key) + struct.pack("<I", _type_of(value)) + _packed(value) for key, value in metadata.items()]
    offset = 0
    for name, (kind, tensor) in tensors.items():
        shape = tuple(tensor.shape)
        if kind not in KINDS or not shape or shape[-1] % KINDS[kind].block:
            raise UserError(f"cannot write {path}: tensor {name} of shape {list(shape)} can't be stored as {kind}")
        header += [_packed(name), struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))]
        header += [struct.pack("<IQ", KINDS[kind].number, offset)]
        offset = _aligned(offset + _nbytes(kind, shape), alignment)

    def fill(temporary: Path) -> None:
        with temporary.open("wb") as file:
            _write_aligned(file, b"".join(header), alignment)
            for name, (kind, tensor) in tensors.items():
                _write_aligned(file, _encoded(path, name, kind, tensor), alignment)

    write_atomic(path, fill)


class _Header:
    """Reads a file from its first byte on. Nothing is allocated for a count that the rest of the file can't hold."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.file_size = path, len(data)
        self.data = data[:_LONGEST_HEADER]
        self.at = 0

    def version_and_count(self) -> tuple[int, int]:
        """The version and the number of tensors."""
        if (magic := bytes(self.data[:4])) != _MAGIC:
            raise UserError(f"{self.path} is no GGUF file: it begins with {magic!r}")
        self.at = 4
        version: int = self.number("I", "the version")
        if version not in _VERSIONS:
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big")
            found = f"big-endian version {big_endian}" if version & 0xFFFF == 0 and version else f"version {version}"
            known = " and ".join(map(str, _VERSIONS))
            raise UserError(f"{self.path}: expected GGUF version {known}, little endian, found {found}")
        n_tensors: int = self.number("Q", "the number of tensors")
        return version, n_tensors

    def metadata(self) -> dict[str, Any]:
        count = self.number("Q", "the number of metadata entries")
        self.expect_room(count, 13, "metadata entries")
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = self.string(f"the key of metadata entry {index}")
            if key in metadata:
                raise self.damaged(f"metadata key {key!r}", "once", "a second time")
            metadata[key] = self.value(self.number("I", f"the type of {key!r}"), key)
        return metadata

    def tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        self.expect_room(count, 24, "tensors")
        found: dict[str, tuple[str, tuple[int, ...], int]] = {}
        by_number = {kind.number: name for name, kind in KINDS.items()}
        for index in range(count):
            name = self.string(f"the name of tensor {index}")
            what = f"tensor {name!r}"
            if name in found:
                raise self.damaged(what, "once", "a second time")
            axes = self.number("I", f"the number of axes of {what}")
            if axes > _MOST_AXES:
                raise self.damaged(what, f"at most {_MOST_AXES} axes", axes)
            shape = tuple(self.number("Q", f"the shape of {what}") for _ in range(axes))[::-1]
            number = self.number("I", f"the kind of {what}")
            if number not in by_number:
                raise self.damaged(what, f"a kind that is known ({', '.join(KINDS)})", f"number {number}")
            found[name] = by_number[number], shape, self.number("Q", f"the offset of {what}")
        start = _aligned(self.at, alignment)
        tensors = {name: self.checked(name, info, start, alignment) for name, info in found.items()}
        self.refuse_overlap(tensors)
        return tensors

    def checked(self, name: str, info: tuple[str, tuple[int, ...], int], start: int, alignment: int) -> TensorInfo:
        """Sizes are Python's integers, which don't overflow."""
        kind, shape, offset = info
        what = f"tensor {name!r}"
        if 0 in shape:
            raise self.damaged(what, "no axis of length 0", list(shape))
        row = shape[-1] if shape else 1
        if row % KINDS[kind].block:
            raise self.damaged(what, f"rows of a multiple of {KINDS[kind].block} numbers ({kind})", row)
        if offset % alignment:
            raise self.damaged(what, f"an offset that is a multiple of {alignment}", offset)
        nbytes = _nbytes(kind, shape)
        if start + offset + nbytes > self.file_size:
            place = f"{nbytes} bytes from byte {start + offset} on ({kind}, shape {list(shape)})"
            raise self.damaged(what, place, f"the end of the file at {self.file_size}")
        return TensorInfo(kind, shape, start + offset, nbytes)

    def refuse_overlap(self, tensors: Mapping[str, TensorInfo]) -> None:
        end, before = 0, ""
        for name, info in sorted(tensors.items(), key=lambda item: item[1].offset):
            if info.offset < end:
                raise self.damaged(f"tensor {name!r}", "bytes of its own", f"some that are also {before!r}'s")
            end, before = info.offset + info.nbytes, name

    def value(self, number: int, key: str, depth: int = 0) -> Any:
        """A metadata value of the type `number`."""
        if number in _NUMBERS:
            return self.number(_NUMBERS[number], repr(key))
        if number == _STRING:
            return self.string(repr(key))
        if number != _ARRAY:
            raise self.damaged(f"metadata key {key!r}", f"a type from 0 to {max(_NUMBERS)}", number)
        if depth == _DEEPEST:
            raise self.damaged(f"metadata key {key!r}", f"at most {_DEEPEST} arrays in one another", "more")
        of = self.number("I", f"the type of {key!r}")
        count = self.number("Q", f"the length of {key!r}")
        what = f"elements of {key!r}"
        if of in _NUMBERS:
            layout = f"<{self.expect_room(count, struct.calcsize('<' + _NUMBERS[of]), what)}{_NUMBERS[of]}"
            self.at += struct.calcsize(layout)
            return list(struct.unpack_from(layout, self.data, self.at - struct.calcsize(layout)))
        if of == _STRING:
            return self.strings(self.expect_room(count, 8, what), key)
        return [self.value(of, key, depth + 1) for _ in range(self.expect_room(count, 12, what))]

    def strings(self, count: int, key: str) -> list[str]:
        """An array of strings: `string` in a loop of its own, since vocabularies have hundreds of thousands."""
        data, at = self.data, self.at
        strings: list[str] = []
        limit, length_of = len(data) - 8, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_of(data, at)[0] if at <= limit else len(data) + 1
                if at > len(data):
                    raise self.cut_short(f"element {len(strings)} of {key!r}")
                strings.append(str(data[start:at], "utf-8"))
        except UnicodeDecodeError:
            raise self.damaged(f"element {len(strings)} of {key!r}", "UTF-8", bytes(data[start:at][:40])) from None
        self.at = at
        return strings

    def string(self, what: str) -> str:
        length = self.number("Q", what)
        if length > len(self.data) - self.at:
            raise self.cut_short(what)
        content = bytes(self.data[self.at : self.at + length])
        self.at += length
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(what, "UTF-8", content[:40]) from None

    def number(self, letter: str, what: str) -> Any:
        layout = "<" + letter
        if struct.calcsize(layout) > len(self.data) - self.at:
            raise self.cut_short(what)
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def expect_room(self, count: int, least: int, what: str) -> int:
        """`count` again, if that many things of at least `least` bytes can follow."""
        room = (len(self.data) - self.at) // least
        if count > room:
            raise self.damaged(f"{count} {what}", f"at most {room} in the rest of the file", count)
        return count

    def cut_short(self, what: str) -> UserError:
        end = "the end of the file"
        if self.file_size > len(self.data):
            end = f"more than the {_LONGEST_HEADER >> 20} MiB that metadata can take here"
        return self.damaged("the header", f"{what} at byte {self.at}", end)

    def damaged(self, what: str, expected: object, found: object) -> UserError:
        return UserError(f"{self.path} is damaged: {what}: expected {expected}, found {found}")


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get(_ALIGNMENT, _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment < 1 << 20 or alignment & (alignment - 1):
        raise UserError(f"{path}: {_ALIGNMENT}: expected a power of two below 2^20, found {alignment!r:.40}")
    return alignment


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _nbytes(kind: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) // KINDS[kind].block * KINDS[kind].nbytes


# ---- writing


def _type_of(value: Any) -> int:
    if isinstance(value, str):
        return _STRING
    return _ARRAY if isinstance(value, list | tuple) else _TYPE_OF[_letter_of([value], "IiqQ")]


def _letter_of(values: list[Any] | tuple[Any, ...], integers: str) -> str:
    """struct's letter for numbers of one type; of `integers`, the first that holds all."""
    kinds = set(map(type, values))
    if kinds == {bool}:
        return "?"
    if kinds == {float}:
        return "f"
    if kinds == {int}:
        for letter in integers:
            bits = 8 * struct.calcsize("<" + letter)
            least, limit = (0, 1 << bits) if letter.isupper() else (-1 << bits - 1, 1 << bits - 1)
            if least <= min(values) and max(values) < limit:
                return letter
    raise UserError(f"metadata of GGUF can't hold {values[:3]}: it must be of one type")


def _packed(value: Any) -> bytes:
    """A metadata value without its type."""
    if isinstance(value, str):
        content = value.encode("utf-8")
        return struct.pack("<Q", len(content)) + content
    if not isinstance(value, list | tuple):
        return struct.pack("<" + _letter_of([value], "IiqQ"), value)
    if not value or isinstance(value[0], str | list | tuple):
        of = _type_of(value[0]) if value else _STRING
        if any(_type_of(element) != of for element in value):
            raise UserError(f"metadata of GGUF can't hold {value[:3]}: it must be of one type")
        return struct.pack("<IQ", of, len(value)) + b"".join(map(_packed, value))
    letter = _letter_of(value, "iqQ")
    return struct.pack(f"<IQ{len(value)}{letter}", _TYPE_OF[letter], len(value), *value)


def _encoded(path: Path, name: str, kind: str, tensor: Tensor) -> memoryview:
    from leftward.formats.quants import quantise

    try:
        return memoryview(quantise(kind, tensor).numpy())  # type: ignore[arg-type]
    except UserError as error:
        raise UserError(f"cannot write {path}: tensor {name}: {error}") from None


def _write_aligned(file: BinaryIO, content: bytes | memoryview, alignment: int) -> None:
    file.write(content)
    file.write(bytes(_aligned(len(content), alignment) - len(content)))
