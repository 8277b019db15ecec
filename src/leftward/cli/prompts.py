"""A file of prompts, for `leftward generate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leftward import files
from leftward.errors import UserError


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Objects with a `prompt`: each line of a .jsonl file, a text or such an object, or of any other file (-: of stdin)
    as a text. Empty lines are passed over.

    Raises: UserError, with the line's number.
    """
    text = _stdin() if str(path) == "-" else files.read_text(path)
    lines = ((number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip())
    if path.suffix != ".jsonl":
        return _some([{"prompt": line} for _, line in lines], path)
    return _some([_record(line, f"{path}:{number}") for number, line in lines], path)


def _some(records: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    if not records:
        raise UserError(f"{path} has no prompt in it: write one a line")
    return records


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: this is not JSON: {error}") from None
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("prompt"), str):
        raise UserError(f'{where}: this must be a text or an object with a text as "prompt"')
    try:
        value["prompt"].encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: the prompt has half a surrogate pair, which is no text") from None
    return dict(value)


def _stdin() -> str:
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompts on stdin are not UTF-8 text (byte {error.start})") from None
