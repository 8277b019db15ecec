"""`leftward generate`: a model directory and a prompt to text on stdout.

In a pipe, stdout holds the new text and nothing else; on a terminal the prompt stands before it. Remarks go to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from leftward.cli import INTERRUPTED
from leftward.cli.sampling import with_sampling_options
from leftward.errors import UserError, nearest
from leftward.formats.directory import check_model

if TYPE_CHECKING:
    from leftward.generation.decode import Event


@with_sampling_options()
def generate(
    model: Annotated[Path, typer.Argument(help="A run or model directory, a .gguf file, or owner/name on the hub.")],
    sampling: dict[str, Any],
    prompt: Annotated[
        str | None, typer.Argument(help="What to continue. Absent or -: read from stdin. Empty: a new text.")
    ] = None,
    samples: Annotated[int, typer.Option("-n", "--samples", help="How many continuations.")] = 1,
    truncate: Annotated[
        str | None, typer.Option(metavar="left", help="left: drop the beginning of a prompt that is too long.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a sample, one a line.")] = False,
    dtype: Annotated[str, typer.Option(metavar="fp32|bf16", help="The numbers to compute with.")] = "fp32",
) -> None:
    """Continue a prompt, token by token.

    Example: leftward generate runs/my-run "Once upon a time" --max-tokens 100 --seed 1
    """
    for name, value, valid in (("truncate", truncate, ["left"]), ("dtype", dtype, ["fp32", "bf16"])):
        if value is not None and value not in valid:
            raise UserError(f"{name} is {value!r}: {nearest(value, valid)}")
    check_model(model)
    text = _read_stdin() if prompt is None or prompt == "-" else prompt

    from leftward.language_model import load  # torch takes a second or two, which no mistake above waits for

    language_model = load(model, dtype=cast(Literal["fp32", "bf16"], dtype))
    settled = language_model.sampling(sampling).seeded()
    events = language_model.events([text], settled, n=samples, truncate=cast(Literal["left"] | None, truncate))
    seeds = [settled.seeded(i).seed for i in range(samples)]
    try:
        reasons = _print_json(events, text, seeds) if as_json else _print_text(events, text, samples)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except KeyboardInterrupt:
        typer.echo("")
        raise SystemExit(INTERRUPTED) from None
    if "context" in reasons:
        context = language_model.config.max_seq_len
        typer.echo(f"[the context is full: prompt and output have {context} tokens, the model's most]", err=True)
    if "seed" not in sampling and settled.temperature > 0 and not as_json:
        typer.echo(f"[seed {settled.seed}]", err=True)


def _read_stdin() -> str:
    if sys.stdin.isatty():
        typer.echo("[reading the prompt; end it with Ctrl-D]", err=True)
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt on stdin is not UTF-8 text (byte {error.start})") from None
    return text.removesuffix("\n").removesuffix("\r")  # the newline that `echo` and editors add


def _print_text(events: Iterator[Event], prompt: str, samples: int) -> set[str]:
    """Show the first unfinished sample as it grows, and the others, which grow beside it, when their turn comes."""
    lead = typer.style(prompt, bold=True) if sys.stdout.isatty() else ""
    waiting = [""] * samples
    finished = [False] * samples
    reasons: set[str] = set()
    shown = -1

    def begin(sample: int) -> None:
        title = f"--- sample {sample + 1} of {samples} ---\n" if samples > 1 else ""
        _write(("\n" if sample and title else "") + title + lead + waiting[sample])

    for event in events:
        if shown < 0:
            begin(shown := 0)
        if event.row == shown:
            _write(event.text)
        else:
            waiting[event.row] += event.text
        if event.finish_reason is not None:
            reasons.add(event.finish_reason)
            finished[event.row] = True
        while finished[shown] and shown + 1 < samples:
            _write("\n")
            begin(shown := shown + 1)
    _write("\n")
    return reasons


def _print_json(events: Iterator[Event], prompt: str, seeds: list[int | None]) -> set[str]:
    """A line for each sample, in their order."""
    results: list[dict[str, Any]] = [
        {"sample": i, "seed": seed, "prompt": prompt, "text": "", "tokens": 0} for i, seed in enumerate(seeds)
    ]
    reasons: set[str] = set()
    for event in events:
        result = results[event.row]
        result["text"] += event.text
        result["tokens"] += event.token_id is not None
        if event.finish_reason is not None:
            result["finish_reason"] = event.finish_reason
            reasons.add(event.finish_reason)
    for result in results:
        _write(json.dumps(result, ensure_ascii=False) + "\n")
    return reasons


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
