"""A part of a trace: plain data and named arrays, and the bytes that carry them to a page, a report or a file.

Little-endian, so that a browser reads it with typed arrays as it is:

    "LWP1"  uint32 length of the header  header (JSON, UTF-8, padded with spaces to 4 bytes)  the arrays' bytes

The header is {"version", "name", "params", "data", "arrays": [{"name", "dtype", "shape", "offset"}]}, with offsets from
the first byte behind it. What comes from a file is checked before it is believed: nothing in it is ever executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from leftward.errors import UserError, printable

VERSION = 1
_MAGIC = b"LWP1"
_DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype("<f4"), "u8": np.dtype("u1"), "i32": np.dtype("<i4")}
_NAMES = {"f": "f32", "u": "u8", "b": "u8", "i": "i32"}  # by numpy's kind

Value = str | int | float
Array = NDArray[Any]


@dataclass(frozen=True)
class Part:
    """What a trace answers to one question."""

    name: str
    params: Mapping[str, Value] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    """What JSON can say. In bytes, a number that is not finite becomes None."""
    arrays: Mapping[str, Array] = field(default_factory=dict)
    """Floats are kept in 32 bits, whole numbers in 32, bytes and truths in 8."""

    @property
    def key(self) -> str:
        return key_of(self.name, self.params)

    def to_bytes(self) -> bytes:
        listed, blobs, offset = [], [], 0
        for name, array in self.arrays.items():
            dtype = _NAMES[array.dtype.kind] if array.dtype != np.uint8 else "u8"
            blob = np.ascontiguousarray(array, dtype=_DTYPES[dtype]).tobytes()
            listed.append({"name": name, "dtype": dtype, "shape": list(array.shape), "offset": offset})
            blob += b"\0" * (-len(blob) % 4)
            blobs.append(blob)
            offset += len(blob)
        header = {
            "version": VERSION,
            "name": self.name,
            "params": dict(self.params),
            "data": _plain(dict(self.data)),
            "arrays": listed,
        }
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        text += b" " * (-len(text) % 4)
        return b"".join((_MAGIC, len(text).to_bytes(4, "little"), text, *blobs))

    @classmethod
    def from_bytes(cls, content: bytes) -> Part:
        """Raises: UserError: the bytes are no part, are cut short, or a newer leftward wrote them."""
        header, start = read_header(content, _MAGIC)
        check_version(header)
        name, params, data = header.get("name"), header.get("params"), header.get("data")
        listed = header.get("arrays")
        if not (isinstance(name, str) and isinstance(params, dict) and isinstance(data, dict)):
            damaged("its header lacks name, params or data")
        if not isinstance(listed, list) or not all(isinstance(value, str | int | float) for value in params.values()):
            damaged("its header lists no arrays, or has parameters that are no plain values")
        return cls(name, params, data, dict(_array(entry, content, start) for entry in listed))


def key_of(name: str, params: Mapping[str, Value]) -> str:
    """What a part is filed under: its name and parameters in the order of their names."""
    return name + "".join(f"&{key}={params[key]}" for key in sorted(params))


def read_header(content: bytes, magic: bytes) -> tuple[dict[str, Any], int]:
    """The JSON behind `magic` and where what follows it begins. Raises: UserError."""
    if content[:4] != magic:
        damaged(f"it does not begin with {magic.decode()}")
    start = 8 + int.from_bytes(content[4:8], "little")
    if len(content) < 8 or start > len(content):
        damaged("its header is cut short")
    try:
        header = _plain(json.loads(content[8:start].decode()))
    except (ValueError, RecursionError):
        damaged("its header is no JSON, or no text that can be written again")
    if not isinstance(header, dict):
        damaged("its header is no JSON object")
    return header, start


def check_version(header: Mapping[str, Any]) -> None:
    version = header.get("version")
    if type(version) is not int or version < 1:
        damaged("its header says no version")
    if version > VERSION:
        raise UserError(f"the trace has version {version}, and this leftward reads up to {VERSION}: update leftward")


def damaged(why: str) -> NoReturn:
    raise UserError(f"this is no trace, or a damaged one: {why}")


def _array(entry: Any, content: bytes, start: int) -> tuple[str, Array]:
    if not isinstance(entry, dict):
        damaged("an array has no description")
    name, dtype, shape, offset = (entry.get(key) for key in ("name", "dtype", "shape", "offset"))
    if not isinstance(name, str) or not isinstance(dtype, str) or dtype not in _DTYPES:
        damaged("an array has no name, or a kind of number that is not known")
    if not isinstance(shape, list) or len(shape) > 8 or any(type(n) is not int or n < 0 for n in shape):
        damaged(f"the array {name[:40]!r} has no shape")
    count = math.prod(shape)
    if not count and math.prod(n or 1 for n in shape) > len(content):
        damaged(f"the array {name[:40]!r} holds nothing, and says to be large")
    if type(offset) is not int or offset < 0 or start + offset + count * _DTYPES[dtype].itemsize > len(content):
        damaged(f"the array {name[:40]!r} is cut short")
    return name, np.frombuffer(content, _DTYPES[dtype], count, start + offset).reshape(shape)


def _plain(value: Any, room: int = 64) -> Any:
    """What JSON can say and browsers can read: no infinity, no half of a surrogate pair, no nesting without end.

    Raises: ValueError: it says one of the latter two.
    """
    if not room:
        raise ValueError("it is nested too deeply")
    if isinstance(value, dict):
        return {_plain(str(key)): _plain(each, room - 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, room - 1) for each in value]
    if isinstance(value, str):
        value.encode()
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- what a part must be


def check_data(value: Any, kind: Any, where: str) -> None:
    """Raises: UserError: `value`, out of JSON, is not of this kind.

    A kind is str, bool, None, or int, one of 64 bits; float, any number, or None for one that is not finite; object,
    anything; (kind, kind), either; [kind], a list of any length; [kind, kind, …], of this one; {str: kind}, an object
    with any names; {name: kind, …}, one with these names at least, but for those with "?" behind them.
    """
    if isinstance(kind, tuple):
        kind = next((each for each in kind if _looks_like(value, each)), kind[0])
    if not _looks_like(value, kind):
        damaged(f"{where} is something else")
    if isinstance(kind, list):
        if len(kind) > 1 and len(value) != len(kind):
            damaged(f"{where} has {len(value)} entries in the place of {len(kind)}")
        for i, each in enumerate(value):
            check_data(each, kind[i % len(kind)], f"{where}[{i}]")
    elif isinstance(kind, dict) and str in kind:
        for name, each in value.items():
            check_data(each, kind[str], f"{where}.{printable(name, 40)}")
    elif isinstance(kind, dict):
        for marked, each in kind.items():
            name = marked.removesuffix("?")
            if name in value:
                check_data(value[name], each, f"{where}.{name}")
            elif name == marked:
                damaged(f"{where} lacks {name}")


def check_arrays(arrays: Mapping[str, Array], wanted: Mapping[str, str], sizes: Mapping[str, int], where: str) -> None:
    """Raises: UserError: an array is absent, or not what is wanted.

    That is written "f32 T 12": the kind of its numbers, and its shape in the names of `sizes` and in numbers; * is any
    size, + any but 0. One with "?" behind its name may be absent.
    """
    for name, description in wanted.items():
        dtype, *dims = description.split()
        array = arrays.get(name.removesuffix("?"))
        if array is None:
            if not name.endswith("?"):
                damaged(f"{where} lacks the array {name}")
        elif array.dtype != _DTYPES[dtype] or not _has_shape(array, dims, sizes):
            found = f"{_NAMES[array.dtype.kind]} {' '.join(map(str, array.shape))}"
            damaged(f"{where}: its array {name.removesuffix('?')} is {found}, and must be {description}")


def _has_shape(array: Array, dims: Sequence[str], sizes: Mapping[str, int]) -> bool:
    def fits(size: int, dim: str) -> bool:
        if dim in ("*", "+"):
            return dim == "*" or size > 0
        return size == (sizes[dim] if dim in sizes else int(dim))

    return array.ndim == len(dims) and all(map(fits, array.shape, dims))


def _looks_like(value: Any, kind: Any) -> bool:
    """Whether it is, but for what is in it."""
    if isinstance(kind, list | dict):
        return isinstance(value, type(kind))
    if type(value) is int and abs(value) >= 1 << 63:
        return False
    if kind is float:
        return value is None or type(value) in (int, float)
    return kind is object or (value is None if kind is None else type(value) is kind)
