"""`leftward train`: a recipe, or text and the defaults, to a run directory."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leftward.cli import INTERRUPTED, STARTED
from leftward.errors import UserError
from leftward.training.progress import Interrupted

if TYPE_CHECKING:
    from leftward.runs import Run
    from leftward.training.recipe import Recipe


RecipeAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [key.sub=value]...",
        help="A .yaml file, or the name of a recipe that comes with leftward (gpt2-124m …), and settings over it.",
        show_default=False,
    ),
]


def train(
    recipe_and_overrides: RecipeAndOverrides = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text: a file, directory, glob, - (stdin) or builtin:python-reference. Repeatable."),
    ] = None,
    out: Annotated[str | None, typer.Option(help="The run directory. Default: a new one under runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run from its last checkpoint.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the whole recipe, every field, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Train a model on text, from a recipe or with the defaults.

    Example: leftward train --data book.txt training.minutes=10 model.n_layers=8
    """
    from leftward.training.recipe import Recipe

    arguments = list(recipe_and_overrides or [])
    if resume is not None:
        if arguments or data or out or dry_run:
            raise UserError("--resume goes on with the run's own recipe: give it alone")
        from leftward import runs

        show_result(watched(runs.resume, resume), as_json)
        return
    if not data and not arguments:
        raise UserError("nothing to train on: give a recipe, or text with --data PATH (`leftward train --help`)")
    values = recipe_values(arguments, data, out)
    recipe = Recipe.from_dict(values)
    if sized := what_size_settles(values):
        typer.echo(f"{sized}\n" if dry_run else sized, err=not dry_run)
    if dry_run:
        typer.echo(recipe.to_yaml(), nl=False)
        return
    from leftward import runs

    show_result(watched(runs.train, recipe), as_json)


def recipe_values(arguments: list[str], data: list[str] | None, out: str | None) -> dict[str, Any]:
    """What a recipe and settings make, with --data and --out laid over them."""
    from leftward.overrides import override
    from leftward.training.recipe import read_recipe

    named = arguments and "=" not in arguments[0]
    values = override(read_recipe(arguments[0]) if named else {}, arguments[1:] if named else arguments)
    if data:
        section = values.get("data")
        path = data[0] if len(data) == 1 else data
        values = {**values, "data": {**(section if isinstance(section, dict) else {}), "path": path}}
    return {**values, "out": out} if out is not None else values


def what_size_settles(values: dict[str, Any]) -> str:
    """The lines that say what a recipe's size settles, as comments of YAML; none where it has no size."""
    from leftward.training import recipe, size

    if values.get("size") is None:
        return ""
    settled = size.derived(recipe.with_preset(values))
    title = f"# size {values['size']} settles, each to be overridden by itself:"
    return "\n".join([title, *(f"#   {key}: {value}" for key, value in settled.items())])


def watched(train_or_resume: Callable[..., Run], what: Recipe | Path) -> Run:
    """Train before the user's eyes; where that is interrupted, say how to go on."""
    try:
        return train_or_resume(what, started=STARTED)
    except Interrupted as error:
        how = "saved; go on" if error.saved else "stopped at once; go on from the last checkpoint"
        typer.echo(f"\n{how} with: leftward train --resume {shlex.quote(str(error.directory))}", err=True)
    except KeyboardInterrupt:
        typer.echo("\ninterrupted before training began: nothing was written; run the same command again", err=True)
    raise SystemExit(INTERRUPTED)


def show_result(run: Run, as_json: bool) -> None:
    summary = run.summary
    if as_json:
        typer.echo(json.dumps({"run": str(run.directory), **summary}))
        return
    directory = shlex.quote(str(run.directory))
    typer.echo(
        f"validation loss {summary['val_loss']:.4f} ({summary['val_bits_per_byte']:.4f} bits/byte) after "
        f"{summary['steps']:,} steps, {summary['tokens']:,} tokens, {summary['wall_s']:.1f} s\n"
        f'the model is in {directory}; try: leftward generate {directory} ""'
    )
