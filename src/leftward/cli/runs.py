"""`leftward runs`: what runs there are and what became of them, side by side. No torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leftward.errors import UserError, nearest

if TYPE_CHECKING:
    from leftward.training.history import Axis, Entry


def runs(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR]...", help="Run directories, or some that hold them.", show_default="runs"),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show their curves, and where their recipes differ.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the curves into this file: .png, .svg or .pdf.")] = None,
    axis: Annotated[
        str, typer.Option(metavar="steps|tokens|minutes", help="What the curves are drawn against.")
    ] = "tokens",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a run, one a line.")] = False,
) -> None:
    """List runs, the best first: by bits per byte of validation, which compares across tokenizers.

    Example: leftward runs runs/a runs/b --compare --plot curves.png
    """
    from leftward.training import history

    if axis not in history.AXES:
        raise UserError(f"axis is {axis!r}: {nearest(axis, history.AXES)}")
    directories = directories or [Path("runs")]
    found = history.find(directories)
    if not found:
        raise UserError(f"no run in {', '.join(map(str, directories))}: `leftward train` makes one")
    entries = sorted(map(history.entry, found), key=lambda e: (e.bits_per_byte is None, e.bits_per_byte or 0.0))
    if as_json:
        for entry in entries:
            typer.echo(json.dumps({**dataclasses.asdict(entry), "directory": str(entry.directory)}))
    else:
        typer.echo("\n".join(_listed(entries)))
    if compare and not as_json:
        typer.echo("\n".join(_compared(entries, axis)))
    if plot is not None:
        history.draw([(str(entry.directory), entry.directory) for entry in entries], plot, axis)
        typer.echo(f"curves drawn into {plot}", err=True)


def _listed(entries: Sequence[Entry]) -> Iterator[str]:
    from leftward.cli.table import Column, table

    def column(title: str, name: str, form: str, rank: int) -> Column:
        values = [getattr(entry, name) for entry in entries]
        return Column(title, ["–" if value is None else format(value, form) for value in values], rank)

    states = [entry.state + (", early" if entry.stopped_early else "") for entry in entries]
    yield table(
        [
            Column("", [str(number) for number in range(1, len(entries) + 1)]),
            Column("run", [str(entry.directory) for entry in entries], left=True),
            column("parameters", "parameters", ",", 2),
            column("steps", "steps", ",", 5),
            column("tokens", "tokens", ",", 4),
            column("val loss", "val_loss", ".4f", 3),
            column("bits/byte", "bits_per_byte", ".4f", 0),
            column("minutes", "minutes", ".1f", 6),
            Column("state", states, 1, left=True),
        ]
    )
    for entry in entries:
        if entry.problem is not None and entry.state == "damaged":
            yield f"{entry.directory}: {entry.problem}"


def _compared(entries: Sequence[Entry], axis: Axis) -> Iterator[str]:
    from leftward.cli.chart import MOST_CURVES, charts
    from leftward.training import history

    numbers = {entry.directory: number for number, entry in enumerate(entries, start=1)}
    curves = {f"{number} {run}": history.curve(run, axis) for run, number in numbers.items()}
    drawn = {name: points for name, points in curves.items() if points}
    if drawn:
        yield ""
        yield charts(dict([*drawn.items()][:MOST_CURVES]), "validation bits/byte", axis)
        if len(drawn) > MOST_CURVES:
            yield f"{'':9}… and {len(drawn) - MOST_CURVES} more runs, which are worse (--plot draws all)"
    if differences := history.differences(entry.directory for entry in entries):
        yield ""
        yield "Where the recipes differ, each value with the runs that have it"
    for key, by_run in differences.items():
        by_value: dict[str, list[str]] = {}
        for run, value in by_run.items():
            by_value.setdefault(json.dumps(value, ensure_ascii=False), []).append(str(numbers[run]))
        shown = "; ".join(f"{value} in {', '.join(having)}" for value, having in by_value.items())
        yield f"  {key}: {shown}"
