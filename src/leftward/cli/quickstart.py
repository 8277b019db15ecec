"""`leftward quickstart`: one command, no download, and a model that writes."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import sys
from typing import Annotated

import typer

from leftward.cli.train import recipe_values, watched


def quickstart(
    data: Annotated[
        list[str] | None, typer.Option(help="Your own text instead of Python's language reference. Repeatable.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="How long to train.")] = 1.0,
    out: Annotated[str | None, typer.Option(help="The run directory. Default: a new one under runs/.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 1,
) -> None:
    """Train a small model on real text in about a minute, and let it write.

    The recipe is `quickstart`, which `leftward train quickstart` takes too. Without --data the text is the language
    reference that comes with every Python.
    """
    from leftward import runs
    from leftward.cli.chart import chart
    from leftward.training.recipe import Recipe

    arguments = ["quickstart", f"training.minutes={minutes}", f"seed={seed}"]
    run = watched(functools.partial(runs.train, Recipe.from_dict(recipe_values(arguments, data, out))))
    curve = [(line["tokens"], line["val_bits_per_byte"]) for line in run.history if "val_loss" in line]
    typer.echo("\n" + chart(curve, "validation bits/byte", "tokens trained on"))
    with contextlib.suppress(KeyboardInterrupt):  # the run is whole: only its samples are cut short
        for number, prompt in enumerate(run.held_out_beginnings(3), start=1):
            typer.echo(f'\n--- sample {number}, after "{" ".join(prompt.split())}" of the text held out ---')
            typer.echo(typer.style(prompt, bold=True), nl=False)
            for piece in run.model.stream(prompt, max_tokens=100, temperature=0.6, seed=number):
                sys.stdout.write(piece)
                sys.stdout.flush()
            typer.echo()
    summary, directory = run.summary, str(run.directory)
    code = f'import leftward as lw; print(lw.load({json.dumps(directory)}).score("Hello, world").bits_per_byte)'
    typer.echo(
        f"\n{summary['params']:,} parameters, {summary['tokens']:,} tokens in {summary['training_s']:.0f} s: "
        f"{summary['val_bits_per_byte']:.3f} bits/byte on text held out.\n"
        f"The run is in {directory}: a Hugging Face model directory too. Next:\n\n"
        f'  leftward generate {shlex.quote(directory)} "The" --temperature 0.7\n'
        f"  leftward train --data YOUR_TEXT.txt training.minutes=10\n"
        f"  python -c {shlex.quote(code)}"
    )
