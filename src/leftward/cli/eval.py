"""`leftward eval`: the loss of any model on text, or of a run on its own validation split."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from leftward.errors import UserError, nearest
from leftward.formats.directory import check_model

if TYPE_CHECKING:
    from leftward.data.sources import Piece, Source
    from leftward.training.progress import Observer


def evaluate(
    model: Annotated[Path, typer.Argument(help="A run or model directory, a .gguf file, or owner/name on the hub.")],
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text, as for `train`. Repeatable. Absent: the run's own validation split."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Tokens by which a window of a text goes on, each scored behind what the window holds before it. "
            "Default: half the context; the validation split of a run: as in training."
        ),
    ] = None,
    text_field: Annotated[str, typer.Option(help="The field of .jsonl and .parquet that holds the text.")] = "text",
    document_separator: Annotated[str | None, typer.Option(help="Text that ends a document inside a file.")] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="fp32|bf16", help="The numbers to compute with. Default: the run's, or fp32.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Loss, perplexity and bits per byte, over every token of a text but those that nothing comes before.

    Example: leftward eval runs/my-run --data book.txt --stride 64
    """
    if dtype not in (None, "fp32", "bf16"):
        raise UserError(f"dtype is {dtype!r}: {nearest(dtype, ['fp32', 'bf16'])}")
    check_model(model)
    if not data and not (model / "tokens").is_dir():
        raise UserError(f"{model} has no validation split of its own: give the text to evaluate on with --data")
    precision = cast(Literal["fp32", "bf16"] | None, dtype)
    with contextlib.ExitStack() as stack:
        sources = _sources(data, stack) if data else []  # before torch: a mistyped name is answered at once
        if data:
            from leftward.language_model import load
            from leftward.training.watcher import Watcher

            loaded = load(model, dtype=precision or "fp32")
            watcher = stack.enter_context(Watcher())
            evaluation = loaded.evaluate(_pieces(sources, text_field, document_separator, watcher), stride=stride)
        else:
            from leftward.runs import Run

            evaluation = Run(model).evaluate(stride=stride, dtype=precision)
    result = {
        "model": str(model),
        "loss": evaluation.loss,
        "perplexity": evaluation.perplexity,
        "bits_per_byte": evaluation.bits_per_byte,
        "tokens": evaluation.tokens,
        "bytes": evaluation.bytes,
    }
    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(
        f"loss {evaluation.loss:.4f} nats a token, perplexity {evaluation.perplexity:,.2f}, "
        f"{evaluation.bits_per_byte:.4f} bits/byte, over {evaluation.tokens:,} tokens and {evaluation.bytes:,} bytes"
    )


def _sources(data: list[str], stack: contextlib.ExitStack) -> list[Source]:
    from leftward.data import sources

    if sources.STDIN in data:
        spooled = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "stdin"
        sources.spool_stdin(spooled)
        data = [str(spooled) if name == sources.STDIN else name for name in data]
    return sources.find(data, sources.Report())


def _pieces(found: list[Source], text_field: str, separator: str | None, observer: Observer) -> Iterator[Piece]:
    """The text of the sources, and a word on how far it is read."""
    from leftward.data import sources

    done = 0
    for piece in sources.read(found, sources.Report(), text_field=text_field, document_separator=separator):
        yield piece
        done += len(piece.text.encode())
        observer.preparing("evaluated", done, None)
