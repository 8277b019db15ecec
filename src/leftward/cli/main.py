"""The `leftward` command: its verbs, and what becomes of errors.

A user's mistake is one line on stderr and exit code 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

import leftward
from leftward.cli import generate, quickstart, train
from leftward.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Decoder-only language models, whole: raw text → tokens → a trained model that writes.",
)
app.command()(quickstart.quickstart)
app.command()(train.train)
app.command()(generate.generate)


_debug = False


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"leftward {leftward.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    global _debug
    _debug = debug


def run() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows another, and goes on
            stream.reconfigure(errors="replace")
    try:
        app()
    except UserError as error:
        if _debug:
            raise
        print(f"leftward: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("leftward: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run()
