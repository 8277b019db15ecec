"""Where `leftward generate` has its prompts from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from leftward import files
from leftward.errors import UserError


def read_stdin(what: str) -> str:
    """What is on stdin. Raises: UserError, where it is no text."""
    if sys.stdin.isatty():
        typer.echo(f"[reading the {what}; end with Ctrl-D]", err=True)
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"the {what} on stdin: this is not UTF-8 text (byte {error.start})") from None


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Objects with a `prompt`: each line of a .jsonl file, a text or such an object, or of any other file (-: of stdin)
    as a text. Empty lines are passed over.

    Raises: UserError, with the line's number.
    """
    text = read_stdin("prompts") if str(path) == "-" else files.read_text(path)
    # Not splitlines, for which a line ends in some characters that JSON and texts have within.
    lines = ((number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1))
    said = [(number, line) for number, line in lines if line.strip()]
    if not said:
        raise UserError(f"{path} has no prompt in it: write one a line")
    if path.suffix == ".jsonl":
        return [_record(line, f"{path}:{number}") for number, line in said]
    return [{"prompt": line} for _, line in said]


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()  # as it comes back
    except UnicodeEncodeError:
        raise UserError(f"{where}: half a surrogate pair is no text") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: this is not JSON: {error}") from None
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise UserError(f'{where}: this must be a text or an object with a text as "prompt"')
    return value
