"""Reading SentencePiece's .model files: a protocol buffer (sentencepiece_model.proto) of pieces, scores and settings.

Only the fields that decide how text becomes ids. Not here: encoding with them, which foreign.py leaves to the library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from leftward.errors import UserError


class PieceKind(IntEnum):
    """ModelProto.SentencePiece.Type; GGUF's tokenizer.ggml.token_type has the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Piece(NamedTuple):
    text: str
    score: float
    kind: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The defaults are the format's."""

    pieces: tuple[Piece, ...]
    """One for each id."""
    unigram: bool = True
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    charsmap: bytes = b""
    """Rules that rewrite characters before anything else (NFKC, for most)."""


_MODEL_TYPES = {1: True, 2: False}  # unigram, bpe

# field number in TrainerSpec or NormalizerSpec → our field
_TRAINER_FIELDS = {40: "unk_id", 41: "bos_id", 42: "eos_id"}
_NORMALIZER_FIELDS = {3: "add_dummy_prefix", 4: "remove_extra_whitespaces", 5: "escape_whitespaces"}


def parse_model(data: bytes) -> SentencePieceModel:
    """Raises: UserError, where the bytes are no such model."""
    pieces: list[Piece] = []
    settings: dict[str, int | bytes] = {}
    try:
        for number, value in _fields(data):
            if number == 1:
                piece = dict(_fields(_bytes(value)))
                score = struct.unpack("<f", _bytes(piece.get(2, b"\0" * 4)))[0]
                pieces.append(Piece(_bytes(piece.get(1, b"")).decode(), score, _int(piece.get(3, 1))))
            elif number == 2:
                trainer = dict(_fields(_bytes(value)))
                model_type = _int(trainer.get(3, 1))
                if model_type not in _MODEL_TYPES:
                    raise UserError(f"its model type is {model_type}: only unigram (1) and BPE (2) are supported")
                settings["unigram"] = _MODEL_TYPES[model_type]
                settings |= {name: _signed(trainer[n]) for n, name in _TRAINER_FIELDS.items() if n in trainer}
            elif number == 3:
                normalizer = dict(_fields(_bytes(value)))
                settings["charsmap"] = _bytes(normalizer.get(2, b""))
                settings |= {name: bool(normalizer[n]) for n, name in _NORMALIZER_FIELDS.items() if n in normalizer}
    except (ValueError, struct.error) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"it is no SentencePiece model ({error})") from None
    if not pieces:
        raise UserError("it is no SentencePiece model (it has no pieces)")
    return SentencePieceModel(tuple(pieces), **settings)  # type: ignore[arg-type]


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The (number, value) pairs of one message of the wire format (protobuf.dev/programming-guides/encoding)."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        kind, value = key & 7, 0
        if kind == 0:
            value, place = _varint(data, place)
            yield key >> 3, value
            continue
        if kind == 2:
            size, place = _varint(data, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind} at byte {place}")
        if size > len(data) - place:
            raise ValueError(f"a field of {size} bytes at byte {place}, where {len(data) - place} are left")
        yield key >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for i, byte in enumerate(data[place : place + 10]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, place + i + 1
    raise ValueError(f"a number without end at byte {place}")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError(f"the number {value} where bytes belong")
    return value


def _int(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("bytes where a number belongs")
    return value


def _signed(value: int | bytes) -> int:
    """-1, which stands for none, is written as a number of 64 bits."""
    number = _int(value)
    return number - 2**64 if number >= 2**63 else number
