"""The `leftward` command: its verbs, and what becomes of errors.

A user's mistake is one line on stderr and exit code 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import io
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import leftward
from leftward.cli import (
    INTERRUPTED,
    bench,
    chat,
    check,
    convert,
    data,
    explore,
    generate,
    inspect_file,
    plan,
    quickstart,
    report,
    runs,
    train,
    tune,
)
from leftward.cli import eval as evaluation
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
app.command()(tune.tune)
app.command()(runs.runs)
app.command("eval")(evaluation.evaluate)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(explore.explore)
app.command()(report.report)
app.command()(plan.plan)
app.command()(convert.convert)
app.command()(inspect_file.inspect_file)
app.command()(check.check)
app.add_typer(bench.app, name="bench")
app.add_typer(data.app, name="data")


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
    # Libraries and vocabularies are hundreds of thousands of objects that stay: to look through them again and again
    # for what could go would be a tenth of the time to a first token.
    gc.set_threshold(50_000, 20, 50)
    atexit.register(gc.freeze)  # nor does the interpreter look through them before it ends, which took most of a second
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever called us
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - stays open as long as the process
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another, and goes on
    try:
        code = app(prog_name="leftward", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED:  # Ctrl-C where no verb answers it: while it is loading
            _leave("interrupted", INTERRUPTED)
    except SystemExit as leaving:
        if leaving.code != 1 or not isinstance(leaving.__context__, BrokenPipeError):
            raise
        sys.exit(0)  # Typer's answer to a reader of stdout that has seen enough
    except UserError as error:
        if _debug:
            raise
        _fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        _leave("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if _debug or error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail("cannot write the output: the disk is full")
    except Exception as error:
        # Typer's own errors for wrong arguments; where their class lives differs between its versions.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            sys.exit(0)
        command = getattr(getattr(error, "ctx", None), "command_path", "leftward")
        _fail(f"{error.format_message().rstrip('.')} (see `{command} --help`)")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    """One line, and the exit code of a user's mistake."""
    _leave(" ".join(message.split()), 2)


def _leave(message: str, code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # nobody may be there to read it
        print(f"leftward: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    run()
