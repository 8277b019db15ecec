"""`leftward inspect-file`: what a model file claims, before anyone trusts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def inspect_file(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="A .gguf or .safetensors file, or a model directory.", show_default=False),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the metadata and tensors that a file claims to hold, without loading it.

    Example: leftward inspect-file SmolLM2-135M-Instruct.Q4_1.gguf
    """
    from leftward.formats.contents import contents_of, lines_of

    contents = contents_of(model)
    if as_json:
        typer.echo(json.dumps(contents))
        return
    for line in lines_of(contents):
        typer.echo(line)
