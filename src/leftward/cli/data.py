"""`leftward data`: text of any size → a dataset that runs train on; its report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from leftward.cli import INTERRUPTED
from leftward.errors import UserError, nearest

if TYPE_CHECKING:
    from leftward.data.batches import Dataset
    from leftward.text.tokenizer import Tokenizer

app = typer.Typer(no_args_is_help=True, help="Prepare text for training once, on all cores or many machines.")

_KINDS = ("bpe", "char", "word")
_DEDUP = ("none", "exact", "near")
_SCRIPTS = 8  # shown; the rest together


@app.command()
def prepare(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="Text: files, directories, globs, - (stdin) or builtin:…, as for train."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The dataset directory.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A directory with a tokenizer (a run, a model, a dataset), or a .model or .gguf file."),
    ] = None,
    kind: Annotated[str, typer.Option(metavar="bpe|char|word", help="Of the tokenizer to train, if none is given.")] = (
        "bpe"
    ),
    vocab_size: Annotated[int | None, typer.Option(help="Of that tokenizer. Default: what suits the text.")] = None,
    val_path: Annotated[
        list[str] | None, typer.Option(help="Text to validate on; without it a part is held out. Repeatable.")
    ] = None,
    val_fraction: Annotated[float, typer.Option(help="The share of the text held out, by whole documents.")] = 0.1,
    text_field: Annotated[str, typer.Option(help="The field of .jsonl and .parquet that holds the text.")] = "text",
    document_separator: Annotated[str | None, typer.Option(help="Text that ends a document inside a file.")] = None,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="List unreadable lines of .jsonl in rejected.log; don't stop.")
    ] = False,
    dedup: Annotated[
        str, typer.Option(metavar="none|exact|near", help="Leave out copies of documents; near ones too.")
    ] = "none",
    near_threshold: Annotated[
        float, typer.Option(help="Near copies share at least this part of all their runs of five words.")
    ] = 0.8,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Do the I-th of N shares; the last one that ends makes the dataset.")
    ] = "1/1",
    processes: Annotated[int | None, typer.Option(help="That encode. Default: one a core, if it is worth it.")] = None,
    seed: Annotated[int, typer.Option(help="Decides which documents are held out.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Make a dataset of text. Killed at any moment, the same command goes on and makes the same bytes.

    Example: leftward data prepare 'web/*.jsonl.zst' --out data/web --tokenizer runs/my-run
    """
    for name, value, valid in (("kind", kind, _KINDS), ("dedup", dedup, _DEDUP)):
        if value not in valid:
            raise UserError(f"{name} is {value!r}: {nearest(value, valid)}")
    if tokenizer is not None and (kind != "bpe" or vocab_size is not None):
        raise UserError("--kind and --vocab-size are for a tokenizer that is trained here: leave them out")
    parts = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not parts:
        raise UserError(f"shard is {shard!r}: write it as I/N, the first of four is 1/4")

    from leftward.data.prepare import prepare_shard
    from leftward.data.settings import Settings
    from leftward.training.watcher import Watcher

    settings = Settings(
        paths=tuple(paths),
        val_paths=tuple(val_path or ()),
        text_field=text_field,
        document_separator=document_separator,
        bad_lines="skip" if skip_bad_lines else "stop",
        val_fraction=val_fraction,
        dedup=cast(Literal["none", "exact", "near"], dedup),
        near_threshold=near_threshold,
        tokenizer=cast(Literal["bpe", "char", "word"], kind),
        vocab_size=vocab_size,
    )
    ready = None if tokenizer is None else _tokenizer(tokenizer)
    number, of = int(parts[1]), int(parts[2])
    try:
        with Watcher() as watcher:
            dataset = prepare_shard(
                settings,
                out,
                number,
                of,
                seed=seed,
                tokenizer=ready,
                processes=processes,
                on_progress=watcher.preparing,
            )
    except KeyboardInterrupt:
        typer.echo("\ninterrupted; the same command goes on", err=True)
        raise SystemExit(INTERRUPTED) from None
    if dataset is None:
        typer.echo(f"share {shard} of {out} is done; the dataset is made when all are", err=True)
        if as_json:
            typer.echo(json.dumps({"dataset": None}))
    else:
        _show(out, as_json)


@app.command()
def merge(
    directories: Annotated[list[Path], typer.Argument(metavar="DIR...", help="What --out of the shards was.")],
    out: Annotated[Path | None, typer.Option(help="The dataset directory. Default: DIR, if there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Make a dataset of shards that were prepared in directories of their own.

    Example: leftward data merge shards/1 shards/2 --out data/web
    """
    from leftward.data.merge import merge as merge_shards

    if out is None and len(directories) > 1:
        raise UserError("several directories make one dataset: say with --out where")
    target = out or directories[0]
    merge_shards(target, directories)
    _show(target, as_json)


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A dataset, or a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """What is in a dataset: documents, tokens, bytes a token, scripts, the longest document, what was left out."""
    _show(directory if not (directory / "tokens").is_dir() else directory / "tokens", as_json)


def _tokenizer(path: Path) -> Tokenizer:
    """Raises: UserError where there is none."""
    from leftward.text.tokenizer import Tokenizer

    if path.suffix == ".model":
        return Tokenizer.from_sentencepiece(path)
    if path.suffix == ".gguf":
        from leftward.formats.gguf import GGUF

        return Tokenizer.from_gguf(GGUF.open(path).metadata)
    if not path.exists():
        raise UserError(f"{path} does not exist: give a directory with a tokenizer, or a .model or .gguf file")
    return Tokenizer.load(path.parent if path.is_file() else path)


def _show(directory: Path, as_json: bool) -> None:
    from leftward.data.batches import Dataset

    dataset = Dataset.open(directory)
    typer.echo(json.dumps(_plain(dataset)) if as_json else "\n".join(_lines(dataset)))


def _plain(dataset: Dataset) -> dict[str, Any]:
    index = dataset.index
    values: dict[str, Any] = {
        "dataset": str(dataset.directory),
        "fingerprint": dataset.fingerprint,
        "vocab_size": dataset.vocab_size,
    }
    if dataset.parts:
        return {**values, "mix": [{"weight": part.weight, **_plain(part.dataset)} for part in dataset.parts]}
    counts = ("documents", "characters", "bytes", "tokens")
    splits = {name: {key: side[key] for key in counts} for name, side in index["splits"].items()}
    return {**values, "splits": splits, "notes": dataset.notes, **index.get("report", {})}


def _lines(dataset: Dataset) -> Iterator[str]:
    """The report for people."""
    if dataset.parts:
        total = sum(part.weight for part in dataset.parts)
        for part in dataset.parts:
            yield f"{part.weight / total:.1%} of the tokens are of:"
            yield from _lines(part.dataset)
        return
    values = _plain(dataset)
    yield f"{dataset.directory}: vocabulary {dataset.vocab_size:,}, fingerprint {dataset.fingerprint}"
    for title, side in zip(("training", "validation"), values["splits"].values(), strict=True):
        yield (
            f"{title}: {side['documents']:,} documents, {side['tokens']:,} tokens, {side['bytes']:,} bytes "
            f"({side['bytes'] / max(1, side['tokens']):.2f} a token)"
        )
    if "scripts" in values:  # which an older version did not count
        shares = list(values["scripts"].items())
        others = sum(share for _, share in shares[_SCRIPTS:])
        shown = [f"{name} {share:.1%}" for name, share in [*shares[:_SCRIPTS], *[("others", others)] * bool(others)]]
        longest = values["longest"]
        yield f"letters: {', '.join(shown) or 'none'}"
        yield (
            f"longest document: {longest['tokens']:,} tokens, {longest['bytes']:,} bytes, number "
            f"{longest['document']:,} of {longest['split']}: “{' '.join(longest['begins'].split())}…”"
        )
    yield from dataset.notes
    bad = values.get("bad_lines", [])
    yield from (f"  {line}" for line in bad)
    if (n := values.get("left_out", {}).get("bad_lines", 0)) > len(bad):
        from leftward.data.merge import REJECTED

        yield f"  … all {n:,} of them are in {dataset.directory / REJECTED}"
