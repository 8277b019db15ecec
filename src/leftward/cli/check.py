"""`leftward check`: the proofs, a line each; exit code 1 where one fails."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from leftward.proofs.report import Proof

_COLOURS = {"pass": "green", "fail": "red", "skip": "bright_black"}


def check(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN|MODEL|PRESET",
            help="A run directory, whose data is looked at too; a model directory; or the name of a preset, tried "
            "small. Absent: the default architecture.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prove what people get silently wrong: the mask, the cache, the targets, padding, weights, overlap of the data.

    Example: leftward check runs/my-run
    """
    from leftward.config import Config
    from leftward.planning import path_of
    from leftward.presets import preset_settings

    if target is not None and path_of(target) is None:
        preset_settings(target)  # a mistyped name is answered before torch is loaded
    from leftward.proofs.checking import check

    report = check(target or Config(vocab_size=4096), seed=seed, on_proof=None if as_json else _show)
    typer.echo(json.dumps(report.to_dict()) if as_json else f"{report.subject}: {report.summary}")
    if not report.passed:
        raise typer.Exit(1)


def _show(proof: Proof) -> None:
    from leftward.proofs.report import show

    on_terminal = sys.stdout.isatty()
    lines = show(proof, shutil.get_terminal_size().columns if on_terminal else None)
    colour = _COLOURS[proof.outcome] if on_terminal else None
    typer.echo(typer.style(lines[0], fg=colour) + lines[1:])
    sys.stdout.flush()
