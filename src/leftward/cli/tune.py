"""`leftward tune`: runs over a grid of settings and several seeds; or where to begin with the learning rate."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leftward.cli import INTERRUPTED
from leftward.errors import UserError
from leftward.training.progress import Interrupted

if TYPE_CHECKING:
    from leftward.training.tuning import Outcome, Range


def tune(
    recipe_and_settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [key.sub=a,b,c]...",
            help="A recipe as for `train`, and settings with one value or several.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each combination, from the recipe's seed on.")] = 3,
    find_lr: Annotated[
        bool, typer.Option("--find-lr", help="One short run with a rising learning rate, and what it suggests.")
    ] = False,
    data: Annotated[list[str] | None, typer.Option(help="Text, as for `train`. Repeatable.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Holds the run directories. Default: runs/tune- and the name of the data.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train every combination of settings with several seeds: mean ± standard deviation, the best first.

    What has finished is not repeated: the same command goes on after an interruption, and with more --seeds.

    Example: leftward tune shakespeare-char --data input.txt optimizer.lr=0.01,0.02,0.04 --seeds 3
    """
    from leftward.cli.train import names_recipe, recipe_values
    from leftward.training import tuning
    from leftward.training.watcher import Watcher

    arguments = list(recipe_and_settings or [])
    if not arguments and not data:
        raise UserError("nothing to tune: give a recipe, or text with --data PATH (`leftward tune --help`)")
    if find_lr and out is not None:
        raise UserError("--find-lr keeps no run: leave --out away")
    n_named = int(names_recipe(arguments))
    try:
        with Watcher() as watcher:
            if find_lr:
                rates = tuning.find_rates(recipe_values(arguments, data, None), watcher)
            else:
                grid = tuning.parse_grid(arguments[n_named:])
                outcomes = tuning.tune(recipe_values(arguments[:n_named], data, None), grid, seeds, out, watcher)
    except Interrupted:
        typer.echo("\nstopped; " + ("nothing is kept" if find_lr else "the same command goes on"), err=True)
        raise SystemExit(INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(rates) if find_lr else {"outcomes": [*map(_plain, outcomes)]}))
    else:
        typer.echo("\n".join(_range(rates) if find_lr else [_table(outcomes)]))


def _range(rates: Range) -> Iterator[str]:
    from leftward.cli.chart import chart

    points = list(zip(rates.factors, rates.losses, strict=True))
    yield chart(points, "smoothed loss", "what the recipe's rates were multiplied by", log_x=True)
    settings = " ".join(f"{key}={rate:g}" for key, rate in rates.rates.items())
    yield ""
    fastest = rates.suggested / rates.multiple
    yield f"the loss fell fastest at {fastest:.2g} times; suggested is {rates.multiple:g} times that:"
    yield f"  {settings}"


_MEASURES = {"bits/byte": "val_bits_per_byte", "val loss": "val_loss"}


def _table(outcomes: Sequence[Outcome]) -> str:
    from leftward.cli.table import Column, table

    keys = list(outcomes[0].settings)
    columns = [Column(key, [json.dumps(o.settings[key]) for o in outcomes], left=True) for key in keys]
    for rank, (title, name) in enumerate(_MEASURES.items()):
        columns.append(Column(title, [_measured(outcome, name) for outcome in outcomes], rank))
    runs = [[trial.summary is not None for trial in outcome.trials] for outcome in outcomes]
    columns.append(Column("runs", [f"{sum(done)} of {len(done)}" for done in runs], 2))
    return table(columns)


def _measured(outcome: Outcome, name: str) -> str:
    mean, deviation = outcome.mean(name), outcome.deviation(name)
    if not math.isfinite(mean):
        return "diverged"
    return f"{mean:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")


def _plain(outcome: Outcome) -> dict[str, Any]:
    means = {name: outcome.mean(name) for name in _MEASURES.values()}
    return {
        "settings": outcome.settings,
        **{name: mean if math.isfinite(mean) else None for name, mean in means.items()},
        **{f"{name}_deviation": outcome.deviation(name) for name in means},
        "runs": [
            {"directory": str(trial.directory), "seed": trial.seed, "summary": trial.summary}
            for trial in outcome.trials
        ],
    }
