"""What bytes each token stands for, read from the decoder of a tokenizer.json.

Every kind of vocabulary comes down to this: a token is some bytes, perhaps half a character, and the bytes of all
tokens together are the text. Not here: the joining itself, which is `Tokenizer.decode` and its stream.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import decoders, normalizers

from leftward.errors import UserError, printable

AnyKind = Literal["bpe", "char", "word", "spm", "gpt1"]
"""bpe: byte-level, as GPT-2's. char, word: ours. spm: as SentencePiece's, ▁ for the space. gpt1: </w> ends a word."""

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Decoding:
    """How the tokens of one vocabulary are spelled."""

    kind: AnyKind
    replaced: tuple[tuple[str, str], ...] = ()
    """What stands for something else in a token, in this order: ▁ for the space."""
    has_byte_tokens: bool = False
    """Tokens like <0xE2> stand for a byte."""
    drops_first_space: bool = False
    """The space before a text's first word was put there by encoding."""
    drops_last_space: bool = False
    """A word's end is spelled as a space, which a text's last word doesn't have."""

    def bytes_of(self, token: str, added: bool) -> bytes:
        """Added tokens of a byte-level vocabulary are spelled as they are; elsewhere they are tokens like others."""
        if self.kind == "bpe":
            spelled = not added and all(symbol in BYTE_OF for symbol in token)
            return bytes(BYTE_OF[symbol] for symbol in token) if spelled else token.encode()
        if self.has_byte_tokens and (code := _BYTE.fullmatch(token)) and not (added and self.kind == "word"):
            return bytes.fromhex(code[1])
        for mark, text in self.replaced:
            token = token.replace(mark, text)
        return token.encode()


def decoding_of(library: Any) -> Decoding:
    """Of a `tokenizers.Tokenizer`. Raises: UserError, where it decodes in a way that is not known here."""
    decoder = state(library.decoder)
    steps = decoder.get("decoders", [decoder])
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        return Decoding("bpe")
    if decoder == state(decoders.Fuse()) and library.pre_tokenizer is None and library.normalizer is None:
        return Decoding("char")
    if decoder == state(word_decoder()) and state(library.normalizer) == state(normalizers.Prepend(" ")):
        return Decoding("word", has_byte_tokens=True, drops_first_space=True)
    kind: AnyKind | None = None
    replaced: list[tuple[str, str]] = []
    fused = bytes_too = first = last = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": str(text)}:
                kind, replaced = "spm", [*replaced, (mark, text)]
            case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": scheme}:
                kind, replaced, first = "spm", [*replaced, (mark, " ")], first or scheme != "never"
            case {"type": "BPEDecoder", "suffix": str(mark)}:
                kind, replaced, last = "gpt1", [*replaced, (mark, " ")], True
            case {"type": "ByteFallback"}:
                bytes_too = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if fused:  # of the text, not of each token
                first = True
            case _:
                kind = None
                break
    if kind is None:
        names = " + ".join(str(step.get("type")) for step in steps)
        raise UserError(
            f"this tokenizer decodes with {names}, which is not supported; byte-level BPE and SentencePiece's ways are"
        )
    return Decoding(kind, tuple(replaced), bytes_too, first, last)


def word_decoder() -> Any:
    """That of our word vocabularies."""
    return decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def state(component: Any) -> dict[str, Any]:
    """A part of the library's pipeline as plain data."""
    content: dict[str, Any] = json.loads(component.__getstate__()) if component is not None else {}
    return content


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn what the library raises into one line: bare Exceptions, and Rust panics that are not Exceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, UserError):
        raise
    except BaseException as error:
        raise UserError(f"{what}: {printable(str(error), 300)}") from None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where it is visible, else the next free one from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


BYTE_OF = _byte_alphabet()
"""A byte-level token's symbols → bytes."""
SYMBOL_OF = {byte: symbol for symbol, byte in BYTE_OF.items()}
