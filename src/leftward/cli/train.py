"""`leftward train`: a recipe, or text and the defaults, to a run directory."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leftward.cli import INTERRUPTED, STARTED
from leftward.cli.explore import following
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
    init_from: Annotated[
        str | None, typer.Option("--from", help="Begin from this model: a run, model directory, .gguf or hub name.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="The run directory. Default: a new one under runs/.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run from its last checkpoint.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the whole recipe, every field, and stop.")] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --dry-run: what each of so many ranks would hold and send, without starting any."
        ),
    ] = None,
    explore: Annotated[
        bool, typer.Option("--explore", help="Beside it a page that shows the weights of the moment from inside.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
) -> None:
    """Train a model on text, from a recipe or with the defaults.

    Example: leftward train --data book.txt training.minutes=10 model.n_layers=8
    Or from a model: leftward train --data book.txt --from SmolLM2-135M.gguf lora.rank=8
    """
    from leftward.training.recipe import Recipe

    arguments = list(recipe_and_overrides or [])
    if ranks is not None and not dry_run:
        raise UserError("--ranks is for --dry-run: a run has the ranks that torchrun starts")
    if resume is not None:
        if data or init_from or out or dry_run or not all(each.startswith("parallel.") for each in arguments):
            raise UserError("--resume goes on with the run's own recipe: give it alone, or with parallel.… settings")
        with _ranks() as tells:
            from leftward import runs

            with following(resume) if explore and tells else contextlib.nullcontext():
                run = watched(functools.partial(runs.resume, resume, *arguments), tells)
            if tells:
                show_result(run, as_json)
        return
    with _ranks() as tells:
        if not data and not arguments:
            raise UserError("nothing to train on: give a recipe, or text with --data PATH (`leftward train --help`)")
        values = recipe_values(arguments, data, out)
        if init_from is not None:
            values = {**values, "init_from": init_from}
        recipe = Recipe.from_dict(values)
        if dry_run:
            _rehearse(recipe, values, ranks, as_json)
            return
        if tells and (sized := what_size_settles(values)):
            typer.echo(sized, err=True)
        from leftward import runs

        with contextlib.ExitStack() as stack:
            if explore and tells:
                from leftward.training.directory import directory_of

                recipe = recipe.model_copy(update={"out": str(directory_of(recipe))})
                stack.enter_context(following(Path(str(recipe.out))))
            run = watched(functools.partial(runs.train, recipe), tells)
        if tells:
            show_result(run, as_json)


@contextlib.contextmanager
def _ranks() -> Iterator[bool]:
    """Whether this process tells, of those that torchrun has started; what ends one of them ends all."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    from leftward.training.parallel import joined

    with joined() as world:
        yield world.is_first


def _rehearse(recipe: Recipe, values: dict[str, Any], ranks: int | None, as_json: bool) -> None:
    """What would be trained; or, on so many `ranks`, what each of them would hold and send."""
    if recipe.init_from is not None:
        from leftward.training.finetuning import settled

        recipe = settled(recipe)
    if ranks is not None:
        from leftward.cli import rehearsal
        from leftward.training.rehearsal import rehearse

        found = rehearse(recipe, ranks)
        typer.echo(json.dumps(found.to_dict()) if as_json else "\n".join(rehearsal.lines(found)))
        return
    if sized := what_size_settles(values):
        typer.echo(f"{sized}\n")
    typer.echo(recipe.to_yaml(), nl=False)


def names_recipe(arguments: list[str]) -> bool:
    """Whether the first of RECIPE and settings is a recipe: a file may have a "=" in its name, as those of tune do."""
    return bool(arguments) and ("=" not in arguments[0] or os.path.isfile(arguments[0]))  # noqa: PTH113 - never raises


def recipe_values(arguments: list[str], data: list[str] | None, out: str | None) -> dict[str, Any]:
    """What a recipe and settings make, with --data and --out laid over them."""
    from leftward.overrides import override
    from leftward.training.recipe import read_recipe

    named = names_recipe(arguments)
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


def watched(train_or_resume: Callable[..., Run], tells: bool = True) -> Run:
    """Train before the user's eyes; where that is interrupted, say how to go on, if this process `tells`."""
    try:
        return train_or_resume(started=STARTED)
    except Interrupted as error:
        how = "saved; go on" if error.saved else "stopped at once; go on from the last checkpoint"
        message = f"{how} with: leftward train --resume {shlex.quote(str(error.directory))}"
    except KeyboardInterrupt:
        message = "interrupted before training began: nothing was written; run the same command again"
    if tells:
        typer.echo(f"\n{message}", err=True)
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
