"""`leftward explore`: look inside a model, in a browser, on this machine alone."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from leftward.cli import INTERRUPTED
from leftward.cli.sampling import WeightsOption, with_sampling_options
from leftward.errors import UserError, missing_extra
from leftward.formats.directory import check_model
from leftward.formats.kinds import Weights

PROMPT = "The cat sat on the mat. The dog sat on the"
_ENDS_WITHIN = 5.0  # seconds
IDLE = (
    *("typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "stop"),
    *("stop_ids", "min_tokens", "n", "best_of", "logprobs", "prompt_logprobs"),
    *("json_schema", "regex", "choice", "grammar"),
)
"""The options of sampling that a trace has no use for."""


@with_sampling_options(without=IDLE, max_tokens=20)
def explore(
    model: Annotated[Path, typer.Argument(help="A run or model directory, a .gguf file, or owner/name on the hub.")],
    sampling: dict[str, Any],
    prompt: Annotated[
        str | None, typer.Argument(help="The text to begin with; the page takes others.", show_default=PROMPT)
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen. Anything but this machine's own lets others ask.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0: a free one.")] = 8765,
    most_tokens: Annotated[int, typer.Option(help="That a prompt and what follows may have.")] = 4096,
    browser: Annotated[bool, typer.Option(help="Open the page.")] = True,
    follow: Annotated[
        bool, typer.Option("--follow", help="Of a run that goes on: show its weights of the moment, again and again.")
    ] = False,
    dtype: WeightsOption = "stored",
) -> None:
    """Look inside a model: six steps, with its own numbers, in a browser.

    Example: leftward explore runs/my-run "Once upon a time"
    """
    check_installed()
    if not 0 <= port < 65536:
        raise UserError(f"port is {port}: it must be between 0 and 65535")
    if most_tokens < 1:
        raise UserError(f"most-tokens is {most_tokens}: it must be at least 1")
    if follow:
        _wait_for_weights(model)
    check_model(model)
    directory = model if (model / "recipe.yaml").is_file() else None
    if follow and directory is None:
        raise UserError(f"{model} is no run directory (it has no recipe.yaml): there is nothing to follow")

    from leftward.inspection.following import follow as follow_run  # torch takes a second or two
    from leftward.inspection.server import Explorer, serve
    from leftward.inspection.subject import opening
    from leftward.language_model import load

    typer.echo("[reading the model]", err=True)
    language_model = load(model, dtype=cast(Weights, dtype))
    explorer = Explorer(language_model, model.name, most_tokens, directory, follows=follow)
    begins = opening(language_model, PROMPT, most_tokens) if prompt is None else prompt
    explorer.first(begins, **{"max_tokens": 20, **sampling})
    ended = threading.Event()
    if follow and directory is not None:
        arguments = (explorer, directory, ended, cast(Weights, dtype))
        threading.Thread(target=follow_run, args=arguments, daemon=True).start()

    def ready(url: str) -> None:
        typer.echo(f"[{url} – Ctrl-C ends it]", err=True)
        if browser and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.name != "posix"):
            typer.launch(url)

    try:
        serve(explorer, host, port, ready)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    finally:
        ended.set()


def check_installed() -> None:
    """Raises: UserError: the page's server is not installed."""
    for library in ("starlette", "uvicorn"):
        if importlib.util.find_spec(library) is None:
            raise missing_extra(library, "explore", "leftward explore")


@contextlib.contextmanager
def following(directory: Path) -> Iterator[None]:
    """A page that follows the run in `directory`, in a process of its own, which takes one thread from the training.

    Raises: UserError: the page's server is not installed.
    """
    check_installed()
    command = [sys.executable, "-m", "leftward", "explore", str(directory), "--follow", "--port", "0"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=one_thread)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:  # it is in the middle of an answer
            process.kill()
            process.wait()


def _wait_for_weights(directory: Path) -> None:
    """A run has its first ones when its data are prepared. Raises: UserError: it is no directory."""
    if directory.is_file():
        raise UserError(f"{directory} is a file: --follow takes the directory of a run")
    weights = directory / "model.safetensors"
    if not weights.is_file():
        typer.echo(f"[waiting for {weights}]", err=True)
    while not weights.is_file():
        time.sleep(1)
