"""Tokens as people can read them: spaces and newlines that show, bytes put together to the character that they spell,
control tokens by their names."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from leftward.errors import UserError
from leftward.text.tokenizer import Tokenizer

_SHOWN = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}


def readable(text: str) -> str:
    """`text` with a sign for all that would not show."""
    return "".join(_SHOWN.get(c) or (c if _shows(c) else f"\\u{ord(c):04x}") for c in text)


def label(tokenizer: Tokenizer, token_id: int) -> str:
    """One token by itself."""
    if (name := _control_name(tokenizer, token_id)) is not None:
        return name
    try:
        data = tokenizer.token_bytes(token_id)
    except UserError:
        return f"[{token_id}]"  # it pads the vocabulary
    try:
        return readable(data.decode()) or f"[{token_id}]"
    except UnicodeDecodeError:
        return _bytes(data)


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[dict[str, Any]]:
    """The tokens of a text: id, label, text, control. Tokens that spell one character together have the same `group`,
    the number of the first; a label then is "é 1/2". `text` joins to the whole text: it stands at a group's last."""
    found: list[dict[str, Any]] = []
    held: list[tuple[int, bytes]] = []

    def close() -> None:
        text = b"".join(data for _, data in held).decode("utf-8", errors="replace")
        for i, (token_id, data) in enumerate(held):
            is_last = i == len(held) - 1
            shown = _bytes(data) if "\ufffd" in text else f"{readable(text)} {i + 1}/{len(held)}"
            shown = (readable(text) or f"[{token_id}]") if len(held) == 1 and "\ufffd" not in text else shown
            group = len(found) - i
            found.append(_piece(token_id, shown, text if is_last else "", False, group))
        held.clear()

    for token_id in ids:
        name = _control_name(tokenizer, token_id)
        if name is not None:
            close()
            found.append(_piece(token_id, name, "", True, len(found)))
            continue
        held.append((token_id, tokenizer.token_bytes(token_id)))
        if not _is_cut(b"".join(data for _, data in held)):
            close()
    close()
    return found


def _piece(token_id: int, shown: str, text: str, is_control: bool, group: int) -> dict[str, Any]:
    return {"id": token_id, "label": shown, "text": text, "control": is_control, "group": group}


def _is_cut(data: bytes) -> bool:
    """Whether it ends within a character that more bytes may complete."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _control_name(tokenizer: Tokenizer, token_id: int) -> str | None:
    if token_id not in tokenizer.special_ids:
        return None
    try:
        name = tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")
    except UserError:
        name = ""
    role = {tokenizer.bos_id: "BOS", tokenizer.eos_id: "EOS"}.get(token_id, "")
    return readable(name) or f"<{role or token_id}>"


def _bytes(data: bytes) -> str:
    return " ".join(f"{byte:02X}" for byte in data)


def _shows(character: str) -> bool:
    return character.isprintable() and unicodedata.category(character) not in ("Cf", "Co", "Zs")
